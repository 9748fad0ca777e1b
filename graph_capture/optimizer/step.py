"""Memory of an optimizer: its state, and the temporaries of one step.

The model of the world: the state depends on the shapes and dtypes of the trainable parameters and
on the optimizer's settings.  So the optimizer's own `step()` runs on storage-less tensors, which
works for any optimizer written in torch; the first step makes the state, and all later steps are
like the second.  Before each step, gradients are unscaled and clipped as the user does.

An optimizer instance may update copies of its own in place of the model's parameters (fp32 master
weights): then the user is assumed to copy the model's gradients to them before each step.

A step with a closure, as that of L-BFGS, evaluates the model at any time; the trace records where.
Such steps follow `graph_capture.optimizer.trajectory`, up to the first one that starts with the
full state, which represents all later ones.

Blind spots: kernels of others than torch, and their state; an optimizer that does something else
every so many steps.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.data_dependent_values import failure
from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.fake_copies.storage_less import (
    StorageLessCopier,
    StorageLessMode,
    storage_less_copy,
)
from planner._graph_capture.joint_graph.joint import tensors_of
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.memory.trace import Block, MemoryTrace
from planner._graph_capture.memory.tracker import MemoryTracker, Workspace
from planner._graph_capture.optimizer.named import instances, make_optimizers, optimizer_name
from planner._graph_capture.optimizer.trajectory import (
    OptimizerTrajectory,
    needs_closure,
    takes_closure,
)
from planner._graph_capture.torch_compat import (
    UnsupportedOperatorException,
    aten_name,
    no_active_modes,
    optimizers_as_on,
    storage_key,
    without_hooks_of_all_optimizers,
)
from planner._graph_capture.training_graph import Category, OptimizerMemory


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Settings of the training loop around `optimizer.step()`."""

    grad_clip: float | None = None
    """Maximum norm of all gradients, by `torch.nn.utils.clip_grad_norm_`."""
    grad_scaler: bool = False
    """True if a `torch.amp.GradScaler` unscales the gradients and makes the step."""
    set_to_none: bool = True
    """As in `optimizer.zero_grad`; it matters here for gradients of the optimizer's own copies."""


@dataclass(frozen=True, slots=True)
class OptimizerTrace:
    """An optimizer from its creation to the end of the step that represents all later ones."""

    name: str
    trace: MemoryTrace
    first_begins: int
    """Number of events when the optimizer, with its initial state, exists."""
    second_begins: int
    """Number of events when the first step is over and its gradients are reset."""
    steady_begins: int
    """Number of events when the last step begins, which represents all later ones."""
    parameters: frozenset[str]
    """Names of the model's parameters whose gradients are reset with the optimizer's."""
    own_copies: int = 0
    """Number of tensors it updates that are no parameters of the model."""
    evaluations: tuple[int, ...] = ()
    """Numbers of events when the step evaluates the model, in all steps."""

    def evaluations_from(self, start: int, stop: int | None = None) -> tuple[int, ...]:
        """The `evaluations` between two numbers of events."""
        return tuple(event for event in self.evaluations
                     if start <= event and (stop is None or event < stop))

    @property
    def state_bytes(self) -> int:
        """Bytes alive from the first step on; if the step evaluates the model, while it does so."""
        levels = self.trace.levels()
        return max((levels[event] for event in self.evaluations),
                   default=levels[self.second_begins])

    @property
    def step_peak_bytes(self) -> int:
        """Maximum of bytes that a step uses in addition to the state."""
        return max(self.trace.levels()[self.first_begins:]) - self.state_bytes

    @property
    def memory(self) -> OptimizerMemory:
        """State and step peak under the optimizer's name."""
        return OptimizerMemory(self.name, self.state_bytes, self.step_peak_bytes)

    def in_backward(self) -> OptimizerTrace:
        """The same optimizer where its steps are part of the backward: nothing but its state."""
        blocks = tuple(self.trace.blocks[block]
                       for block in self.trace.alive_after(self.second_begins))
        count = len(blocks)
        return OptimizerTrace(self.name, MemoryTrace(blocks, tuple(range(count))), 0, count, count,
                              self.parameters, self.own_copies)

    def without_memory(self) -> OptimizerTrace:
        """The same optimizer with its state and its steps on another device."""
        return OptimizerTrace(self.name, MemoryTrace((), ()), 0, 0, 0, self.parameters)


