"""What an optimizer holds from step to step, and what one step of it takes meanwhile.

The model of the world: the state depends on the shapes and dtypes of the trainable parameters and
on the optimizer's settings.  So the optimizer's own `step()` runs on hollow tensors, which works
for any optimizer written in torch; the first step makes the state, the second is like all that
follow.  Before it, gradients are unscaled and clipped as the user does.

An optimizer given as an instance may update copies of its own in place of the model's parameters
(fp32 master weights): then the user is taken to copy the model's gradients to them before each
step.

Blind spots: kernels of others than torch, and what their state is made of; an optimizer whose steps
depend on the gradients' values (L-BFGS), or that does something else every so many steps.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from graph_capture.errors import CaptureError
from graph_capture.fake_twin import FakeTwin
from graph_capture.hollow import HollowCopier, hollow_twin
from graph_capture.memory_trace import Category, MemoryTrace
from graph_capture.memory_tracker import MemoryTracker, Workspace

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


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What the training loop does around `optimizer.step()`."""

    grad_clip: float | None = None
    """Largest norm of all gradients, by `torch.nn.utils.clip_grad_norm_`."""
    grad_scaler: bool = False
    """Whether a `torch.amp.GradScaler` unscales the gradients and makes the step."""
    set_to_none: bool = True
    """As in `optimizer.zero_grad`; it matters here for gradients of the optimizer's own copies."""
    implementation: Literal["for-loop", "fused"] | None = None
    """Of the step, in place of what the optimizer is set to."""


@dataclass(frozen=True, slots=True)
class OptimizerTrace:
    """An optimizer from when it is made to the end of its second step."""

    name: str
    trace: MemoryTrace
    first_begins: int
    """Number of events when the optimizer, with the state that it has, is there."""
    second_begins: int
    """Number of events when the first step is over and its gradients are reset."""
    parameters: frozenset[str]
    """Names of the model's parameters whose gradients are reset with the optimizer's."""
    own_copies: int = 0
    """How many tensors it updates that are no parameters of the model."""

    @property
    def state_bytes(self) -> int:
        """Held from the first step on."""
        return self.trace.levels()[self.second_begins]

    @property
    def step_peak_bytes(self) -> int:
        """The most that either step takes beyond what is held after the first."""
        return max(self.trace.levels()[self.first_begins:]) - self.state_bytes


def trace_optimizer(optimizer: Optimizer | type[Optimizer] | str | None, twin: FakeTwin, *,
                    with_gradient: Collection[str] | None = None,
                    workspace: Workspace = lambda *call: 0) -> OptimizerFootprint:
    """The footprint of `optimizer` on the trainable parameters of the twin's model.

    Arguments and errors are those of `trace_optimizer_steps`.
    """
    if optimizer is None:
        return OptimizerFootprint("none", 0, 0)
    traced = trace_optimizer_steps(optimizer, twin, with_gradient=with_gradient,
                                   workspace=workspace)
    return OptimizerFootprint(traced.name, traced.state_bytes, traced.step_peak_bytes)


def trace_optimizer_steps(
    optimizer: Optimizer | type[Optimizer] | str, twin: FakeTwin, *,
    with_gradient: Collection[str] | None = None, settings: OptimizerSettings | None = None,
    workspace: Workspace = lambda *call: 0,
) -> OptimizerTrace:
    """Two steps of `optimizer` on the trainable parameters of the twin's model.

    An instance keeps its groups, settings and state; it belongs to the model that the twin was made
    from and is not touched.  A class, or its name in lower case (`"adamw"`), has its default
    settings.  `with_gradient`: names of the parameters that have a gradient; by default all that
    are trainable.  `workspace`: what single ops take beyond their results; by default nothing.

    Raises `ValueError` for an unknown name, `TypeError` for something else, and `CaptureError` for
    an optimizer that cannot run without the values of the gradients.
    """
    kind = optimizer_class(optimizer)
    if isinstance(optimizer, str):
        optimizer = kind
    try:
        return _trace(kind.__name__, optimizer, twin, with_gradient,
                      settings or OptimizerSettings(), workspace)
    except Exception as error:
        raise CaptureError(f"cannot trace a step of the optimizer {kind.__name__}: {error}; plan "
                           "without it and leave room for its state") from error


def optimizer_class(optimizer: object) -> type[Optimizer]:
    """The class of an optimizer that is given as an instance, a class or a name.

    Raises `ValueError` for an unknown name and `TypeError` for something else.
    """
    if isinstance(optimizer, str):
        if optimizer.lower() not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {optimizer!r}; expected one of "
                             f"{', '.join(OPTIMIZERS)}, or an instance or class")
        return OPTIMIZERS[optimizer.lower()]
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, Optimizer):
        return type(optimizer)
    raise TypeError(f"expected an optimizer of torch, its class or its name, got "
                    f"{type(optimizer).__name__}")


