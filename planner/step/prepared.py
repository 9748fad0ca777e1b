"""A captured step made ready for planning: once, whatever the budgets.

Each form of the step is lowered to a problem; what no schedule changes goes into its budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner._graph_capture.training_graph import StepForm, TrainingGraph
from planner.arguments.parallel import DataParallel
from planner.solvers.problem import Link, Schedule
from planner.solvers.simulator import Timeline, unroll
from planner.step.budget import StepBudget
from planner.step.course import PlainCourse
from planner.step.form import Form
from planner.step.lowering import lower
from planner.step.reserved import StepSurroundings
from planner.units import format_fraction

if TYPE_CHECKING:
    from planner._apply.recipe import Circumstances, ParameterKey, Recipe
    from planner._graph_capture.capture import CapturedStep


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A captured step, lowered to problems: all that planning needs, whatever the budget."""

    forms: tuple[Form, ...]
    """The base form first, then what else the step may run as."""
    baseline_peak_bytes: int
    """Peak of the plain eager step, resident memory and optimizer included."""
    plain: PlainCourse
    """The plain eager step, moment after moment."""
    tensors: tuple[ParameterKey, ...]
    inputs: Any
    circumstances: Circumstances | None
    training: bool
    overrides: tuple[tuple[str, object], ...]
    holds_output: bool
    """Whether the caller holds the model's output until the backward ends."""
    backend: str
    cost_model: str
    parallel: DataParallel | None = None
    """`None`: there is one rank."""
    budget_of: str = "allocated"
    """What a budget is a limit on, as in `planner.plan`."""
    surroundings: StepSurroundings | None = None
    """What stands around forward and backward; `None` where it is not known what is reserved."""
    baseline_reserved_bytes: int | None = None
    """What torch reserves for the plain eager step."""

    @property
    def plain_bytes(self) -> int:
        """What the plain eager step takes of that which a budget limits."""
        if self.budget_of == "allocated" or self.baseline_reserved_bytes is None:
            return self.baseline_peak_bytes
        return self.baseline_reserved_bytes

    def reserved_bytes(self, form: Form, timeline: Timeline) -> int | None:
        """What torch reserves under a schedule of one form of the step."""
        around = self.surroundings
        return None if around is None else (
            around.replay(around.planned(form.graph, timeline)).reserved_bytes)

    def with_link(self, link: Link) -> PreparedStep:
        """The step whose results may be stored on the host, by this link."""
        return replace(self, forms=tuple(replace(form, problem=lower(form.graph, link))
                                         for form in self.forms))

    @property
    def base(self) -> Form:
        """The step as it was captured."""
        return self.forms[0]

    @property
    def budget(self) -> StepBudget:
        """What the step takes whatever the schedule."""
        return self.base.budget

    @property
    def resident_bytes(self) -> int:
        """Held whatever the schedule."""
        return self.budget.resident_bytes

    @property
    def keep_all_peak_bytes(self) -> int:
        """Peak of the step in which nothing is recomputed."""
        return self.base.peak_bytes(self.base.problem.keep_all_schedule)

    @property
    def proven_minimum_bytes(self) -> int:
        """No plan of the step peaks below it."""
        return min(form.budget.whole_bytes(form.floor_bytes) for form in self.forms)

    def takes_bytes(self, form: Form, schedule: Schedule) -> int:
        """What a schedule of one form takes of that which a budget limits."""
        if self.budget_of == "reserved":
            reserved = self.reserved_bytes(form, unroll(form.problem, schedule))
            assert reserved is not None, "such a step is not planned by what is reserved"
            return reserved
        return form.peak_bytes(schedule)

    def form_of(self, recipe: Recipe) -> Form:
        """The form that a plan with this recipe is of."""
        return next((form for form in self.forms if (
            form.low_peak, form.pieces, form.inner_pieces) == (
                recipe.low_peak, recipe.pieces, recipe.inner_pieces)), self.base)

    def may_fit(self, limit_bytes: int) -> bool:
        """Whether no bound says that every plan of the whole step takes more."""
        net_bytes = self.budget.net_bytes(limit_bytes)
        return self.budget.is_possible(limit_bytes) and any(
            form.may_fit(net_bytes) for form in self.forms)


