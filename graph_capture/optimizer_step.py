"""What an optimizer holds from step to step, and what one step of it takes meanwhile.

The model of the world: the state depends on the shapes and dtypes of the trainable parameters and
on the optimizer's settings.  So the optimizer's own `step()` runs on hollow tensors, which works
for any optimizer written in torch; the first step makes the state, the second shows the
temporaries.  Every trainable parameter is taken to have a gradient.

Blind spots: kernels of others than torch, and what their state is made of; an optimizer whose steps
depend on the gradients' values (L-BFGS).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from graph_capture.allocator import allocated_bytes
from graph_capture.errors import CaptureError
from graph_capture.fake_twin import FakeTwin
from graph_capture.hollow import HollowCopier, hollow_twin
from graph_capture.memory_tracker import MemoryTracker

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): value for name, value in sorted(vars(torch.optim).items(),
                                                  key=lambda item: item[0].lower())
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer}
"""Every class of `torch.optim` by its name in lower case."""


@dataclass(frozen=True, slots=True)
class OptimizerFootprint:
    """Memory of an optimizer, beyond parameters and gradients."""

    name: str
    """Of its class; `none` without an optimizer."""
    state_bytes: int
    """Held from the first step on."""
    step_peak_bytes: int
    """The most that a step takes beyond the state."""


def trace_optimizer(optimizer: Optimizer | type[Optimizer] | str | None,
                    twin: FakeTwin) -> OptimizerFootprint:
    """The footprint of `optimizer` on the trainable parameters of the twin's model.

    An instance keeps its groups, settings and state; it belongs to the model that the twin was made
    from and is not touched.  A class, or its name in lower case (`"adamw"`), has its default
    settings.

    Raises `ValueError` for an unknown name, `TypeError` for something else, and `CaptureError` for
    an optimizer that cannot run without the values of the gradients.
    """
    if optimizer is None:
        return OptimizerFootprint("none", 0, 0)
    if isinstance(optimizer, str):
        if optimizer.lower() not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {optimizer!r}; expected one of "
                             f"{', '.join(OPTIMIZERS)}, or an instance or class")
        optimizer = OPTIMIZERS[optimizer.lower()]
    is_class = isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    if not is_class and not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected an optimizer of torch, its class or its name, got "
                        f"{type(optimizer).__name__}")
    name = optimizer.__name__ if is_class else type(optimizer).__name__
    try:
        return _trace(name, optimizer, twin)
    except Exception as error:
        raise CaptureError(f"cannot trace a step of the optimizer {name}: {error}; plan without it "
                           "and leave room for its state") from error


def _trace(name: str, optimizer: Optimizer | type[Optimizer], twin: FakeTwin) -> OptimizerFootprint:
    plain = hollow_twin(twin, unknown_is_zero=True)  # some look at the norm of an update
    trainable = [p for p in plain.model.parameters() if p.requires_grad]
    if not trainable:
        return OptimizerFootprint(name, 0, 0)
    tracker = MemoryTracker(lambda *call: 0, device=twin.device, trace_device=plain.trace_device,
                            resident=())
    held_bytes = 0
    if isinstance(optimizer, Optimizer):
        stepper, held_bytes = _copied(optimizer, twin, plain)
    else:
        with plain.mode, tracker:  # some make their state at once
            stepper = optimizer(trainable)
    for group in stepper.param_groups:
        _choose_implementation(group, twin.device)
        for parameter in group["params"]:
            if parameter.requires_grad:
                with plain.mode:  # outside of the tracker: gradients are not the optimizer's
                    parameter.grad = torch.empty_like(parameter)
    with plain.mode, tracker:
        stepper.step()
    state_bytes, first_peak_bytes = tracker.live_bytes, tracker.peak_bytes
    tracker.restart_peak()
    with plain.mode, tracker:
        stepper.step()
    tracker.close()
    return OptimizerFootprint(name, held_bytes + state_bytes,
                              max(first_peak_bytes, tracker.peak_bytes) - state_bytes)


def _choose_implementation(group: dict[str, Any], device: torch.device) -> None:
    """What torch chooses on a GPU when the user left the choice to it; the trace is on the CPU,
    where it would choose the loop over single tensors."""
    if (device.type == "cuda" and group.get("foreach", False) is None and not group.get("fused")
            and not group.get("differentiable")):
        group["foreach"] = True


def _copied(optimizer: Optimizer, twin: FakeTwin, plain: FakeTwin) -> tuple[Optimizer, int]:
    """A hollow copy of the optimizer on the hollow parameters, and the bytes of its state."""
    copier = HollowCopier({})
    for original, fake in twin.fake_of.items():
        copier.fake_of[original] = copier.memo[id(original)] = plain.fake_of[fake]

    def copied(key: str, value: Any) -> Any:
        return copier.tree(value, f"the optimizer's `{key}`")

    copy = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):  # the user's own code, which the step does not need
            vars(copy)[key] = OrderedDict()
        elif key not in ("param_groups", "state", "step"):  # a scheduler replaces `step`
            vars(copy)[key] = copied(key, value)
    copy.param_groups = [
        {key: [copier.tensor(parameter) for parameter in value] if key == "params"
         else copied(key, value) for key, value in group.items()}
        for group in optimizer.param_groups]
    before = set(copier.storage_bytes)
    copy.state = defaultdict(dict)
    for key, value in optimizer.state.items():
        owner = copier.tensor(key) if isinstance(key, torch.Tensor) else key
        copy.state[owner] = copied("state", value)
    return copy, sum(allocated_bytes(size, twin.device)
                     for key, size in copier.storage_bytes.items() if key not in before)
