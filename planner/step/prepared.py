"""A captured step made ready for planning: once, whatever the budgets.

Each form of the step is lowered to a problem; what no schedule changes goes into its budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner._graph_capture.training_graph import StepVariant, TrainingGraph
from planner.arguments.parallel import DataParallel
from planner.solvers.problem import Link, Schedule
from planner.solvers.simulator import Timeline, unroll
from planner.step.budget import StepBudget
from planner.step.lowering import lower
from planner.step.reserved import StepSurroundings
from planner.step.timeline import PlainTimeline
from planner.step.variant import Variant
from planner.units import format_fraction

if TYPE_CHECKING:
    from planner._apply.rewrite_spec import CallSignature, ParameterKey, RewriteSpec
    from planner._graph_capture.capture import CapturedStep


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A captured step, lowered to problems: all that planning needs, whatever the budget."""

    variants: tuple[Variant, ...]
    """The base variant first, then what else the step may run as."""
    baseline_peak_bytes: int
    """Peak of the plain eager step, resident memory and optimizer included."""
    plain: PlainTimeline
    """The plain eager step, moment after moment."""
    tensors: tuple[ParameterKey, ...]
    inputs: Any
    signature: CallSignature | None
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

    def reserved_bytes(self, variant: Variant, timeline: Timeline) -> int | None:
        """What torch reserves under a schedule of one form of the step."""
        around = self.surroundings
        return None if around is None else (
            around.replay(around.planned(variant.graph, timeline)).reserved_bytes)

    def with_link(self, link: Link) -> PreparedStep:
        """The step whose results may be stored on the host, by this link."""
        return replace(self, variants=tuple(replace(variant, problem=lower(variant.graph, link))
                                         for variant in self.variants))

    @property
    def base(self) -> Variant:
        """The step as it was captured."""
        return self.variants[0]

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
        return min(variant.budget.whole_bytes(variant.floor_bytes) for variant in self.variants)

    def takes_bytes(self, variant: Variant, schedule: Schedule) -> int:
        """What a schedule of one variant takes of that which a budget limits."""
        if self.budget_of == "reserved":
            reserved = self.reserved_bytes(variant, unroll(variant.problem, schedule))
            assert reserved is not None, "such a step is not planned by what is reserved"
            return reserved
        return variant.peak_bytes(schedule)

    def variant_of(self, spec: RewriteSpec) -> Variant:
        """The form that a plan with this rewrite spec is of."""
        return next((variant for variant in self.variants if (
            variant.low_peak, variant.chunks, variant.inner_chunks) == (
                spec.low_peak, spec.chunks, spec.inner_chunks)), self.base)

    def may_fit(self, limit_bytes: int) -> bool:
        """Whether no bound says that every plan of the whole step takes more."""
        net_bytes = self.budget.net_bytes(limit_bytes)
        return self.budget.is_possible(limit_bytes) and any(
            variant.may_fit(net_bytes) for variant in self.variants)


def prepare(step: CapturedStep, *, tensors: Sequence[ParameterKey], inputs: object,
            signature: CallSignature | None = None, backend: str = "eager",
            cost_model: str = "roofline", accumulation: int = 1,
            parallel: DataParallel | None = None, budget_of: str = "allocated",
            plain_net_bytes: int | None = None) -> PreparedStep:
    """Lower a captured step.

    `tensors`: every parameter and buffer of the model; `inputs`: a description of the step's
    inputs, in JSON values.  With `accumulation`, any micro-batch but the first is planned: the
    gradients of those before are resident.  `plain_net_bytes`: the peak of the plain step above
    what is resident, where other calls than this one decide it.

    Raises `ValueError` where a budget is of what is reserved and that is not known.
    """
    earlier_bytes = None
    if parallel is not None and not parallel.requires_gradient_sync and step.tracing.layout:
        earlier_bytes = step.tracing.layout.whole_gradient_bytes
    base = _variant(step, step.variants[0], accumulation, earlier_bytes)
    others = [_compared(_variant(step, variant, accumulation, earlier_bytes), variant, base)
              for variant in step.variants[1:]]
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
                         "of shards add up over micro-batches; give a budget of what is allocated")
    return PreparedStep(
        variants=(base, *others),
        baseline_peak_bytes=base.budget.whole_bytes(baseline_bytes),
        plain=PlainTimeline(
            tuple(base.budget.resident_bytes + size for size in plain.memory_timeline),
            plain.backward_begins,
        ),
        tensors=tuple(tensors),
        inputs=_as_json(inputs),
        signature=signature,
        training=step.training,
        overrides=tuple((name, _as_json(value)) for name, value in step.overrides),
        holds_output=step.holds_output,
        backend=backend,
        cost_model=cost_model,
        parallel=parallel,
        budget_of=budget_of,
        surroundings=surroundings,
        baseline_reserved_bytes=reserved,
    )


def _variant(step: CapturedStep, variant: StepVariant, accumulation: int, earlier_bytes: int | None
          ) -> Variant:
    """One form of a step, for Inductor with the breakdown of what is compiled."""
    graph = variant.graph if accumulation == 1 else _accumulating(variant.graph, accumulation,
                                                               earlier_bytes)
    problem, budget = lower(graph), StepBudget.of(graph, step.optimizer)
    if step.compiled is None:
        return Variant(graph, problem, budget)
    from planner.step.compiled_breakdown import CompiledBreakdown

    return Variant(graph, problem, budget,
                CompiledBreakdown(step.compiled, variant.saved_by_default, variant.saving_costs))


def _accumulating(graph: TrainingGraph, accumulation: int, earlier_bytes: int | None
                  ) -> TrainingGraph:
    """A micro-batch after the first: its graph, gradients of the one before being there;
    `earlier_bytes`: of those, where they are others than its own."""
    if earlier_bytes is None:
        earlier_bytes = graph.gradient_bytes
    return replace(
        graph, resident=replace(graph.resident, gradients_bytes=earlier_bytes),
        notes=(*graph.notes, f"gradients of {accumulation} micro-batches add up: those of the "
               "steps before are counted as resident; the output is taken to be let go as "
               "each backward ends"))


def _compared(variant: Variant, source: StepVariant, base: Variant) -> Variant:
    """Another form than the base, with a note of what it costs."""
    base_seconds = base.graph.step_seconds
    extra_seconds = variant.graph.step_seconds - base_seconds
    share = format_fraction(extra_seconds / base_seconds if base_seconds else 0.0)
    what = (f"the insides of layers run in {source.inner_chunks} chunks, a loss head, if "
            f"there is one, in {source.chunks}: rounding may differ" if source.inner_chunks > 1 else
            f"the widest part of the step runs in {source.chunks} chunks: rounding may differ"
            if source.chunks > 1 else
            "parts of gradients that are read late are copied, so that the whole can go early "
            "(gradients of concatenations)")
    graph = replace(variant.graph, notes=(
        *variant.graph.notes, f"{what}; {share} of the step, counted as extra time"))
    return replace(variant, graph=graph, low_peak=source.low_peak, chunks=source.chunks,
                   inner_chunks=source.inner_chunks, extra_seconds=extra_seconds)


def _as_json(value: Any) -> Any:
    """A value as it comes back from a JSON file: tuples are lists, keys are text."""
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value