def trace_optimizer_steps(
    optimizer: object, fake_copy: FakeCopy, *,
    with_gradient: Collection[str] | None = None,
    sparse: Mapping[str, torch.Tensor] | None = None, settings: OptimizerSettings | None = None,
    workspace: Workspace = lambda *call: 0,
) -> OptimizerTrace:
    """Steps of `optimizer` on the trainable parameters of the fake copy's model, up to one that
    represents all later ones.

    An instance, or each of several, keeps its groups, settings and state; it belongs to the
    original model and is not touched. (If the step uses a closure, the state is left out.) A class,
    or its name in lower case (`"adamw"`), has its default settings.  `with_gradient`: names of the
    parameters that have a gradient; by default all trainable ones.  `sparse`: gradients in
    coordinate form, by parameter.  `workspace`: bytes that single ops use beyond their results; by
    default none.

    Raises `ValueError` for an unknown name, `TypeError` for an object that is no optimizer, and
    `CaptureError` for an optimizer that cannot run without the values of the gradients; where it
    has stepped before, a warning says so, and its state is counted as it is.
    """
    name = optimizer_name(optimizer)
    try:
        # Parts of a step that would be compiled run as written: they use no less memory.
        with (optimizers_as_on(fake_copy.device), without_hooks_of_all_optimizers(),
              torch.compiler.set_stance("force_eager"),
              warnings.catch_warnings()):
            warnings.simplefilter("ignore")  # the optimizer's own steps warn, too
            make = partial(_Steps, optimizer, fake_copy, with_gradient, sparse or {},
                           settings or OptimizerSettings(), workspace)
            try:
                return make().trace()
            except Exception:
                if not any(map(takes_closure, instances(optimizer) or ())):
                    raise
                return make(may_evaluate=True).trace()  # it needs the closure that it may take
    except Exception as error:
        what = failure(error) if isinstance(error, UnsupportedOperatorException) else error
        found = _as_it_is(name, instances(optimizer) or (), fake_copy)
        if found.state_bytes:
            warnings.warn(f"cannot trace a step of the optimizer {name}: {what}; its state is "
                          "counted as it is now, and nothing for what a step allocates",
                          stacklevel=2)
            return found
        raise CaptureError(f"cannot trace a step of the optimizer {name}: {what}; plan "
                           "without it and leave room for its state") from error


def _as_it_is(name: str, optimizers: Sequence[Optimizer], fake_copy: FakeCopy) -> OptimizerTrace:
    """Optimizers with the state that they have, whose steps allocate nothing."""
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes()
             for tensor in strided_tensors([[*each.state.values()] for each in optimizers])}
    blocks = tuple(Block(size, Category.OPTIMIZER) for size in sizes.values())
    count = len(blocks)
    return OptimizerTrace(name, MemoryTrace(blocks, tuple(range(count))), 0, count, count,
                          frozenset(name for name, parameter in fake_copy.parameters.items()
                                    if parameter.requires_grad))


