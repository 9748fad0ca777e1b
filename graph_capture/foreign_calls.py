"""Calls of a model that are no training step: the model then runs as it is written.

The model of the world: a plan is compiled code, which torch runs only under autograd.  Torch runs
other code under a dispatch mode, cannot use the plan in a transform of `torch.func`, and a tracer
must see the model itself.  Such calls are detected before anything is compiled or looked up, so
that they change no state and the next step runs under the plan.

Blind spots: modes for functions (`TorchFunctionMode`) count as part of the step; `torch.export`
with `strict=True` does not call the model at all, and refuses the function that replaces its
forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner._graph_capture.memory.tracker import MemoryTracker
from planner._graph_capture.torch_compat import (
    FakeTensorMode,
    active_modes,
    has_global_hooks,
    is_forward_mode,
    is_traced,
    is_under_transform,
)

_RUNS_AS_WRITTEN = ("so this call runs as the model is written, and may take more than the budget; "
                    "the next step without it runs under the plan")


@dataclass(frozen=True, slots=True)
class ForeignCall:
    """The reason why a call does not run under a plan."""

    reason: str
    is_traced: bool = False
    """True if nothing is trained, so that no budget can be exceeded."""


def foreign_call() -> ForeignCall | None:
    """The reason why the current call is no training step; `None`: it may be one."""
    if is_traced():
        return ForeignCall("the model is being traced", is_traced=True)
    if is_under_transform():
        return ForeignCall("the model is called inside a transform of torch.func (vmap, grad, jvp, "
                           f"vjp), {_RUNS_AS_WRITTEN}")
    if is_forward_mode():
        return ForeignCall("forward-mode differentiation is on (torch.autograd.forward_ad), "
                           f"{_RUNS_AS_WRITTEN}")
    mode = next((mode for mode in active_modes() if not isinstance(mode, MemoryTracker)), None)
    if mode is not None:
        return ForeignCall(f"the dispatch mode {type(mode).__name__} is active, {_RUNS_AS_WRITTEN}",
                           is_traced=isinstance(mode, FakeTensorMode))
    if has_global_hooks():
        return ForeignCall("hooks for all modules are registered (torch.nn.modules.module."
                           f"register_module_*), {_RUNS_AS_WRITTEN}")
    return None
