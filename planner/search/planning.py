"""From a captured step and a budget to a plan.

A captured step is made ready once (`prepare`) and then planned under as many budgets as wanted.
The budget is that of the whole step; what no schedule changes (resident memory) is taken off before
the solver sees it, and the optimizer's step, which no schedule changes either, sets a floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graph_capture.training_graph import OptimizerMemory, StepForm, TrainingGraph
from planner.errors import InfeasibleBudget
from planner.plans.decisions import build_recipe, decide
from planner.plans.plan import Plan
from planner.plans.version import created_with
from planner.progress import Progress
from planner.search.forms import Refused, cheapest, solve_variant
from planner.step.accounting import (
    account,
    describe_bottleneck,
    optimizer_step_bytes,
    resident_bytes,
)
from planner.step.lowering import lower, without_buffers
from planner.units import format_fraction
from solvers.problem import Problem, Schedule
from solvers.result import Result
from solvers.simulator import simulate, unroll

if TYPE_CHECKING:
    from apply.recipe import ParameterKey, Recipe
    from graph_capture.capture import CapturedStep
    from planner.search.compiled_account import CompiledAccount


_DIAGNOSIS_SECONDS = 1.0
"""Longest search for a cheap schedule that only serves to explain a refusal."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A captured step, lowered to a problem: all that planning needs, whatever the budget."""

    graph: TrainingGraph
    problem: Problem
    optimizer: OptimizerMemory | None
    baseline_peak_bytes: int
    """Peak of the plain eager step, resident memory and optimizer included."""
    tensors: tuple[ParameterKey, ...]
    inputs: Any
    training: bool
    overrides: tuple[tuple[str, object], ...]
    backend: str
    cost_model: str
    compiled: CompiledAccount | None = None
    """Judges schedules by the code that Inductor generates; `None` for the eager backend."""
    lean: PreparedStep | None = None
    """The step whose backward holds less at the price of copies
    (`graph_capture.joint_graph.low_peak_backward`); `None` where there is nothing to copy."""
    is_lean: bool = False
    """Whether it is such a step itself."""
    copy_seconds: float = 0.0
    """What the copies of a lean step take: part of the extra time of its plans."""

    @property
    def variants(self) -> tuple[PreparedStep, ...]:
        """The step as it was captured, and the lean one where there is one."""
        return (self,) if self.lean is None else (self, self.lean)

    def variant_of(self, recipe: Recipe) -> PreparedStep:
        """The variant that a plan with this recipe is of."""
        return self.lean if recipe.low_peak and self.lean is not None else self

    @property
    def plain_seconds(self) -> float:
        """Duration of the step without recomputation and copies."""
        return self.graph.step_seconds - self.copy_seconds

    @property
    def optimizer_step_bytes(self) -> int:
        """Peak of the optimizer's step, resident memory included; 0 without an optimizer."""
        return optimizer_step_bytes(self.graph, self.optimizer)

    @property
    def resident_bytes(self) -> int:
        """Held whatever the schedule."""
        return resident_bytes(self.graph, self.optimizer)

    @property
    def keep_all_peak_bytes(self) -> int:
        """Peak of the step in which nothing is recomputed."""
        timeline = unroll(self.problem, self.problem.plain_schedule)
        return account(self.graph, timeline, self.optimizer).peak_bytes


@dataclass(frozen=True, slots=True)
class Effort:
    """How a budget is to be met."""

    solver: str = "auto"
    time_limit: float = 60.0
    """Seconds; soft."""
    seed: int = 0
    progress: Progress | None = None


def prepare(step: CapturedStep, *, tensors: Sequence[ParameterKey], inputs: object,
            backend: str = "eager", cost_model: str = "roofline",
            accumulation: int = 1) -> PreparedStep:
    """Lower a captured step.

    `tensors`: every parameter and buffer of the model; `inputs`: a description of the step's
    inputs, in JSON values.  With `accumulation`, any micro-step but the first is planned: the
    gradients of those before are resident.
    """
    graph, problem, compiled = _ready(step, step.forms[0], accumulation)
    baseline_bytes, optimizer = step.baseline.peak_bytes, step.optimizer
    if accumulation > 1:
        baseline_bytes = max(baseline_bytes - graph.gradient_bytes, step.later.peak_bytes)
    baseline = resident_bytes(graph, optimizer) + baseline_bytes
    prepared = PreparedStep(
        graph=graph, problem=problem, optimizer=optimizer,
        baseline_peak_bytes=max(baseline, optimizer_step_bytes(graph, optimizer)),
        tensors=tuple(tensors), inputs=as_json(inputs), training=step.training,
        overrides=tuple((name, as_json(value)) for name, value in step.overrides),
        backend=backend, cost_model=cost_model, compiled=compiled)
    for form in step.forms[1:]:
        low_peak = _lean_variant(prepared, *_ready(step, form, accumulation))
        prepared = replace(prepared, lean=low_peak)
    return prepared