def _trace(kind: str, optimizer: Optimizer | type[Optimizer], twin: FakeTwin,
           with_gradient: Collection[str] | None, settings: OptimizerSettings,
           workspace: Workspace) -> OptimizerTrace:
    plain = hollow_twin(twin, unknown_is_zero=True)  # some look at the norm of an update
    names = {id(tensor): name for name, tensor in reversed(plain.parameters.items())}
    trainable = [p for p in plain.model.parameters() if p.requires_grad]
    if not trainable:
        return OptimizerTrace(kind, MemoryTrace((), ()), 0, 0, frozenset())
    tracker = MemoryTracker(_without_multi_tensor_ops(workspace), device=twin.device,
                            trace_device=plain.trace_device, resident=plain.fake_of.values())
    if isinstance(optimizer, Optimizer):
        stepper = _copied(optimizer, twin, plain)
    else:
        with plain.mode, tracker:  # some make their state at once
            stepper = optimizer(trainable)
    parameters = [p for group in stepper.param_groups for p in group["params"]
                  if p.requires_grad or id(p) not in names]
    own_copies = [p for p in parameters if id(p) not in names]
    for tensor in (*own_copies, *_tensors(list(stepper.state.values()))):
        tracker.follow(tensor)
    for group in stepper.param_groups:
        _choose_implementation(group, twin.device, settings.implementation)
    for parameter in parameters:
        name = names.get(id(parameter))
        if name is not None and (with_gradient is None or name in with_gradient):
            with plain.mode:  # outside of the tracker: gradients are not the optimizer's
                parameter.grad = torch.empty_like(parameter)
    scaler = None
    if settings.grad_scaler:
        scaler = torch.amp.GradScaler(plain.trace_device.type)
        with plain.mode, tracker:
            scaler.scale(torch.ones((), device=plain.trace_device))  # makes its state
    held = tracker.live_numbers()
    begins = [tracker.event_count]
    own_gradients: set[int | None] = set()
    for _ in range(2):
        with plain.mode, tracker:
            for parameter in own_copies:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
            own_gradients |= {tracker.number_of(p.grad) for p in own_copies}
            _step(stepper, parameters, scaler, settings)
        if settings.set_to_none:
            for parameter in own_copies:
                parameter.grad = None
        held |= tracker.live_numbers()
        begins.append(tracker.event_count)
    tracker.close()
    labels = {number: names.get(id(owner), "") for owner, state in stepper.state.items()
              for tensor in _tensors(state) if (number := tracker.number_of(tensor)) is not None}

    def category_of(number: int) -> Category:
        if number in own_gradients:
            return Category.GRADIENTS
        return Category.OPTIMIZER if number in held else Category.TEMPORARIES

    return OptimizerTrace(
        kind, tracker.trace(category_of, labels), begins[0], begins[1],
        # Who updates copies resets the gradients of the model by the model's own `zero_grad`.
        frozenset(names.values() if own_copies
                  else (names[id(parameter)] for parameter in parameters)),
        len(own_copies))


def _step(stepper: Optimizer, parameters: list[torch.Tensor],
          scaler: torch.amp.GradScaler | None, settings: OptimizerSettings) -> None:
    if settings.grad_clip is not None:
        if scaler is not None:
            scaler.unscale_(stepper)
        torch.nn.utils.clip_grad_norm_(parameters, settings.grad_clip)
    if scaler is None:
        stepper.step()
    else:
        scaler.step(stepper)
        scaler.update()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _without_multi_tensor_ops(workspace: Workspace) -> Workspace:
    """Ops on lists of tensors take nothing beyond their results; they are too large to be run for
    a measurement."""
    def bytes_of(func: Any, *call: Any) -> int:
        name = func._schema.name.removeprefix("aten::")
        return 0 if name.startswith(("_foreach_", "_fused_", "_amp_")) else workspace(func, *call)

    return bytes_of


def _choose_implementation(group: dict[str, Any], device: torch.device,
                           wanted: str | None) -> None:
    """What is wanted, else what torch chooses on a GPU when the user left the choice to it; the
    trace is on the CPU, where it would choose the loop over single tensors."""
    if wanted is not None:
        if "foreach" not in group or (wanted == "fused" and "fused" not in group):
            raise ValueError(f"the optimizer has no variant {wanted}")
        group["foreach"] = False
        if "fused" in group:
            group["fused"] = wanted == "fused"
    elif (device.type == "cuda" and group.get("foreach", False) is None and not group.get("fused")
            and not group.get("differentiable")):
        group["foreach"] = True


def _copied(optimizer: Optimizer, twin: FakeTwin, plain: FakeTwin) -> Optimizer:
    """A hollow copy of the optimizer on the hollow parameters."""
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
    copy.state = defaultdict(dict)
    for key, value in optimizer.state.items():
        owner = copier.tensor(key) if isinstance(key, torch.Tensor) else key
        copy.state[owner] = copied("state", value)
    return copy
