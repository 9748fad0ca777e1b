"""Plan which activations of a PyTorch training step to keep and which to recompute.

    plan = planner.plan(model, inputs, budget="8GB", optimizer="adamw")
    model = plan.apply(model)

Everything public is here; `_graph_capture`, `solvers` and `_apply` are how it is done.  They are
links to folders at the top of the repository, so that a user's own folders of these names do not
shadow them.  The public names are those of `planner.public`, which is imported when one of them is
first asked for, so that the command line shows its help without waiting for the solvers.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if not name.startswith("__") or name == "__all__":
            from importlib import import_module

            public = import_module("planner.public")
            found = {each: getattr(public, each) for each in (*public.__all__, "__all__")}
            globals().update(found)  # where pdoc looks for them
            if name in found:
                return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
