"""A real step, observed from outside: its memory, and that of the loss in the caller's code.

`StepWatch` follows a step on a CPU from its first call to the step of its optimizer.  What was
there when the watch began is given; from then on each op of PyTorch that runs on the calling thread
is seen, and each storage to its release.  A tensor that an op reads without having been seen was
there before, and counts from then on.

The model of the world: a model returns its output, the caller computes a loss and calls
`backward()`, and the model next sees the gradients of its output.  Memory allocated in between, on
the model's device and on the calling thread, is the loss's.  Of this memory, the caller keeps
everything that is still alive when the gradients arrive, except the gradients.

`LossWatch` tracks one such stretch of a real step, as the memory tracker does for a traced one;
`ReplayedLoss` uses the observed memory in a traced step.  Values are not changed: the ops
run that would without a watch.

The workspace of kernels is invisible while they run; so the ops are recorded, without their data,
and measured when no memory of the step is alive (`UnmeasuredLoss`).

Blind spots: for `StepWatch`, workspace that nobody has measured, memory of compiled code between
its inputs and outputs, and other threads; for `LossWatch`, a product over all elements, whose
gradient autograd computes differently when watched, losses on another thread, and a caller in a
dispatch mode of its own or an output of a subclass of tensors, where nothing is tracked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from planner._graph_capture.errors import OtherOutputs
from planner._graph_capture.fake_copies.data_dependent_values import on_meta
from planner._graph_capture.fake_copies.storage_less import is_storage_less
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.memory.tracker import MemoryTracker, Workspace
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.plain_step.loss import OutputGradient, Until
from planner._graph_capture.torch_compat import (
    FakeTensor,
    OpOverload,
    active_modes,
    runs_in_backward,
    runs_its_own_ops,
    storage_key,
)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_OPS = 20_000
"""A loss of more ops is not observed: its backward may never come."""


class StepWatch(MemoryTracker):
    """Follows a real step; a dispatch mode that its owner enters with `begin`, leaves with `end`.
    """

    supports_higher_order_operators = True  # as in what torch captures of `torch.linalg.solve`

    def __init__(self, device: torch.device, held: Iterable[torch.Tensor],
                 earlier: StepWatch | None = None, *, workspace: Workspace = lambda *_: 0,
                 existed: Callable[[torch.UntypedStorage], bool] = lambda storage: False) -> None:
        """`held`: tensors that are there now; `earlier`: a watch that knows of others.  Those that
        `existed` before the loop, such as the batches of a list, count while they are used.
        `workspace`: that of the kernels, which is not seen."""
        super().__init__(workspace, device=device, trace_device=device, resident=())
        self.phase = ""
        """The current phase of the step, in words."""
        self.peak_phase = ""
        """The phase at the peak."""
        self.op_count = 0
        """Ops seen."""
        self.device = device
        self._met = set[int]()  # keys of the storages that this step has used
        self._known = dict[object, int]()  # workspace by op and shapes
        for tensor in held:
            self._meet(tensor)
        if earlier is not None:
            self._follow_all(earlier, existed)
        self.begin_bytes = self.live_bytes
        """Memory when the watch began."""

    def _follow_all(self, earlier: StepWatch, existed: Callable[[torch.UntypedStorage], bool]
                    ) -> None:
        for key, number in earlier._number_of.items():
            storage = earlier._references[number]()
            if storage is not None and key not in self._number_of and (
                    key in earlier._met or not existed(storage)):
                self._follow_storage(key, storage)

    def bytes_beside(self, tensors: Iterable[torch.Tensor]) -> int:
        """Memory now, but for these tensors."""
        numbers = {self._number_of.get(storage_key(tensor)) for tensor in tensors}
        return self.live_bytes - sum(
            self._sizes[number] for number in numbers if number is not None)

    def begin(self) -> bool:
        """Watch from here on; return whether that is possible here and now."""
        if not all(isinstance(mode, MemoryTracker) for mode in active_modes()):
            return False
        self.__enter__()
        return True

    def end(self) -> None:
        """Watch no longer."""
        self.close()
        self.leave()

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if runs_its_own_ops(types):
            return NotImplemented
        func = self._in_place.op_for(func, args)
        out = func(*args, **(kwargs or {}))
        self.op_count += 1
        if not self.is_closed and not (isinstance(func, OpOverload) and func.is_view):
            self._meet(args)
            self._meet(out)
            if isinstance(func, OpOverload):
                self._take_workspace(func, args, kwargs or {}, out)
        return out

    def _take_workspace(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                        out: Any) -> None:
        key = func, _shapes(args), _shapes(kwargs)
        if key not in self._known:
            self._known[key] = self._workspace(func, args, kwargs, out)
        self._note_peak(self.live_bytes + self._known[key])

    def _note_peak(self, size_bytes: int) -> None:
        if size_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_phase = size_bytes, self.phase

    def _meet(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            # A sparse tensor has no storage; its indices and values were met when they were made.
            if (type(value) in _PLAIN and value.device.type == self.device.type
                    and value.layout is torch.strided):
                key = storage_key(value)
                self._met.add(key)
                if key not in self._number_of and not is_storage_less(value):
                    self._follow(value)
        elif isinstance(value, tuple | list):
            for each in value:
                self._meet(each)

    def _released(self, key: int, number: int) -> None:
        if self._number_of.get(key) == number:  # else another storage is there now
            super()._released(key, number)

    def _change(self, number: int, change: int) -> None:
        before = self.peak_bytes
        super()._change(number, change)
        if self.peak_bytes > before:
            self.peak_phase = self.phase


def _shapes(value: Any) -> object:
    """Arguments of an op with the layouts of tensors in their place; hashable."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        return value.shape, strides, value.dtype
    if isinstance(value, Mapping):
        return tuple(map(_shapes, value.items()))
    if isinstance(value, torch.UntypedStorage):  # which would live as long as the watch
        return value.device, value.nbytes()
    if isinstance(value, torch.ScriptObject):  # of the profiler; it cannot be compared
        return type(value)
    return tuple(map(_shapes, value)) if isinstance(value, tuple | list) else value


