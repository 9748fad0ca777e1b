"""Rank the choices of micro-batch, accumulation and plan for an effective batch.

Model of the world: an effective batch of N samples runs as k micro-batches of N/k, whose gradients
are summed; the optimizer steps once.  The time of a choice is that of its k steps, including
recomputation, and of the k - 1 sums of all gradients.  With accumulation, gradients are resident
from the start: each micro-batch after the first allocates new ones in addition.

Blind spots: seconds are estimates (see `graph_capture.op_costs.devices`); the optimizer's own step
is the same in every choice and not counted, nor is communication between ranks; a model whose batch
statistics matter (BatchNorm) trains differently with other micro-batches.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

from torch import nn

from planner._graph_capture.op_costs.devices import device_model
from planner.arguments.budget import absolute_budget
from planner.arguments.parallel import DataParallel
from planner.arguments.planning import PlanArguments, Planning, check_count, takes_planning
from planner.errors import CaptureError, InfeasibleBudget
from planner.plans.plan import Plan
from planner.progress import Progress, watched
from planner.search.planning import plan_within, refusal
from planner.search.variants import Effort
from planner.sizes.bracketing import find_largest, secant
from planner.sizes.sized_steps import MakeLoss, SizedSteps, factory_of, model_first
from planner.step.prepared import PreparedStep

PLANS = 3
"""Number of micro-batches that are planned: the largest feasible ones."""
PLAIN = 4
"""Number of micro-batches listed without a plan: the largest that fit."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run an effective batch."""

    micro_batch: int
    accumulation: int
    """Micro-batches per optimizer step."""
    peak_bytes: int
    """Predicted peak of the whole step, within the budget."""
    overhead: float
    """Estimated extra time of the plan, as a fraction; 0 without one."""
    seconds_per_sample: float
    """Estimated; without the optimizer's own step."""
    plan: Plan | None = field(repr=False)
    """The plan of one micro-batch, with earlier gradients counted; `None`: the model runs
    unplanned."""
    parallel: DataParallel | None = None
    """Data parallelism of the run; each rank runs this micro-batch.  `None`: a single rank."""

    def to_dict(self) -> dict[str, Any]:
        """The choice as JSON values, without the plan itself."""
        return {
            "micro_batch": self.micro_batch,
            "parallel": None if self.parallel is None else {
                "kind": self.parallel.kind, "ranks": self.parallel.ranks},
            "accumulation": self.accumulation,
            "planned": self.plan is not None,
            "peak_bytes": self.peak_bytes,
            "overhead": self.overhead,
            "seconds_per_sample": self.seconds_per_sample,
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """Choices that fit the budget, the fastest first."""

    budget_bytes: int
    effective_batch: int
    choices: tuple[Choice, ...]
    """Sorted by seconds per sample; at least one."""
    skipped: tuple[tuple[int, str], ...]
    """Micro-batches whose step could not be captured, with the reason."""

    @property
    def best(self) -> Choice:
        """The fastest choice."""
        return self.choices[0]

    def to_dict(self) -> dict[str, Any]:
        """The advice as JSON values, without the plans themselves."""
        return {
            "budget_bytes": self.budget_bytes,
            "effective_batch": self.effective_batch,
            "choices": [choice.to_dict() for choice in self.choices],
            "skipped": [{"size": size, "reason": reason} for size, reason in self.skipped],
        }

    def __str__(self) -> str:
        from planner.reporters.choices import advice_report
        from planner.reporters.table import plain_text

        return plain_text(advice_report(self))


@takes_planning(without=("accumulation", "dynamic"))
def advise(model: nn.Module, inputs: object = None, *, effective_batch: int,
           budget_gb: float | None = None, budget: int | str | None = None,
           make_loss_fn: MakeLoss | None = None, progress: Progress | None = None,
           **arguments: Unpack[PlanArguments]) -> Advice:
    """List the ways to train with an effective batch within a budget, the fastest first.

    Micro-batches are divisors of `effective_batch` (of each rank's part of it), so that all have
    one size.  The result lists the largest that fit without a plan, and the largest that fit with
    one. Nothing is executed.

    Args:
        model, inputs: as for `planner.max_batch_size`.
        effective_batch: samples per optimizer step.
        make_loss_fn: `make_loss_fn(batch)` returns the `loss_fn` of a step of that batch.
        parallel: data parallelism of the run, in which each rank runs its part of the effective
            batch; seconds do not include communication that does not overlap with computation.
        time_limit: seconds for each plan; soft.

    The other arguments and errors are those of `planner.plan`, except `accumulation`, which is
    searched; the budget must not be a percentage. Raises `InfeasibleBudget` if nothing fits.
    """
    model, inputs = model_first(model, inputs)
    planning = Planning.of(advise, arguments).without_offload("planner.advise")
    count = check_count("effective_batch", effective_batch)
    ranks = 1 if planning.parallel is None else planning.parallel.ranks
    if count % ranks:
        raise ValueError(f"effective_batch {count} cannot be dealt out evenly to {ranks} ranks; "
                         f"use a multiple of {ranks}")
    budget_bytes = absolute_budget(budget_gb, budget, "which differs with the batch")
    if planning.cost_model == "flops":
        raise ValueError("cost_model='flops' says nothing of time; advise needs 'roofline'")
    make_inputs = factory_of(model, inputs, "batch")
    with watched(progress, f"looking for ways to run {type(model).__name__}") as report:
        effort = Effort(planning.solver, planning.time_limit, progress=report)
        own = count // ranks
        steps = SizedSteps(model, make_inputs, planning, what="batch", make_loss_fn=make_loss_fn,
                           progress=report, accumulation_of=partial(operator.floordiv, own))
        return replace(_Counsel(steps, budget_bytes, own, effort).give(), effective_batch=count)


class _Counsel:
    def __init__(self, steps: SizedSteps, budget_bytes: int, effective_batch: int,
                 effort: Effort) -> None:
        self.steps, self.budget_bytes, self.effort = steps, budget_bytes, effort
        self.effective_batch = effective_batch

    def give(self) -> Advice:
        divisors = _divisors(self.effective_batch)
        fit = find_largest(lambda number: self._fits_plainly(divisors[number - 1]),
                           lambda: self._guess(divisors), 1, len(divisors)).low or 0
        plain = [choice for micro_batch in divisors[max(0, fit - PLAIN):fit]
                 if (choice := self._plain(micro_batch)) is not None]
        larger: list[int] = []
        for micro_batch in divisors[fit:]:
            step = self.steps.at(micro_batch)
            if step is not None and not step.may_fit(self.budget_bytes):
                break  # and larger ones are not possible either
            larger += [micro_batch] if step is not None else []
        choices = plain + self._planned(larger)
        if not choices:
            raise self._nothing_fits()
        choices.sort(key=lambda choice: (choice.seconds_per_sample, choice.peak_bytes))
        return Advice(self.budget_bytes, self.effective_batch, tuple(choices),
                      tuple(sorted(self.steps.skipped.items())))

    def _fits_plainly(self, micro_batch: int) -> bool | None:
        step = self.steps.plain_at(micro_batch)
        return None if step is None else step.plain_bytes <= self.budget_bytes

    def _guess(self, divisors: Sequence[int]) -> float | None:
        peaks = {size: float(step.plain_bytes)
                 for size, step in self.steps.captured.items()}
        reached = secant(peaks, self.budget_bytes)
        return None if reached is None else bisect.bisect_right(divisors, reached)

    def _plain(self, micro_batch: int) -> Choice | None:
        step = self.steps.plain_at(micro_batch)
        if step is None or not self._fits_plainly(micro_batch):
            return None
        return Choice(micro_batch, self._accumulation(micro_batch), step.baseline_peak_bytes, 0.0,
                      self._seconds_per_sample(micro_batch, step, 0.0), None, step.parallel)

    def _planned(self, micro_batches: Sequence[int]) -> list[Choice]:
        """The largest of the micro-batches that have a plan."""
        choices: list[Choice] = []
        for micro_batch in reversed(micro_batches):
            if len(choices) == PLANS:
                break
            step = self.steps.captured[micro_batch]
            try:
                plan = plan_within(step, self.budget_bytes, self.effort)
            except InfeasibleBudget:
                continue
            choices.append(Choice(
                micro_batch, self._accumulation(micro_batch), plan.peak_bytes, plan.overhead,
                self._seconds_per_sample(micro_batch, step, plan.overhead), plan, step.parallel))
        return choices

    def _accumulation(self, micro_batch: int) -> int:
        return self.effective_batch // micro_batch

    def _seconds_per_sample(self, micro_batch: int, step: PreparedStep, overhead: float) -> float:
        count, graph = self._accumulation(micro_batch), step.base.graph
        # A sum reads both gradients and writes one.
        device = device_model(graph.device, gpu=self.steps.planning.gpu)
        sums = device.traffic_seconds(3 * graph.gradient_bytes)
        whole = count * graph.step_seconds * (1 + overhead) + (count - 1) * sums
        return whole / self.effective_batch / (1 if step.parallel is None else step.parallel.ranks)

    def _nothing_fits(self) -> InfeasibleBudget | CaptureError:
        captured = self.steps.captured
        if not captured:
            size, reason = next(iter(self.steps.skipped.items()))
            return CaptureError("the step could be captured at no divisor of the effective batch "
                                f"{self.effective_batch} that was tried; at {size}: {reason}")
        micro_batch, step = min(captured.items())
        found = refusal(step, self.budget_bytes, self.effort)
        return InfeasibleBudget(
            self.budget_bytes, found.minimum_bytes, found.bottleneck,
            f"not even micro-batches of {micro_batch} fit in {self.budget_bytes:,} bytes: they "
            f"need {found.minimum_bytes:,} bytes. {found.bottleneck}")


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