class _Steps:
    """Steps of optimizers on storage-less parameters."""

    def __init__(self, optimizer: object, fake_copy: FakeCopy,
                 with_gradient: Collection[str] | None, sparse: Mapping[str, torch.Tensor],
                 settings: OptimizerSettings, workspace: Workspace, *,
                 may_evaluate: bool = False) -> None:
        """`may_evaluate`: give a closure to each step that takes one."""
        self.settings, self.may_evaluate = settings, may_evaluate
        self.fake_copy, self.given = fake_copy, instances(optimizer)
        # Some optimizers read the norm of an update.
        self.storage_less = storage_less = storage_less_copy(
            fake_copy, unknown_is_zero=True, device=torch.device("cpu"))
        self.names = {id(tensor): name for name, tensor in [*storage_less.parameters.items()][::-1]}
        self.trainable = [p for p in storage_less.model.parameters() if p.requires_grad]
        self.tracker = MemoryTracker(
            _without_multi_tensor_ops(workspace), device=fake_copy.device,
            trace_device=storage_less.trace_device, resident=storage_less.fake_of.values())
        with storage_less.mode:  # hidden from the tracker: the loss is not the optimizer's
            self.loss = torch.empty(())
        self.evaluations: list[int] = []
        self.begins: list[int] = []
        self.held: set[int] = set()  # storages alive between steps
        if not self.trainable:
            return
        if self.given is None:
            with storage_less.mode, self.tracker:  # some make their state at once
                self.steppers = make_optimizers(
                    optimizer, self.trainable,
                    [id(storage_less.parameters[name]) for name in sparse])
        else:
            self.steppers = _copied(self.given, fake_copy, storage_less)
        groups = [group for stepper in self.steppers for group in stepper.param_groups]
        self.parameters = [p for group in groups for p in group["params"]
                           if p.requires_grad or id(p) not in self.names]
        self.own_copies = [p for p in self.parameters if id(p) not in self.names]
        for group in groups:
            _choose_implementation(group, fake_copy.device)
        self.sparse, self.with_gradient = sparse, with_gradient
        self._give_gradients()

    def _give_gradients(self) -> None:
        """Let each of the model's parameters have its gradient."""
        for parameter in self.parameters:
            known = self.names.get(id(parameter))
            if known is None or parameter.grad is not None:
                continue
            if known in self.sparse:
                parameter.grad = self.sparse[known]
            elif self.with_gradient is None or known in self.with_gradient:
                # Outside of the tracker: gradients are not the optimizer's.
                with no_active_modes(), self.storage_less.mode:
                    parameter.grad = torch.empty_like(parameter)

    def trace(self) -> OptimizerTrace:
        """The trace from the creation of the optimizers to the end of the last step."""
        if not self.trainable:  # state is kept from when some were
            return _as_it_is("none", self.given or (), self.fake_copy)
        tracker, storage_less = self.tracker, self.storage_less
        for stepper in self.steppers:
            own = [value for name, value in vars(stepper).items() if name != "param_groups"]
            for tensor in (*self.own_copies, *tensors_of(own)):
                tracker.follow(tensor)
        scaler = None
        if self.settings.grad_scaler:
            scaler = torch.amp.GradScaler(storage_less.trace_device.type)
            with storage_less.mode, tracker:
                scaler.scale(torch.ones((), device=storage_less.trace_device))  # makes its state
        self._mark()
        own_gradients: set[int | None] = set()
        for _ in self._turns(scaler):
            with storage_less.mode, tracker:
                for parameter in self.own_copies:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                own_gradients |= {tracker.number_of(p.grad) for p in self.own_copies}
                self._give_gradients()
                self._step(scaler)
            if self.settings.set_to_none:
                for parameter in self.own_copies:
                    parameter.grad = None
            self._mark()
        tracker.close()
        labels = {number: self.names.get(id(owner), "")
                  for stepper in self.steppers for owner, state in stepper.state.items()
                  for number in tracker.numbers_of(state)}

        def category_of(number: int) -> Category:
            if number in own_gradients:
                return Category.GRADIENTS
            return Category.OPTIMIZER if number in self.held else Category.TEMPORARIES

        return OptimizerTrace(
            optimizer_name(self.steppers), tracker.trace(category_of, labels), self.begins[0],
            self.begins[1], self.begins[-2],
            # Users of such copies reset the model's gradients by the model's own `zero_grad`.
            frozenset(self.names.values() if self.own_copies
                      else (self.names[id(parameter)] for parameter in self.parameters)),
            len(self.own_copies), tuple(self.evaluations))

    def _turns(self, scaler: torch.amp.GradScaler | None) -> Iterator[None]:
        """One turn per step to trace; before each, its trajectory is known."""
        if not any(map(needs_closure, self.steppers)):
            yield from (None, None)
            return
        if scaler is not None:
            raise ValueError("torch's GradScaler makes no steps that take a closure")
        if len(self.steppers) > 1:
            raise ValueError("a step that takes a closure is traced for one optimizer alone")
        (stepper,) = self.steppers
        stepper.state.clear()
        assert isinstance(self.storage_less.mode, StorageLessMode)
        for answers in OptimizerTrajectory(stepper).steps():
            self.storage_less.mode.answer_with(answers)
            yield

    def _mark(self) -> None:
        """Record the boundary between two steps."""
        self.held |= self.tracker.live_numbers()
        self.begins.append(self.tracker.event_count)

    def _step(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and self.settings.grad_clip is not None:
            for stepper in self.steppers:
                scaler.unscale_(stepper)
        closures = [needs_closure(stepper) or (self.may_evaluate and takes_closure(stepper))
                    for stepper in self.steppers]
        if not any(closures):
            self._clip()
        for stepper, closure in zip(self.steppers, closures, strict=True):
            if closure:
                stepper.step(self._evaluate)  # type: ignore[arg-type]
            elif scaler is None:
                stepper.step()
            else:
                scaler.step(stepper)
        if scaler is not None:
            scaler.update()

    def _evaluate(self) -> torch.Tensor:
        """The closure: the model's part is traced elsewhere, and the gradients exist."""
        self.evaluations.append(self.tracker.event_count)
        self._give_gradients()
        self._clip()
        return self.loss

    def _clip(self) -> None:
        if self.settings.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.grad_clip)


