"""Memory that other calls of a training step keep while one call of a planned graph runs.

Model of the world: a step is a sequence of calls and backwards.  A call keeps what its schedule
saves from the end of its forward to its backward; gradients exist from a backward to the
optimizer's step.  A graph is called at several moments of the step, and one schedule must fit at
each of them, including what the schedule itself saves in earlier calls.

Blind spots: memory that a call releases while the backward of another runs is assumed to be
released at once; all calls of one graph share a schedule, even where different ones would be
faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner._graph_capture.capture import CapturedStep
from planner._graph_capture.plain_step.loss import Until
from planner._graph_capture.plain_step.observed_loss import ObservedLoss
from planner._graph_capture.training_graph import HELD_IN_FORWARD, LOSS_BACKWARD
from planner.attached.optimizers import ObservedOptimizer
from planner.solvers.problem import Schedule
from planner.solvers.simulator import unroll
from planner.step.variant import Variant


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory kept outside a call when the call begins or its backward begins."""

    pending: int = 0
    """Other calls of the same graph whose backward is yet to come."""
    pending_bytes: int = 0
    """Saved by calls of other graphs whose backward is yet to come, and gradients of other
    models."""
    plain_pending_bytes: int = 0
    """The same where the other graphs run plain."""
    has_gradients: bool = False
    """True if parameters of the model have gradients."""

    def held_bytes(self, saved_bytes: int, gradient_bytes: int) -> int:
        """This memory in bytes, where a call of the graph saves `saved_bytes`."""
        return (self.pending * saved_bytes + self.pending_bytes
                + gradient_bytes * self.has_gradients)

    def plain_held_bytes(self, saved_bytes: int, gradient_bytes: int) -> int:
        """The same where all calls run plain."""
        plain = replace(self, pending_bytes=self.plain_pending_bytes)
        return plain.held_bytes(saved_bytes, gradient_bytes)

    def is_within(self, other: Moment) -> bool:
        """True if the other moment keeps at least as much in every respect."""
        return (self.pending <= other.pending and self.pending_bytes <= other.pending_bytes
                and self.plain_pending_bytes <= other.plain_pending_bytes
                and self.has_gradients <= other.has_gradients)


def fullest(moments: Iterable[Moment]) -> frozenset[Moment]:
    """The moments that are within no other."""
    found = set(moments)
    return frozenset(each for each in found if not any(
        each != other and each.is_within(other) for other in found))


@dataclass(frozen=True, slots=True)
class Outside:
    """All moments at which a graph is called."""

    held_bytes: int = 0
    """Memory that the loop keeps throughout the step, outside the model, its optimizer and its
    inputs.  Negative where these are among what other calls keep: the output of another model."""
    planned_only_bytes: int = 0
    """The part of it that the plain step does not take."""
    forward: frozenset[Moment] = frozenset({Moment()})
    backward: frozenset[Moment] = frozenset({Moment()})
    plain_backward: frozenset[Moment] = frozenset({Moment()})
    """The backwards of the plain step, of which a percentage is taken."""
    plain_bytes: int = 0
    """Highest plain peak of calls of other graphs in the step: a percentage is of the overall
    maximum."""

    @property
    def accumulates(self) -> bool:
        """True if the gradients of some call are added to others."""
        return any(moment.has_gradients for moment in self.backward)

    @property
    def without_bytes(self) -> tuple[frozenset[tuple[int, bool]], ...]:
        """The moments without their byte counts."""
        return tuple(frozenset((each.pending, each.has_gradients) for each in moments)
                     for moments in (self.forward, self.backward, self.plain_backward))

    @property
    def most_bytes(self) -> int:
        """The most memory kept outside calls of this graph."""
        return self.held_bytes + max(
            each.pending_bytes for each in self.forward | self.backward)

    @property
    def most_plain_bytes(self) -> int:
        """The most that others keep at a backward of the plain step."""
        return self.held_bytes + max(each.plain_pending_bytes for each in self.plain_backward)

    def as_run(self, saved_bytes: int, plain_saved_bytes: int) -> Outside:
        """The moments with earlier calls of this graph counted as bytes, `saved_bytes` each."""
        forward, backward, plain_backward = (frozenset(
            replace(each, pending=0, pending_bytes=each.pending_bytes + each.pending * saved_bytes,
                    plain_pending_bytes=(each.plain_pending_bytes
                                         + each.pending * plain_saved_bytes))
            for each in moments) for moments in (self.forward, self.backward, self.plain_backward))
        return replace(self, forward=forward, backward=backward, plain_backward=plain_backward)

    def pending_bytes(self, variant: Variant, schedule: Schedule,
                      loss: ObservedLoss | None = None) -> int:
        """The most memory that other calls keep, excluding the gradients that the variant counts,
        if all calls of this graph run this schedule.  Memory kept at a forward counts minus the
        difference between the peaks of backward and forward.  `loss`: the one outside the model,
        whose forward is in the same op of the variant as its backward."""
        saved_bytes, ahead = _saved_and_ahead(variant, schedule, loss)
        counted_bytes = variant.graph.resident.gradients_bytes
        gradient_bytes = counted_bytes or variant.graph.gradient_bytes
        in_forward = () if HELD_IN_FORWARD in variant.graph.index_of else self.forward
        return max(0, *(moment.held_bytes(saved_bytes, gradient_bytes) - counted_bytes
                        for moment in self.backward),
                   *(moment.held_bytes(saved_bytes, gradient_bytes) - counted_bytes - ahead
                     for moment in in_forward))

    def forward_bytes(self, gradient_bytes: int) -> int:
        """Bytes kept while calls run, beyond what is kept at their backwards: gradients of the step
        before, which are gone by then.  0 where more calls of the graph are pending."""
        if any(each.pending for each in self.forward | self.backward):
            return 0
        forward, backward = (max(each.held_bytes(0, gradient_bytes) for each in moments)
                             for moments in (self.forward, self.backward))
        return max(0, forward - backward)

    def least_pending_bytes(self, gradient_bytes: int) -> int:
        """Lower bound of `pending_bytes`: in a backward, for a schedule that saves nothing."""
        counted_bytes = gradient_bytes * self.accumulates
        return max(0, *(moment.held_bytes(0, gradient_bytes) - counted_bytes
                        for moment in self.backward))

    def plain_net_bytes(self, step: CapturedStep, pending_bytes: int) -> int:
        """Net peak of the plain step above resident memory, which includes `pending_bytes`; the
        other calls are plain, too."""
        plain, gradient_bytes = step.baseline, step.graph.gradient_bytes
        saved_bytes = plain_saved_bytes(step)
        peaks = [moment.plain_held_bytes(saved_bytes, gradient_bytes)
                 + (step.later if moment.has_gradients and step.later else plain).peak_bytes
                 for moment in self.plain_backward]
        peaks += [moment.plain_held_bytes(saved_bytes, gradient_bytes) + plain.forward_peak_bytes
                  for moment in self.forward]
        return (max(peaks) - gradient_bytes * self.accumulates - pending_bytes
                - self.planned_only_bytes)


