"""The peak of each training step, measured and compared with what its plans predict.

The model of the world: one loop trains in a process, perhaps with several planned models; what is
measured is the memory of the device, between the first call of a planned model and the end of the
optimizer's step.  On a GPU the allocator counts it, in every step.  On a CPU a `StepWatch` sees
allocations, in the steps that are asked for; see there what it cannot see, and what it costs.

Blind spot: on a GPU a peak below that of an earlier step is not told from it, as the statistics are
the user's and not reset.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import finalize, ref

import torch

from planner._graph_capture.plain_step.observed_loss import end_watches
from planner._graph_capture.plain_step.step_watch import StepWatch
from planner._graph_capture.torch_compat import runs_in_backward

if TYPE_CHECKING:
    from planner.attached.observing import ObservingForward
    from planner.plans.plan import Plan

_SECONDS_OF_OP = 12e-6
"""Time to watch one op, which Python takes to be called and to follow its results."""


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """A step that was measured."""

    measured_bytes: int
    with_kernels_bytes: int
    """With what kernels use while they run, which is not seen on a CPU but counted by plans."""
    predicted_bytes: int
    """The highest peak that a plan of the step predicts."""
    budget_bytes: int | None
    """The budget that it is compared with; `None`: not compared."""
    is_expected: bool
    """True if a part of the step was not known when it was planned, so that the next plan has it.
    """
    cause: str
    """Probable cause of memory beyond the prediction."""
    seconds: float
    """Time of the step."""
    watching_seconds: float
    """Part of it that watching took."""


@dataclass(frozen=True, slots=True)
class _PlannedCall:
    forward: ref[ObservingForward]
    plan: Plan
    is_provisional: bool


class Measurement:
    """The step under way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: list[_PlannedCall] = []
        self.is_comparable = True
        """True if each call ran under a plan that is to meet the budget."""
        self.watch: StepWatch | None = None
        self.finalizer: finalize[..., ObservingForward] | None = None
        """Keeps the measurement until it ends."""
        self.before_bytes = _counted_bytes(device)
        self.begun = time.perf_counter()
        self.looking_seconds = 0.0

    def peak(self) -> int | None:
        """Bytes; `None`: this step is no higher than earlier ones."""
        if self.watch is not None:
            return self.watch.peak_bytes
        counted_bytes = _counted_bytes(self.device)
        return counted_bytes if counted_bytes > self.before_bytes else None

    def cause(self, predicted_bytes: int) -> str:
        """Words."""
        if self.watch is None:
            return "probably allocated by the loop beside the model"
        resident_bytes = max(call.plan.resident_bytes for call in self.calls)
        over_bytes = self.watch.begin_bytes - resident_bytes
        if over_bytes >= (self.watch.peak_bytes - predicted_bytes) / 2:
            return ("probably held by the loop since before the step (batches, other models, "
                    "buffers, optimizer state)")
        return f"probably allocated {self.watch.peak_phase}"


_under_way: list[Measurement] = []
_last_watch: list[StepWatch] = []


def begin_measuring(device: torch.device, held: Callable[[], Iterable[torch.Tensor]], *,
                    is_complete: bool) -> None:
    """Measure from here on, unless that is done already.  `held`: the tensors that the loop holds;
    `is_complete`: all of them, else those of the step that was watched last are added."""
    if _under_way:
        return
    found = Measurement(device)
    if device.type != "cuda":
        earlier = next((watch for watch in _last_watch if watch.device == device), None)
        found.watch = StepWatch(device, held(), None if is_complete else earlier)
        if not found.watch.begin():
            return
        _last_watch[:] = [found.watch]
        found.looking_seconds = time.perf_counter() - found.begun
    _under_way.append(found)


def watched_bytes_beside(tensors: Iterable[torch.Tensor]) -> int | None:
    """Memory that is watched now, but for these tensors; `None`: nothing is watched."""
    return next((each.watch.bytes_beside(tensors) for each in _under_way
                 if each.watch is not None), None)


def enter_phase(words: str) -> None:
    """Note what runs from here on."""
    for each in _under_way:
        if each.watch is not None:
            each.watch.phase = words


def note_call(forward: ObservingForward, plan: Plan, *, is_comparable: bool,
              is_provisional: bool) -> None:
    """A call of a planned model has run; `is_comparable`: under a plan that is to meet the budget;
    `is_provisional`: while a part of the step was not known."""
    for each in _under_way:
        if not each.calls:
            # Else a model that is gone would leave it behind.
            each.finalizer = finalize(forward, _abandon, each)
        each.calls.append(_PlannedCall(ref(forward), plan, is_provisional))
        each.is_comparable &= is_comparable


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Inside, nothing is measured: it is planned or compiled."""
    watches = [each.watch for each in _under_way if each.watch is not None]
    left = [watch for watch in watches if watch.leave()]
    try:
        yield
    finally:
        for watch in left:
            if any(each.watch is watch for each in _under_way):
                watch.begin()


def conclude() -> None:
    """End the measurement, and tell the models of the step."""
    if runs_in_backward():  # what is left in a backward is there again behind it
        return
    for each in [*_under_way]:
        seconds = time.perf_counter() - each.begun
        _abandon(each)
        measured_bytes = each.peak()
        if measured_bytes is None or not each.calls:
            continue
        fullest = max((call.plan for call in each.calls), key=lambda plan: plan.peak_bytes)
        predicted_bytes = fullest.peak_bytes
        is_seen = each.watch is None or not (
            0 < predicted_bytes - measured_bytes <= fullest.memory.temporaries)
        budgets = [call.plan.budget_bytes for call in each.calls
                   if call.plan.budget_bytes is not None]
        op_count = 0 if each.watch is None else each.watch.op_count
        peak = MeasuredPeak(
            measured_bytes, measured_bytes if is_seen else predicted_bytes, predicted_bytes,
            min(budgets) if budgets and each.is_comparable else None,
            any(call.is_provisional for call in each.calls), each.cause(predicted_bytes), seconds,
            each.looking_seconds + op_count * _SECONDS_OF_OP)
        for forward in {call.forward for call in each.calls}:
            found = forward()
            if found is not None:
                found.note_peak(peak)


def abandon() -> None:
    """End the measurement, and forget it."""
    for each in [*_under_way]:
        _abandon(each)


def _abandon(measurement: Measurement) -> None:
    """End a measurement."""
    if measurement in _under_way:
        _under_way.remove(measurement)
        if measurement.finalizer is not None:
            measurement.finalizer.detach()
        if measurement.watch is not None:
            end_watches()
            measurement.watch.end()


def _counted_bytes(device: torch.device) -> int:
    """The highest that the allocator of a GPU has counted; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