def _ready(step: CapturedStep, form: StepForm, accumulation: int
           ) -> tuple[TrainingGraph, Problem, CompiledAccount | None]:
    """One form of a step as its graph, its problem and, for Inductor, the account of what is
    compiled."""
    graph = form.graph if accumulation == 1 else _accumulating(form.graph, accumulation)
    problem = lower(graph)
    if step.compiled is None:
        return graph, problem, None
    from planner.search.compiled_account import CompiledAccount

    graph = replace(graph, buffers=tuple(
        replace(buffer, size_bytes=0) if index in form.fused else buffer
        for index, buffer in enumerate(graph.buffers)))
    return graph, without_buffers(problem, form.fused), CompiledAccount(
        step.compiled, form.saved_by_default, form.saving_costs)


def _accumulating(graph: TrainingGraph, accumulation: int) -> TrainingGraph:
    """A micro-step after the first: its graph, gradients of the one before being there."""
    return replace(
        graph, resident=replace(graph.resident, gradients_bytes=graph.gradient_bytes),
        notes=(*graph.notes, f"gradients of {accumulation} micro-steps add up: those of the "
               "steps before are counted as resident; the output is taken to be let go as "
               "each backward ends"))


def _lean_variant(prepared: PreparedStep, graph: TrainingGraph, problem: Problem,
                  compiled: CompiledAccount | None) -> PreparedStep:
    """The lean step, with a note of what it costs."""
    plain_seconds = prepared.graph.step_seconds
    copy_seconds = graph.step_seconds - plain_seconds
    share = format_fraction(copy_seconds / plain_seconds if plain_seconds else 0.0)
    graph = replace(graph, notes=(*graph.notes, (
        "parts of gradients that are read late are copied, so that the whole can go early "
        f"(gradients of concatenations): {share} of the step, counted as extra time")))
    return replace(prepared, graph=graph, problem=problem, compiled=compiled, is_lean=True,
                   copy_seconds=copy_seconds)


def plan_within(prepared: PreparedStep, budget_bytes: int | None, effort: Effort | None = None, *,
                warm_start: Schedule | None = None) -> Plan:
    """The cheapest plan found whose whole step peaks within `budget_bytes`; raises
    `InfeasibleBudget`."""
    if prepared.compiled is not None:
        from planner.search.compiled import plan_compiled

        return plan_compiled(prepared, budget_bytes, effort or Effort())
    step, result = schedule_within(prepared, budget_bytes, effort or Effort(),
                                   warm_start=warm_start)
    return make_plan(step, budget_bytes, result)


def schedule_within(prepared: PreparedStep, budget_bytes: int | None, effort: Effort, *,
                    warm_start: Schedule | None = None) -> tuple[PreparedStep, Result]:
    """The cheapest schedule found, and the variant of the step that it is of; raises
    `InfeasibleBudget`."""
    if budget_bytes is None:
        return prepared, solve_variant(prepared, None, Effort(solver="none"))
    floor = optimizer_step_bytes(prepared.graph, prepared.optimizer)
    net = budget_bytes - prepared.resident_bytes
    if budget_bytes < floor or net < 0:
        raise infeasible(prepared, budget_bytes, effort)
    try:
        return cheapest(prepared.variants, net, effort, warm_start)
    except Refused as refusal:
        raise _refusal(refusal.step, budget_bytes, refusal.minimum_bytes, refusal.schedule
                       ) from None


def smallest_result(prepared: PreparedStep, effort: Effort) -> tuple[int, PreparedStep, Result]:
    """The smallest budget that is known to be met, in bytes of the whole step, and a schedule
    within it, with the variant of the step that it is of.  Where the optimizer's step holds more
    than any schedule needs, that is its peak."""
    net = _least_net_bytes(prepared)
    try:
        step, result = cheapest(prepared.variants, net, effort)
    except Refused as refusal:
        net, step = refusal.minimum_bytes, refusal.step
        result = solve_variant(step, net, effort, refusal.schedule)
    return prepared.resident_bytes + net, step, result