def plain_saved_bytes(step: CapturedStep) -> int:
    """Memory that a plain call keeps from the end of its forward to its backward."""
    blocks = step.baseline.blocks
    return blocks.trace.levels()[blocks.loss_begins]


def saved_bytes(variant: Variant, schedule: Schedule) -> int:
    """Memory that a call keeps from the end of its forward to its backward."""
    return _saved_and_ahead(variant, schedule)[0]


def _saved_and_ahead(variant: Variant, schedule: Schedule, loss: ObservedLoss | None = None
                     ) -> tuple[int, int]:
    """The saved bytes, and the peak of the backward minus the peak before it."""
    timeline = unroll(variant.problem, schedule)
    begin = timeline.first_runs[variant.graph.index_of[LOSS_BACKWARD]]
    saved = sum(variant.problem.storages[buffer].size_bytes
                for buffer in variant.kept_buffers(timeline))
    before = max(timeline.memory_bytes[:begin], default=0)
    if loss is not None:
        rise = 0 if loss.forward_peak_bytes is None else loss.peak_bytes - loss.forward_peak_bytes
        before = max(before, timeline.memory_bytes[begin] - rise)
    return saved, timeline.peak_bytes - before


@dataclass(frozen=True, slots=True)
class Known:
    """Memory that a plan counts in addition to the graph."""

    optimizers: tuple[ObservedOptimizer, ...] | None
    """The optimizers that step; `None`: the one that the user gave, or not known."""
    outside: Outside
    """Memory kept by others while the graph runs."""
    loss: ObservedLoss | None
    """The loss outside the model; `None`: it is inside, or the user gave it."""
    lives: tuple[Until, ...] | None = None
    """Without such a loss: lifetime of each output tensor; `None`: assumed to live until the
    end."""
    defers_reduction: bool = False
    """True if earlier gradients are whole ones, which `fully_shard` has yet to reduce."""

    early: tuple[tuple[str, int], ...] = ()
    """Gradients that hooks free as they come, and what that allocates."""
    room_bytes: int = 0
    """Memory to leave between forward and backward, to calls of other graphs."""
    is_lean: bool = False
    """True if calls are to save as little as possible."""

    @property
    def without_outside(self) -> Known:
        """The same facts without memory outside the graph."""
        return replace(self, outside=Outside())

    @property
    def accumulates(self) -> bool:
        """True if gradients exist when a backward begins."""
        return self.outside.accumulates

    @property
    def lets_output_go(self) -> bool:
        """True if, of the output, only the loss is alive when the backward begins."""
        return self.lives is not None and Until.LOSS in self.lives
