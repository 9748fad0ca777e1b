"""The largest batch, and the longest sequence, whose training step fits a budget.

Model of the world: the memory of a step grows with its size, nearly in proportion, so two sizes
estimate the limit and a few more find it.  The answer is checked: the steps of the reported and the
next size are evaluated, the reported size fits and the next one does not.  The plan serves all
sizes up to the reported one where the model was captured with symbolic sizes.  The plain step fits
by its peak; a planned step fits if a plan within the budget is found.

The same model at another size has the same ops in the same order, only larger; so a schedule found
at one size is tried at another, at no cost.  Otherwise the search for the smallest peak decides, as
for `InfeasibleBudget.minimum_bytes`; with a limit on the extra time, the solver does.

Blind spot: it is proven only if `proven` is true that no plan exists for the next size; otherwise
a search found none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Unpack

from torch import nn

from planner.arguments.budget import absolute_budget
from planner.arguments.planning import (
    PlanArguments,
    Planning,
    check_count,
    check_number,
    takes_planning,
)
from planner.errors import CaptureError, InfeasibleBudget
from planner.plans.plan import Plan
from planner.progress import Progress, watched
from planner.search.planning import Effort, plan_within, refusal
from planner.search.reserved import schedule_reserving
from planner.search.variants import cheapest, smallest
from planner.sizes.bracketing import Bracket, find_largest, secant
from planner.sizes.sized_steps import MakeLoss, SizedSteps, factory_of, model_first
from planner.solvers.errors import InfeasibleBudget as Refusal
from planner.solvers.minimum import minimum_peak
from planner.solvers.problem import Schedule
from planner.solvers.simulator import is_legal, simulate
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant
from planner.units import format_bytes, format_fraction

_LARGEST = 2 ** 24
"""Default end of the range."""


@dataclass(frozen=True, slots=True)
class LargestSize:
    """The largest step that fits a budget, without and with a plan."""

    what: str
    """The varied size: `batch` or `sequence`."""
    budget_bytes: int
    plain: int | None
    """The largest that fits without a plan; `None`: not even the smallest does."""
    plain_peak_bytes: int | None
    """Predicted peak of the plain step of that size."""
    plain_next: int | None
    """The next larger size, at which the plain step does not fit; `None` at the end of the range,
    or if no larger size could be captured."""
    plain_next_peak_bytes: int | None
    planned: int | None
    """The largest that fits with a plan; `None` if plans were not searched."""
    planned_next: int | None
    """The next larger size, for which no plan was found; `None` as for `plain_next`."""
    planned_next_minimum_bytes: int | None
    """The smallest budget known to be feasible at `planned_next` (at any overhead)."""
    proven: bool
    """True if it is proven that the planner cannot make a plan at `planned_next`."""
    overhead_limit: float | None
    """Limit on a plan's extra time, as a fraction; `None`: no limit."""
    plan: Plan | None = field(repr=False)
    """The plan of the size `planned`."""
    plain_seconds_per_item: float | None
    """Estimated seconds of the plain step of size `plain`, over its size."""
    planned_seconds_per_item: float | None
    """Estimated seconds of the planned step, recomputation included, over its size."""
    skipped: tuple[tuple[int, str], ...]
    """Sizes at which the step could not be captured, with the reason."""
    captures: int
    """Number of captured sizes."""

    @property
    def growth(self) -> float | None:
        """Ratio of the planned size to the plain one."""
        return self.planned / self.plain if self.planned and self.plain else None

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values, without the plan itself."""
        return {
            "what": self.what,
            "budget_bytes": self.budget_bytes,
            "overhead_limit": self.overhead_limit,
            "plain": {
                "largest": self.plain,
                "peak_bytes": self.plain_peak_bytes,
                "next": self.plain_next,
                "next_peak_bytes": self.plain_next_peak_bytes,
                "seconds_per_item": self.plain_seconds_per_item,
            },
            "planned": {
                "largest": self.planned,
                "peak_bytes": None if self.plan is None else self.plan.peak_bytes,
                "overhead": None if self.plan is None else self.plan.overhead,
                "next": self.planned_next,
                "next_minimum_bytes": self.planned_next_minimum_bytes,
                "proven": self.proven,
                "seconds_per_item": self.planned_seconds_per_item,
            },
            "growth": self.growth,
            "skipped": [{"size": size, "reason": reason} for size, reason in self.skipped],
            "captures": self.captures,
        }

    def __str__(self) -> str:
        from planner.reporters.choices import largest_report
        from planner.reporters.table import plain_text

        return plain_text(largest_report(self))


@takes_planning(without=("dynamic",))
def max_batch_size(model: nn.Module, inputs: object = None, *, budget_gb: float | None = None,
                   budget: int | str | None = None, plan: bool = True,
                   overhead: float | None = None, smallest: int = 1, largest: int | None = None,
                   multiple_of: int = 1, make_loss_fn: MakeLoss | None = None,
                   progress: Progress | None = None, **arguments: Unpack[PlanArguments]
                   ) -> LargestSize:
    """Find the largest batch whose training step fits a budget, without and with a plan.

    Args:
        model: as for `planner.plan`; it is not executed.
        inputs: as for `planner.plan`, of any batch: the first dimension that the tensors share is
            varied. Or a function: `inputs(batch)` returns the inputs of a step of that batch;
            tensors on `meta` allocate no memory.
        budget_gb, budget: as for `planner.plan`, but not a percentage, which would refer to a
            different peak at each size.
        plan: also search for the largest batch with a plan.
        overhead: limit on a plan's extra time, as a fraction of the step without recomputation
            (0.35: 35%); `None`: no limit.
        smallest, largest: the range of sizes, inclusive.
        multiple_of: only multiples of this are tried, and "the next size" is the next multiple.
        make_loss_fn: `make_loss_fn(batch)` returns the `loss_fn` of a step of that batch, for a
            loss that contains labels.
        time_limit: seconds for planning one size; soft.  Several sizes are planned.

    The other arguments and errors are those of `planner.plan`.  Raises `InfeasibleBudget` if no
    size of the range fits even with a plan (with `plan=False`: without one).
    """
    return _largest_size(
        "batch", max_batch_size, model, inputs, arguments, (budget_gb, budget), plan, overhead,
        smallest, largest, multiple_of, make_loss_fn, progress)


@takes_planning(without=("dynamic",))
def max_sequence_length(model: nn.Module, inputs: object = None, *,
                        budget_gb: float | None = None, budget: int | str | None = None,
                        plan: bool = True, overhead: float | None = None, smallest: int = 1,
                        largest: int | None = None, multiple_of: int = 1,
                        make_loss_fn: MakeLoss | None = None, progress: Progress | None = None,
                        **arguments: Unpack[PlanArguments]) -> LargestSize:
    """Find the longest sequence whose training step fits a budget, without and with a plan.

    `inputs`: as for `planner.plan`; the second dimension of its tensors is varied, and in tensors
    of integers (tokens, masks) later ones of that size.  Or a function: `inputs(length)` returns
    the inputs of a step with sequences of that length.  Values are not checked, so `largest` must
    be the number of positions of the model.  Everything else is as for `max_batch_size`.
    """
    return _largest_size(
        "sequence", max_sequence_length, model, inputs, arguments, (budget_gb, budget), plan,
        overhead, smallest, largest, multiple_of, make_loss_fn, progress)


def check_overhead(overhead: float | None) -> float | None:
    """A checked limit on the extra time; raises `TypeError` or `ValueError`."""
    return None if overhead is None else check_number(
        "overhead", overhead, "a fraction of the step's time, such as 0.35",
        "a finite fraction of at least 0", lambda fraction: 0 <= fraction < math.inf)


def _largest_size(what: str, function: Callable[..., LargestSize], model: nn.Module,
                  inputs: object, arguments: PlanArguments,
                  budget: tuple[float | None, int | str | None], plan: bool,
                  overhead: float | None, smallest: int, largest: int | None, multiple_of: int,
                  make_loss_fn: MakeLoss | None, progress: Progress | None) -> LargestSize:
    """`function`, the public one that has these arguments."""
    multiple = check_count("multiple_of", multiple_of)
    low = check_count("smallest", smallest)
    high = _LARGEST * multiple if largest is None else check_count("largest", largest)
    first, last = -(-low // multiple), high // multiple
    if first > last:
        raise ValueError(f"there is no multiple of {multiple} from {low} to {high}: "
                         "smallest must not exceed largest")
    limit = check_overhead(overhead)
    planning = Planning.of(function, arguments).without_offload(f"planner.{function.__name__}")
    model, inputs = model_first(model, inputs)
    make_inputs = factory_of(model, inputs, what)
    budget_bytes = absolute_budget(*budget, f"which differs with the {what}")
    with watched(progress, f"looking for the largest {what} of {type(model).__name__}") as report:
        steps = SizedSteps(model, make_inputs, planning, what=what, make_loss_fn=make_loss_fn,
                           progress=report, are_many=bool(plan))
        effort = Effort(planning.solver, planning.time_limit, progress=report)
        return _Search(what, steps, budget_bytes, multiple, limit, effort, report).run(
            first, last, with_plan=bool(plan))


@dataclass(slots=True)
class _Search:
    """One search, over multiples of `multiple_of`: the plain step first, then, from its result, the
    planned one.  Numbers count these multiples."""

    what: str
    steps: SizedSteps
    budget_bytes: int
    multiple_of: int
    overhead_limit: float | None
    effort: Effort
    report: Progress
    schedules: dict[int, Schedule] = field(default_factory=dict)
    """A schedule within the budget and the limit on overhead, if known, by number."""
    minimum_bytes: dict[int, int] = field(default_factory=dict)
    """The smallest budget known to be feasible at a number that was searched."""
    overheads: dict[int, float] = field(default_factory=dict)
    """The least extra time of the plans found within the budget."""
    proven: set[int] = field(default_factory=set)
    """Numbers at which no plan exists."""
    small: list[Schedule] = field(default_factory=list)
    """Schedules of small peaks, of any number."""

    def run(self, first: int, last: int, *, with_plan: bool) -> LargestSize:
        """`first`, `last`: the range, in multiples."""
        plain = find_largest(self._plain_fits, self._plain_guess, first, last)
        if plain.low is None:
            self._require_captures()
        planned = Bracket(None, None)
        if with_plan:
            planned = self._largest_planned(first, last, known=plain)
        if (planned.low if with_plan else plain.low) is None:
            raise self._nothing_fits(with_plan)
        plan = None if planned.low is None else self._plan(planned.low)
        return self._result(plain, planned, plan)

    def _plain_fits(self, number: int) -> bool | None:
        step = self.steps.plain_at(number * self.multiple_of)
        if step is None:
            return None
        fits = step.plain_bytes <= self.budget_bytes
        self.report(f"{self.what} {number * self.multiple_of}: plain peak "
                    f"{format_bytes(step.baseline_peak_bytes)}")
        return fits

    def _plain_guess(self) -> float | None:
        return secant({number: float(step.plain_bytes) for number, step in self._captured.items()},
                      self.budget_bytes)

    @property
    def _captured(self) -> dict[int, PreparedStep]:
        """The steps captured so far, by number."""
        return {size // self.multiple_of: step for size, step in self.steps.captured.items()}

    def _require_captures(self) -> None:
        """Raise `CaptureError` if no size could be captured."""
        if self.steps.captured:
            return
        size, reason = next(iter(self.steps.skipped.items()))
        raise CaptureError(f"the step could be captured at no {self.what} size that was tried "
                           f"({', '.join(map(str, self.steps.skipped))}); at {size}: {reason}")

    def _nothing_fits(self, with_plan: bool) -> InfeasibleBudget:
        size = min(self.steps.captured)
        step = self.steps.captured[size]
        if not with_plan:
            return InfeasibleBudget(
                self.budget_bytes, step.plain_bytes, "",
                f"no {self.what} from {size} on fits in {self.budget_bytes:,} bytes without a "
                f"plan: the plain step of {size} takes {step.plain_bytes:,} bytes; "
                "look for one with plan=True")
        least = self.overheads.get(size // self.multiple_of)
        if least is not None:
            enough = step.takes_bytes(step.base, step.base.problem.keep_all_schedule)
            return InfeasibleBudget(
                self.budget_bytes, enough, "",
                f"no {self.what} from {size} on fits in {self.budget_bytes:,} bytes at "
                f"{format_fraction(self.overhead_limit or 0.0)} extra time: the best plan found "
                f"for {size} takes {format_fraction(least)}; allow more overhead, or a larger "
                f"budget (without extra time {enough:,} bytes)")
        found = refusal(self.steps.at(size) or step, self.budget_bytes, self.effort)
        return InfeasibleBudget(
            self.budget_bytes, found.minimum_bytes, found.bottleneck,
            f"no {self.what} from {size} on fits in {self.budget_bytes:,} bytes, with a plan or "
            f"without: a {self.what} of {size} needs {found.minimum_bytes:,} bytes. "
            f"{found.bottleneck}")

    def _plan(self, number: int) -> Plan:
        self.report(f"planning a {self.what} of {number * self.multiple_of}")
        return plan_within(self._captured[number], self.budget_bytes, self.effort,
                           warm_start=self.schedules.get(number))

    def _result(self, plain: Bracket, planned: Bracket, plan: Plan | None) -> LargestSize:
        multiple, captured = self.multiple_of, self._captured

        def size(number: int | None) -> int | None:
            return None if number is None else number * multiple

        def peak(number: int | None) -> int | None:
            return None if number is None else captured[number].baseline_peak_bytes

        def seconds(number: int | None, overhead: float = 0.0) -> float | None:
            return None if number is None else (
                captured[number].base.graph.step_seconds * (1 + overhead) / (number * multiple))

        return LargestSize(
            what=self.what, budget_bytes=self.budget_bytes,
            plain=size(plain.low), plain_peak_bytes=peak(plain.low),
            plain_next=size(plain.high), plain_next_peak_bytes=peak(plain.high),
            planned=size(planned.low), planned_next=size(planned.high),
            planned_next_minimum_bytes=self.minimum_bytes.get(planned.high or -1),
            proven=planned.high in self.proven,
            overhead_limit=self.overhead_limit, plan=plan,
            plain_seconds_per_item=seconds(plain.low),
            planned_seconds_per_item=seconds(planned.low, plan.overhead if plan else 0.0),
            skipped=tuple(sorted(self.steps.skipped.items())), captures=len(captured))

    def _largest_planned(self, first: int, last: int, known: Bracket) -> Bracket:
        """The largest number from `first` to `last` with a plan; the search begins at `known`, the
        result for the plain step."""
        start = first if known.low is None else known.low
        bracket = find_largest(self._fits, self._guess, start, last)
        if bracket.low is None and start > first:
            below = find_largest(self._fits, self._guess, first, start - 1)
            return Bracket(below.low, below.high if below.low != start - 1 else bracket.high)
        return bracket

    def _fits(self, number: int) -> bool | None:
        """True if a plan is known or found at the number; `None` if the step cannot be captured."""
        step = self.steps.at(number * self.multiple_of)
        if step is None:
            return None
        if not step.may_fit(self.budget_bytes):
            self.proven.add(number)
            return False
        return self._fits_known(number, step) or self._search(number, step)

    def _fits_known(self, number: int, step: PreparedStep) -> bool:
        """True if a schedule of another size fits."""
        return any(
            self._accept(number, step, variant, schedule) for variant in step.variants
            for schedule in (variant.problem.keep_all_schedule, *self.schedules.values(),
                             *self.small)
            if is_legal(variant.problem, schedule))

    def _search(self, number: int, step: PreparedStep) -> bool:
        limit, net_bytes = self.overhead_limit, step.budget.net_bytes(self.budget_bytes)
        if step.budget_of == "reserved":
            try:
                variant, result = schedule_reserving(step, self.budget_bytes, self.effort)
            except InfeasibleBudget as refusal:
                self.minimum_bytes[number] = refusal.minimum_bytes
                return False
            schedule = result.schedule
        elif limit is None:
            variant, schedule = smallest(step.variants, net_bytes)
            self.small.append(schedule)
            self.minimum_bytes[number] = variant.peak_bytes(schedule)
        else:
            variant, found = cheapest(step.variants, net_bytes, self.effort)
            schedule = found.schedule
            if isinstance(found, Refusal):
                self.minimum_bytes[number] = step.budget.whole_bytes(found.minimum_bytes)
                return False
            if found.overhead_bound > limit:
                self.proven.add(number)
        return self._accept(number, step, variant, schedule)

    def _accept(self, number: int, step: PreparedStep, variant: Variant, schedule: Schedule
                ) -> bool:
        """Record a schedule's overhead; return whether it is within the limits."""
        peak, cost = simulate(variant.problem, schedule)
        if peak > step.budget.net_bytes(self.budget_bytes) or (step.budget_of == "reserved" and (
                step.takes_bytes(variant, schedule) > self.budget_bytes)):
            return False
        base = variant.base_seconds
        overhead = (cost - base) / base if base else 0.0
        self.overheads[number] = min(overhead, self.overheads.get(number, math.inf))
        if self.overhead_limit is not None and overhead > self.overhead_limit:
            return False
        self.schedules[number] = schedule
        self.report(f"{number * self.multiple_of} fits with a plan "
                    f"({format_fraction(overhead)} extra time)")
        return True

    def _guess(self) -> float | None:
        if self.overhead_limit is None:
            return self._guess_by_memory()
        # Overhead grows approximately as a power of the size.
        points = {number: math.log(overhead) for number, overhead in self.overheads.items()
                  if overhead > 0}
        limit = self.overhead_limit
        if len(points) < 2 or limit <= 0:
            return None
        scaled = {round(2 ** 20 * math.log(number)): value for number, value in points.items()}
        reached = secant(scaled, math.log(limit))
        return None if reached is None or reached > 2 ** 24 else math.exp(reached / 2 ** 20)

    def _guess_by_memory(self) -> float | None:
        """The number at which the smallest known schedules reach the budget, interpolated from two
        sizes."""
        captured = self._captured
        if not self.small and len(captured) > 1:
            number = max(captured)
            self.small.append(minimum_peak(captured[number].base.problem))
        guesses = []
        for schedule in self.small:
            peaks = {number: float(variant.peak_bytes(schedule))
                     for number, step in captured.items() for variant in step.variants
                     if is_legal(variant.problem, schedule)}
            guesses.append(secant(peaks, self.budget_bytes))
        return max((guess for guess in guesses if guess is not None), default=None)
