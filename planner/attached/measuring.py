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
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING
from weakref import finalize, ref

import torch

from planner._graph_capture.memory.allocator import highest_requested_bytes
from planner._graph_capture.op_costs.costs import OpCosts
from planner._graph_capture.plain_step.observed_loss import StepWatch, end_watches
from planner._graph_capture.torch_compat import runs_in_backward
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.attached.observing import ObservingForward
    from planner.attached.planned_graph import PlannedGraph
    from planner.plans.plan import Plan

log = logging.getLogger("planner")

_SECONDS_OF_OP = 35e-6
"""Time to watch one op, which Python takes to be called and to follow its results."""
_MOST_UNDECIDED = 4
"""Steps that wait for their budget to be known."""
CLOSE = 0.005
"""A step exceeds the budget anew if it does so by more than this fraction beyond what was said."""


@dataclass(frozen=True, slots=True)
class _PlannedCall:
    forward: ref[ObservingForward]
    graph: ref[PlannedGraph]
    plan: Plan
    is_provisional: bool
    is_settled: bool
    plans_made: int
    """Number of plans of the graph until then."""

    @property
    def plans_by_now(self) -> list[Plan]:
        """The graph's plan; and its own, if that is one for other sizes by now."""
        graph = self.graph()
        if graph is None:
            return []
        return [graph.plan] if graph.plan.spec.signature == self.plan.spec.signature else [
            graph.plan, self.plan]

    @property
    def is_passing(self) -> bool:
        """True if it ran under a plan that was replaced, so that other calls do not count it."""
        graph = self.graph()
        return self.is_provisional or graph is None or graph.plans_made != self.plans_made


@dataclass(frozen=True, slots=True)
class _Undecided:
    """A measured step with a percentage of a peak that was not known yet."""

    calls: list[_PlannedCall]
    measured_bytes: int
    predicted_bytes: int


class Measurement:
    """The step under way."""

    def __init__(self, device: torch.device, begun_by: ObservingForward) -> None:
        self.device = device
        self.begun_by = ref(begun_by)
        self.calls: list[_PlannedCall] = []
        self.is_planned = True
        """True if each call ran under a plan."""
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
_undecided: list[_Undecided] = []


def begin_measuring(forward: ObservingForward, device: torch.device,
                    held: Callable[[], Iterable[torch.Tensor]], *,
                    is_complete: bool, existed: Callable[[torch.UntypedStorage], bool]) -> None:
    """Measure from a call of `forward` on, unless that is done already.  `held`: the tensors that
    the loop holds; `is_complete`: all of them, else those of the step that was watched last are
    added, but for what `existed` before the loop and that step did not use."""
    if not _under_way and (found := _begun(forward, device, held, is_complete, existed)):
        _under_way.append(found)


def _begun(forward: ObservingForward, device: torch.device,
           held: Callable[[], Iterable[torch.Tensor]], is_complete: bool,
           existed: Callable[[torch.UntypedStorage], bool]) -> Measurement | None:
    """A measurement; `None`: nothing can be watched here and now."""
    found = Measurement(device, forward)
    if device.type != "cuda":
        earlier = next((watch for watch in _last_watch if watch.device == device), None)
        found.watch = StepWatch(device, held(), None if is_complete else earlier, existed=existed,
                                workspace=OpCosts(device).known_workspace_bytes)
        if not found.watch.begin():
            return None
        _last_watch[:] = [found.watch]
        found.looking_seconds = time.perf_counter() - found.begun
    return found


@contextlib.contextmanager
def compared_alone(forward: ObservingForward, budget_bytes: int, device: torch.device,
                   held: Callable[[], Iterable[torch.Tensor]], *, is_complete: bool,
                   existed: Callable[[torch.UntypedStorage], bool]) -> Iterator[None]:
    """Inside, a call without gradients, whose memory is compared with the budget unless it belongs
    to a step that is measured.  The other arguments are those of `begin_measuring`."""
    found = None if _under_way else _begun(forward, device, held, is_complete, existed)
    try:
        yield
    finally:
        if found is not None and found.watch is not None:
            found.watch.end()
    measured_bytes = None if found is None else found.peak()
    if measured_bytes is None or measured_bytes <= budget_bytes:
        return
    log.warning("%s: a call without gradients took %s of the budget of %s, and no plan changes "
                "that: call it with fewer rows, or raise the budget",
                type(forward.__self__).__name__, format_bytes(measured_bytes),
                format_bytes(budget_bytes))
    forward.note_worst(measured_bytes)


def watched_bytes_beside(tensors: Iterable[torch.Tensor]) -> int | None:
    """Memory that is watched now, but for these tensors; `None`: nothing is watched."""
    return next((each.watch.bytes_beside(tensors) for each in _under_way
                 if each.watch is not None), None)


def is_watching() -> bool:
    """True if a step is watched on a CPU."""
    return any(each.watch is not None for each in _under_way)


def enter_phase(words: str) -> None:
    """Note what runs from here on."""
    for each in _under_way:
        if each.watch is not None:
            each.watch.phase = words