def prepare(step: CapturedStep, *, tensors: Sequence[ParameterKey], inputs: object,
            circumstances: Circumstances | None = None, backend: str = "eager",
            cost_model: str = "roofline", accumulation: int = 1,
            parallel: DataParallel | None = None, budget_of: str = "allocated",
            plain_net_bytes: int | None = None) -> PreparedStep:
    """Lower a captured step.

    `tensors`: every parameter and buffer of the model; `inputs`: a description of the step's
    inputs, in JSON values.  With `accumulation`, any micro-step but the first is planned: the
    gradients of those before are resident.  `plain_net_bytes`: the peak of the plain step above
    what is resident, where other calls than this one decide it.

    Raises `ValueError` where a budget is of what is reserved and that is not known.
    """
    earlier_bytes = None
    if parallel is not None and not parallel.requires_gradient_sync and step.tracing.layout:
        earlier_bytes = step.tracing.layout.whole_gradient_bytes
    base = _form(step, step.forms[0], accumulation, earlier_bytes)
    others = [_compared(_form(step, form, accumulation, earlier_bytes), form, base)
              for form in step.forms[1:]]
    baseline_bytes, plain = step.baseline.peak_bytes, step.baseline
    if accumulation > 1:
        assert step.later is not None
        plain = step.later
        baseline_bytes = max(baseline_bytes - base.graph.resident.gradients_bytes,
                             step.later.peak_bytes)
    if plain_net_bytes is not None:
        baseline_bytes = plain_net_bytes
    surroundings = StepSurroundings.of(step, accumulation)
    reserved = None if surroundings is None else surroundings.plain_reserved_bytes()
    if budget_of == "reserved" and reserved is None:
        raise ValueError('budget_of="reserved": what torch reserves is not known where gradients '
                         "of shards add up over micro-steps; give a budget of what is allocated")
    return PreparedStep(
        forms=(base, *others),
        baseline_peak_bytes=base.budget.whole_bytes(baseline_bytes),
        plain=PlainCourse(tuple(base.budget.resident_bytes + size for size in plain.course),
                          plain.backward_begins),
        tensors=tuple(tensors), inputs=_as_json(inputs),
        circumstances=circumstances, training=step.training,
        overrides=tuple((name, _as_json(value)) for name, value in step.overrides),
        holds_output=step.holds_output,
        backend=backend, cost_model=cost_model, parallel=parallel, budget_of=budget_of,
        surroundings=surroundings, baseline_reserved_bytes=reserved)


def _form(step: CapturedStep, form: StepForm, accumulation: int, earlier_bytes: int | None
          ) -> Form:
    """One form of a step, for Inductor with the account of what is compiled."""
    graph = form.graph if accumulation == 1 else _accumulating(form.graph, accumulation,
                                                               earlier_bytes)
    problem, budget = lower(graph), StepBudget.of(graph, step.optimizer)
    if step.compiled is None:
        return Form(graph, problem, budget)
    from planner.step.compiled_account import CompiledAccount

    return Form(graph, problem, budget,
                CompiledAccount(step.compiled, form.saved_by_default, form.saving_costs))


def _accumulating(graph: TrainingGraph, accumulation: int, earlier_bytes: int | None
                  ) -> TrainingGraph:
    """A micro-step after the first: its graph, gradients of the one before being there;
    `earlier_bytes`: of those, where they are others than its own."""
    if earlier_bytes is None:
        earlier_bytes = graph.gradient_bytes
    return replace(
        graph, resident=replace(graph.resident, gradients_bytes=earlier_bytes),
        notes=(*graph.notes, f"gradients of {accumulation} micro-steps add up: those of the "
               "steps before are counted as resident; the output is taken to be let go as "
               "each backward ends"))


def _compared(form: Form, source: StepForm, base: Form) -> Form:
    """Another form than the base, with a note of what it costs."""
    base_seconds = base.graph.step_seconds
    extra_seconds = form.graph.step_seconds - base_seconds
    share = format_fraction(extra_seconds / base_seconds if base_seconds else 0.0)
    what = (f"the insides of layers run in {source.inner_pieces} pieces, a loss head, if "
            f"there is one, in {source.pieces}: rounding may differ" if source.inner_pieces > 1 else
            f"the widest part of the step runs in {source.pieces} pieces: rounding may differ"
            if source.pieces > 1 else
            "parts of gradients that are read late are copied, so that the whole can go early "
            "(gradients of concatenations)")
    graph = replace(form.graph, notes=(
        *form.graph.notes, f"{what}; {share} of the step, counted as extra time"))
    return replace(form, graph=graph, low_peak=source.low_peak, pieces=source.pieces,
                   inner_pieces=source.inner_pieces, extra_seconds=extra_seconds)


def _as_json(value: Any) -> Any:
    """A value as it comes back from a JSON file: tuples are lists, keys are text."""
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value