@dataclass(frozen=True, slots=True)
class ObservedLoss:
    """Memory of a loss outside the model in one step, above the part of the model's output that the
    caller keeps; released tensors count while they are alive."""

    peak_bytes: int
    """Maximum from the model's return to the arrival of the gradients of its output, with these and
    the kept memory."""
    held_bytes: int
    """Memory still alive then: the loss, and anything else that the caller keeps."""
    outputs: tuple[OutputGradient, ...]
    """For each tensor of the output; one that is still alive when the gradients arrive lives to the
    end."""
    forward_peak_bytes: int | None = None
    """Maximum before its backward begins; `None`: the same as afterwards."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of the output."""
        return sum(gradient.size_bytes for gradient in self.outputs)


@dataclass(frozen=True, slots=True)
class NotedOp:
    """An op that ran, with tensors without data."""

    above_bytes: int
    """Memory of the loss when the op ran, its results included."""
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any


@dataclass(frozen=True, slots=True)
class UnmeasuredLoss:
    """An observed loss without the workspace of its kernels."""

    seen: ObservedLoss
    ops: tuple[NotedOp, ...]
    forward_ops: int
    """How many of the ops ran before the backward."""

    def measured(self, workspace: Workspace) -> ObservedLoss:
        """The loss with the workspace of each op."""
        peaks = [each.above_bytes + workspace(each.op, each.args, each.kwargs, each.out)
                 for each in self.ops]
        forward_bytes = self.seen.forward_peak_bytes
        return replace(
            self.seen, peak_bytes=max([self.seen.peak_bytes, *peaks]),
            forward_peak_bytes=None if forward_bytes is None else max(
                [forward_bytes, *peaks[:self.forward_ops]]))


