"""Plan which activations of a PyTorch training step to keep and which to recompute.

    plan = planner.plan(model, inputs, budget="8GB", optimizer="adamw")
    model = plan.apply(model)

This package exports the public names of `planner.public`, and imports that module on the first use
of one of them: the command line shows its help without loading the solvers.  `_graph_capture`,
`solvers` and `_apply` are links to folders at the top of the repository, so that a user's own
folders of these names do not shadow them.
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
            globals().update(found)  # for pdoc
            if name in found:
                return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