def _without_multi_tensor_ops(workspace: Workspace) -> Workspace:
    """`workspace`, but 0 for ops on lists of tensors: they allocate only their results, and are too
    large to be run for a measurement."""
    def bytes_of(func: Any, *call: Any) -> int:
        name = aten_name(func)
        return 0 if name.startswith(("_foreach_", "_fused_", "_amp_")) else workspace(func, *call)

    return bytes_of


def _choose_implementation(group: dict[str, Any], device: torch.device) -> None:
    """Set torch's own choice on a GPU: the trace is on the CPU, where torch would choose the loop
    over single tensors."""
    if (device.type == "cuda" and group.get("foreach", False) is None and not group.get("fused")
            and not group.get("differentiable")):
        group["foreach"] = True


def _copied(optimizers: Sequence[Optimizer], fake_copy: FakeCopy, storage_less: FakeCopy
            ) -> list[Optimizer]:
    """Storage-less copies of the optimizers on the storage-less parameters."""
    copier = StorageLessCopier({})
    for original, fake in fake_copy.fake_of.items():
        copier.fake_of[original] = copier.memo[id(original)] = storage_less.fake_of[fake]
    return [_copy(optimizer, copier) for optimizer in optimizers]


def _copy(optimizer: Optimizer, copier: StorageLessCopier) -> Optimizer:
    def copied(key: str, value: Any) -> Any:
        return copier.tree(value, f"the optimizer's `{key}`")

    copy = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):  # the user's own code, which the step does not need
            vars(copy)[name] = OrderedDict()
        elif name not in ("param_groups", "state", "step"):  # a scheduler replaces `step`
            vars(copy)[name] = copied(name, value)
    copy.param_groups = [
        {key: [copier.tensor(parameter) for parameter in value] if key == "params"
         else copied(key, value) for key, value in group.items()}
        for group in optimizer.param_groups]
    copy.state = defaultdict(dict)
    for key, value in optimizer.state.items():
        owner = copier.tensor(key) if isinstance(key, torch.Tensor) else key
        copy.state[owner] = copied("state", value)
    return copy