class LossWatch(MemoryTracker):
    """Tracks a real step from the model's output to the arrival of its gradients.

    It is a dispatch mode that its owner enters with `begin` and leaves with `end`, at any moment
    after the backward: autograd's engine gives its threads the modes of the caller, and does not
    notice a mode that is left during a backward.
    """

    def __init__(self, output: Any, done: Callable[[UnmeasuredLoss], None]) -> None:
        """`done` is called with the result, in the backward."""
        tensors = output_tensors(output)
        self._nodes = list(dict.fromkeys(
            tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
        # A hook must not refer to its node: nobody would break the cycle.
        self._places = [None if tensor.grad_fn is None else
                        (self._nodes.index(tensor.grad_fn), tensor.output_nr)
                        for tensor in tensors]
        device = next((tensor.device for tensor in tensors if tensor.requires_grad),
                      torch.device("cpu"))
        super().__init__(self._note, device=device, trace_device=device, resident=())
        self._noted: list[NotedOp] = []
        for tensor in tensors:
            self.follow(tensor)
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._numbers = [self.number_of(tensor) for tensor in tensors]
        self.restart_peak()
        self._done: Callable[[UnmeasuredLoss], None] | None = done
        self._is_plain = all(type(tensor) is torch.Tensor for tensor in tensors)
        self._hooks: list[Any] = []
        self._forward_peak_bytes: int | None = None
        self._forward_ops = 0

    @property
    def is_possible(self) -> bool:
        """True if the model's output can be watched."""
        return bool(self._nodes) and self._is_plain

    def begin(self) -> bool:
        """Start watching; true if that is possible here and now."""
        if not self.is_possible or not all(map(_has_seen, active_modes())):
            return False
        nodes, self._nodes = self._nodes, []
        self._hooks = [node.register_prehook(self._hook_of(number))
                       for number, node in enumerate(nodes)]
        self.__enter__()
        return True

    def end(self) -> bool:
        """Watch no longer; return whether the mode is left."""
        self._stop()
        return self.leave()

    def _note(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
              out: Any) -> int:
        if len(self._noted) == _MOST_OPS:
            self._stop()
        elif not op.is_view and not self.is_closed:
            self._noted.append(NotedOp(self.live_bytes + self._made_before(op, args), op,
                                       *on_meta((args, kwargs, out))))
        return 0

    def _stop(self) -> None:
        self._done, self._noted = None, []
        self.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook_of(self, node: int) -> Callable[[Sequence[torch.Tensor | None]], None]:
        def arrived(gradients: Sequence[torch.Tensor | None]) -> None:
            if self._done is None:
                return
            done, device = self._done, self._device

            there = self.live_numbers()

            def gradient(place: tuple[int, int] | None, number: int | None,
                         tensor: weakref.ref[torch.Tensor]) -> OutputGradient:
                until = _life(tensor() is not None, number is None or number in there)
                if place is None:
                    return OutputGradient(False, 0, until)
                # Gradients of other nodes arrive later, and are assumed to.
                found = gradients[place[1]] if place[0] == node else None
                if place[0] == node and found is None:
                    return OutputGradient(False, 0, until)
                # The caller keeps the start values of the backward to its end.
                size = 0 if found is None or self._is_seed(found) else allocated_bytes(
                    found.untyped_storage().nbytes(), device)
                return OutputGradient(True, size, until)

            outputs = tuple(map(gradient, self._places, self._numbers, self._tensors))
            output_bytes = sum(self._sizes[number] for number in {*self._numbers} & there
                               if number is not None)
            made = {number for found in gradients
                    if found is not None and not self._is_seed(found)
                    for number in self.numbers_of(found)} - {*self._numbers}
            held = self.live_bytes - output_bytes - sum(self._sizes[number] for number in made)
            noted = tuple(replace(each, above_bytes=each.above_bytes - output_bytes)
                          for each in self._noted)
            forward_bytes = self._forward_peak_bytes
            seen = ObservedLoss(
                self.peak_bytes - output_bytes, held, outputs,
                None if forward_bytes is None else forward_bytes - output_bytes)
            self._stop()
            done(UnmeasuredLoss(seen, noted, self._forward_ops))

        return arrived

    def _is_seed(self, gradient: torch.Tensor) -> bool:
        """True if it is a view of the ones with which the backward began."""
        number = self.number_of(gradient)
        return number is not None and self._makers[number][0] == "aten.ones_like"

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if self.is_closed or any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **(kwargs or {}))  # code that the loss compiles has no memory yet
        if self._forward_peak_bytes is None and runs_in_backward():
            self._forward_peak_bytes, self._forward_ops = self.peak_bytes, len(self._noted)
        return super().__torch_dispatch__(func, types, args, kwargs)


def end_watches(*, of_losses: bool = True) -> None:
    """End every watch that can be left now: later code belongs to no loss.  `of_losses=False`: it
    may, so that only watches leave that have seen all."""
    for mode in reversed(active_modes()):
        if isinstance(mode, LossWatch) and (of_losses or mode.is_closed):
            mode.end()
        elif isinstance(mode, StepWatch) and mode.is_closed:
            mode.leave()


@contextmanager
def without_watches() -> Iterator[None]:
    """Inside, no watch sees what runs: it is planned or compiled, and no part of the step."""
    left: list[MemoryTracker] = []
    for mode in reversed(active_modes()):
        if not isinstance(mode, LossWatch | StepWatch):
            break
        mode.leave()
        left.append(mode)
    try:
        yield
    finally:
        for each in reversed(left):
            if not each.is_closed:
                each.__enter__()


def _has_seen(mode: object) -> bool:
    """Return whether a mode is a watch that goes on beneath others, or only waits to be left."""
    return isinstance(mode, StepWatch) or (isinstance(mode, LossWatch) and mode.is_closed)


def _life(is_held: bool, is_there: bool) -> Until:
    """Lifetime of a tensor; `is_held`: it is still alive in Python when gradients arrive,
    `is_there`: its storage is."""
    return Until.END if is_held else Until.MODEL_BACKWARD if is_there else Until.LOSS


def watch_output(output: Any, begun: Callable[[tuple[Until, ...]], None]) -> None:
    """Call `begun` with the lifetime of each output tensor when the backward reaches the model's
    output; of several calls the first counts."""
    tensors = output_tensors(output)
    references = [(weakref.ref(tensor), weakref.ref(tensor.untyped_storage()))
                  for tensor in tensors]

    def look(_: object) -> None:
        begun(tuple(_life(tensor() is not None, storage() is not None)
                    for tensor, storage in references))

    for node in {tensor.grad_fn for tensor in tensors}:
        if node is not None:
            node.register_prehook(look)


@dataclass(frozen=True, slots=True)
class ReplayedLoss:
    """A loss of a traced step that uses the memory observed in a real one."""

    seen: ObservedLoss

    def __call__(self, output: Any) -> torch.Tensor:
        """The loss; its value is meaningless."""
        tensors, seen = output_tensors(output), self.seen
        if len(tensors) != len(seen.outputs):  # a key-value cache, which no planned step makes
            cached = {*map(id, output_tensors(getattr(output, "past_key_values", None)))}
            tensors = [each for each in tensors if id(each) not in cached]
        if len(tensors) != len(seen.outputs):
            raise OtherOutputs(f"the model returned {len(seen.outputs)} tensors in the call whose "
                               f"loss was observed, and returns {len(tensors)} now")
        # Released tensors are still alive while the loss is computed.
        there_bytes = sum({storage_key(tensor): tensor.untyped_storage().nbytes()
                           for tensor, gradient in zip(tensors, seen.outputs, strict=True)
                           if gradient.until is not Until.END}.values())
        reached = [tensor for tensor, gradient in zip(tensors, seen.outputs, strict=True)
                   if gradient.flows]
        sizes = [gradient.size_bytes for gradient in seen.outputs if gradient.flows]
        # Kept memory counts throughout the step.
        peak_bytes = max(seen.peak_bytes - seen.held_bytes, seen.gradient_bytes)
        forward_bytes = peak_bytes if seen.forward_peak_bytes is None else (
            seen.forward_peak_bytes - seen.held_bytes)
        loss: torch.Tensor = _Replay.apply(peak_bytes, forward_bytes, there_bytes, sizes, *reached)
        return loss


_SCALAR_BYTES = 4
"""Size of the loss, and of the 1 that its backward starts from."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peak_bytes: int, forward_peak_bytes: int, there_bytes: int,
                sizes: list[int], *outputs: torch.Tensor) -> torch.Tensor:
        """A scalar, and its memory."""
        ctx.peak_bytes, ctx.sizes = peak_bytes, sizes
        ctx.layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in outputs]
        # Made from tensors without data, these have none.
        loss = outputs[0].new_empty((), dtype=torch.float32)
        outputs[0].new_empty(max(0, forward_peak_bytes - there_bytes - _SCALAR_BYTES),
                             dtype=torch.uint8)
        return loss

    @staticmethod
    def backward(ctx: Any, *seeds: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the outputs, each of the observed size."""
        gradients: list[torch.Tensor] = []
        for (shape, strides, dtype), size in zip(ctx.layouts, ctx.sizes, strict=True):
            is_whole = size >= shape.numel() * dtype.itemsize
            gradients.append(
                seeds[0].new_empty_strided(shape, strides, dtype=dtype) if is_whole
                else seeds[0].new_empty((), dtype=dtype).expand(shape))
        left = ctx.peak_bytes - sum(ctx.sizes) - 2 * _SCALAR_BYTES
        seeds[0].new_empty(max(0, left), dtype=torch.uint8)
        return (None, None, None, None, *gradients)