def infeasible(prepared: PreparedStep, budget_bytes: int, effort: Effort) -> InfeasibleBudget:
    """The error for a budget below what the optimizer's step or resident memory takes: the smallest
    that can be met, and what holds it."""
    net, step = _least_net_bytes(prepared), prepared
    brief = replace(effort, time_limit=min(effort.time_limit, _DIAGNOSIS_SECONDS))
    try:
        step, result = cheapest(prepared.variants, net, brief)
        schedule = result.schedule
    except Refused as refusal:
        net, step, schedule = refusal.minimum_bytes, refusal.step, refusal.schedule
    return _refusal(step, budget_bytes, net, schedule)


def _least_net_bytes(prepared: PreparedStep) -> int:
    """What the optimizer's step holds, resident memory not included: no plan needs less."""
    return max(0, optimizer_step_bytes(prepared.graph, prepared.optimizer)
               - prepared.resident_bytes)


def _refusal(prepared: PreparedStep, budget_bytes: int, net_bytes: int,
             schedule: Schedule) -> InfeasibleBudget:
    bottleneck = describe_bottleneck(
        prepared.graph, unroll(prepared.problem, schedule), prepared.optimizer)
    return InfeasibleBudget(budget_bytes, prepared.resident_bytes + net_bytes, bottleneck)


def keep_plan(prepared: PreparedStep, budget_bytes: int | None, schedule: Schedule, solver: str,
              seconds: float) -> Plan:
    """The plan of a schedule that is known, with the problem's own account."""
    simulation = simulate(prepared.problem, schedule)
    return make_plan(prepared, budget_bytes, Result(
        schedule=schedule, peak_bytes=simulation.peak_bytes, cost=simulation.cost,
        lower_bound=0.0, status="feasible", seconds=seconds, solver=solver,
        plain_cost=prepared.problem.plain_cost))


def make_plan(prepared: PreparedStep, budget_bytes: int | None, result: Result) -> Plan:
    """The plan that a solver's result stands for, with the account of the whole step."""
    graph, problem, schedule = prepared.graph, prepared.problem, result.schedule
    timeline = unroll(problem, schedule)
    step = account(graph, timeline, prepared.optimizer)
    decisions = decide(graph, problem, schedule)
    overhead = overhead_of(graph, schedule, prepared.plain_seconds)
    return Plan(
        budget_bytes=budget_bytes,
        peak_bytes=step.peak_bytes,
        baseline_peak_bytes=prepared.baseline_peak_bytes,
        resident_bytes=step.resident_bytes,
        memory=step.memory,
        forward_backward_peak_bytes=step.forward_backward_peak_bytes,
        optimizer_step_peak_bytes=step.optimizer_step_peak_bytes,
        recompute_flops=sum(row.flops * row.recomputations for row in decisions),
        step_flops=graph.step_flops,
        overhead=overhead,
        # Where proven, the two are one number; the bound's own rounding would say otherwise.
        overhead_bound=overhead if result.status == "optimal" else (
            min(max(result.overhead_bound, 0.0), overhead)),
        status=result.status,
        solver=result.solver,
        optimizer=prepared.optimizer,
        device=graph.device,
        backend=prepared.backend,
        cost_model=prepared.cost_model,
        decisions=decisions,
        recipe=build_recipe(graph, timeline, tensors=prepared.tensors,
                            training=prepared.training, overrides=prepared.overrides,
                            low_peak=prepared.is_lean),
        inputs=prepared.inputs,
        notes=graph.notes,
        created_with=created_with(),
        solve_seconds=result.seconds,
    )


def as_json(value: Any) -> Any:
    """A value as it comes back from a JSON file: tuples are lists, keys are text."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return value


def overhead_of(graph: TrainingGraph, schedule: Sequence[int], plain_seconds: float) -> float:
    """Seconds of all runs above `plain_seconds`, as a fraction of these; 0 where nothing takes
    time."""
    seen: set[int] = set()
    extra = graph.step_seconds - plain_seconds
    for index in schedule:
        if index in seen:
            extra += graph.ops[index].seconds
        seen.add(index)
    return extra / plain_seconds if plain_seconds > 0 else 0.0