def note_call(forward: ObservingForward, graph: PlannedGraph, *, is_planned: bool) -> None:
    """A call of a planned model has run; `is_planned`: under its plan."""
    for each in _under_way:
        if not each.calls:
            # Else a model that is gone would leave it behind.
            each.finalizer = finalize(forward, _abandon, each)
        each.calls.append(_PlannedCall(ref(forward), ref(graph), graph.plan, graph.is_provisional,
                                       graph.is_settled, graph.plans_made))
        each.is_planned &= is_planned


def conclude() -> None:
    """End the measurement, and tell the models of the step."""
    if runs_in_backward():  # what is left in a backward is there again behind it
        return
    for each in [*_under_way]:
        seconds = time.perf_counter() - each.begun
        _abandon(each)
        measured_bytes = each.peak()
        op_count = 0 if each.watch is None else each.watch.op_count
        watching_share = (each.looking_seconds + op_count * _SECONDS_OF_OP) / max(seconds, 1e-9)
        if not each.calls and (forward := each.begun_by()) is not None:
            forward.note_watched(watching_share)  # whose calls ran as they are written
        if measured_bytes is None or not each.calls:
            continue
        predicted_bytes = max(call.plan.peak_bytes for call in each.calls)
        is_settled = all(call.is_settled for call in each.calls)
        unforeseen_bytes, budget_bytes = 0, None
        if each.is_planned and not is_settled and any(
                limit is not None and limit.size_bytes is None
                for limit in (forward.settings.limit for forward in _forwards(each.calls))):
            _undecided.append(_Undecided(each.calls, measured_bytes, predicted_bytes))
        elif each.is_planned:
            budget_bytes = _budget_bytes(
                (call.forward(), call.plan) for call in each.calls)
        if budget_bytes is not None and measured_bytes > budget_bytes:
            excess_bytes = measured_bytes - predicted_bytes
            if not any(call.is_passing for call in each.calls):  # else the next plan has it anyway
                unforeseen_bytes = max(0, excess_bytes)
            _report(each.calls, measured_bytes, predicted_bytes, budget_bytes, (
                f"{format_bytes(excess_bytes)} more, {each.cause(predicted_bytes)}; the next "
                "step is planned with it") if excess_bytes > 0 else (
                "which no schedule that was found avoids: raise the budget"))
        for forward in _forwards(each.calls):
            forward.note_peak(measured_bytes, unforeseen_bytes, watching_share)
    _decide()


def _decide() -> None:
    """Compare the steps whose budget is known by now."""
    for each in [*_undecided]:
        is_known = all(graph is None or graph.is_settled
                       for graph in (call.graph() for call in each.calls))
        if not is_known and len(_undecided) <= _MOST_UNDECIDED:
            continue
        _undecided.remove(each)
        budget_bytes = _budget_bytes(
            (call.forward(), plan) for call in each.calls for plan in call.plans_by_now)
        if budget_bytes is not None and each.measured_bytes > budget_bytes:
            _report(each.calls, each.measured_bytes, each.predicted_bytes, budget_bytes,
                    "in an earlier step, which ran before all of it was known; now it is"
                    if is_known else
                    "in an earlier step, of which something was not known when it ran: its loss, "
                    "its optimizer, or gradients that were kept")


def _forwards(calls: Iterable[_PlannedCall]) -> list[ObservingForward]:
    found = dict.fromkeys(call.forward() for call in calls)
    return [forward for forward in found if forward is not None]


def _budget_bytes(calls: Iterable[tuple[ObservingForward | None, Plan]]) -> int | None:
    """The budget of a step; percentages are of one plain step, the largest that its plans know."""
    plain_bytes, budgets, fractions = Fraction(), list[int](), list[Fraction]()
    for forward, plan in calls:
        limit = None if forward is None else forward.settings.limit
        if plan.budget_bytes is None:
            continue
        if limit is None or limit.fraction is None:
            budgets.append(plan.budget_bytes)
        else:
            fractions.append(limit.fraction)
            plain_bytes = max(plain_bytes, plan.budget_bytes / limit.fraction)
    budgets += [math.floor(fraction * plain_bytes) for fraction in fractions]
    return min(budgets, default=None)


def _report(calls: Sequence[_PlannedCall], measured_bytes: int, predicted_bytes: int,
            budget_bytes: int, reason: str) -> None:
    """Say that a step exceeded its budget: a warning, unless it was said of one like it."""
    forwards, ratio = _forwards(calls), measured_bytes / budget_bytes
    is_new = all(ratio > (1 + CLOSE) * forward.worst_ratio for forward in forwards)
    for forward in forwards:
        forward.worst_ratio = max(ratio, forward.worst_ratio)
    sizes = (budget_bytes, predicted_bytes, measured_bytes)
    words = [format_bytes(size) for size in sizes]
    if words[0] == words[2]:
        words = [f"{size:,} bytes" for size in sizes]
    names = " and ".join(dict.fromkeys(type(each.__self__).__name__ for each in forwards))
    log.log(logging.WARNING if is_new else logging.INFO,
            "%s: a training step exceeded the budget of %s: predicted %s, measured %s, %s",
            names, *words, reason)


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
    return highest_requested_bytes(device) if device.type == "cuda" else 0
