"""Prepare a captured step for planning under any budget.

Each graph variant of the step is lowered to a problem; memory that no schedule changes goes into
its budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner._apply.rewrite_spec import CallSignature, ParameterKey, RewriteSpec, SymbolicSizes
from planner._graph_capture.capture import CapturedStep, SymbolicStep
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.training_graph import StepVariant, TrainingGraph
from planner.arguments.parallel import DataParallel
from planner.solvers.problem import Link, Schedule
from planner.solvers.simulator import Timeline, unroll
from planner.step.budget import StepBudget
from planner.step.categories import PlainTimeline
from planner.step.lowering import lower
from planner.step.other_sizes import sizes_of
from planner.step.reserved import StepSurroundings
from planner.step.variant import Variant
from planner.units import format_fraction


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A captured step, lowered to problems: the input of planning, for any budget."""

    variants: tuple[Variant, ...]
    """The base variant first, then the other graph variants."""
    baseline_peak_bytes: int
    """Peak of the plain eager step, resident memory and optimizer included."""
    plain: PlainTimeline
    """Memory timeline of the plain eager step."""
    tensors: tuple[ParameterKey, ...]
    inputs: Any
    signature: CallSignature | None
    training: bool
    overrides: tuple[tuple[str, object], ...]
    holds_output: bool
    """True if the caller keeps the model's output until the backward ends."""
    backend: str
    cost_model: str
    parallel: DataParallel | None = None
    """`None`: a single rank."""
    budget_of: str = "allocated"
    """The memory that a budget limits, as in `planner.plan`."""
    surroundings: StepSurroundings | None = None
    """The rest of the training loop; `None` if reserved memory cannot be predicted."""
    baseline_reserved_bytes: int | None = None
    """Reserved memory of the plain eager step."""

    @property
    def plain_bytes(self) -> int:
        """Memory of the plain eager step, in the unit that a budget limits."""
        if self.budget_of == "allocated" or self.baseline_reserved_bytes is None:
            return self.baseline_peak_bytes
        return self.baseline_reserved_bytes

    def reserved_bytes(self, variant: Variant, timeline: Timeline) -> int | None:
        """Reserved memory under a schedule of one graph variant."""
        around = self.surroundings
        return None if around is None else around.reserved_bytes(
            around.planned(variant.graph, timeline))

    def with_link(self, link: Link) -> PreparedStep:
        """The step with results that may be stored on the host over `link`."""
        return replace(self, variants=tuple(replace(variant, problem=lower(variant.graph, link))
                                            for variant in self.variants))

    @property
    def base(self) -> Variant:
        """The step as captured."""
        return self.variants[0]

    @property
    def budget(self) -> StepBudget:
        """Memory of the step that no schedule changes."""
        return self.base.budget

    @property
    def resident_bytes(self) -> int:
        """Resident memory, the same for any schedule."""
        return self.budget.resident_bytes

    @property
    def keep_all_peak_bytes(self) -> int:
        """Peak of the step without recomputation."""
        return self.base.peak_bytes(self.base.problem.keep_all_schedule)

    @property
    def proven_minimum_bytes(self) -> int:
        """Lower bound on the peak of any plan of the step."""
        return min(variant.budget.whole_bytes(variant.floor_bytes) for variant in self.variants)

    def takes_bytes(self, variant: Variant, schedule: Schedule) -> int:
        """Memory of a schedule of one variant, in the unit that a budget limits."""
        if self.budget_of == "reserved":
            reserved = self.reserved_bytes(variant, unroll(variant.problem, schedule))
            assert reserved is not None, "such a step is not planned by what is reserved"
            return reserved
        return variant.peak_bytes(schedule)

    def variant_of(self, spec: RewriteSpec) -> Variant:
        """The graph variant of a plan with this rewrite spec."""
        return next((variant for variant in self.variants if (
            variant.low_peak, variant.chunks, variant.inner_chunks) == (
                spec.low_peak, spec.chunks, spec.inner_chunks)), self.base)

    def may_fit(self, limit_bytes: int) -> bool:
        """True unless a bound proves that every plan exceeds the limit."""
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
    inputs, in JSON values.  With `accumulation`, any micro-batch but the first is planned: earlier
    gradients are resident.  `plain_net_bytes`: net peak of the plain step, if other calls determine
    it.

    Raises `ValueError` for a budget of reserved memory that cannot be predicted.
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
    reserved = None if surroundings is None or surroundings.plain is None else (
        surroundings.reserved_bytes(surroundings.plain))
    if budget_of == "reserved" and reserved is None:
        raise ValueError('budget_of="reserved": what torch reserves is not known where gradients '
                         "of shards add up over micro-batches; give a budget of what is allocated")
    return PreparedStep(
        variants=(base, *others),
        baseline_peak_bytes=base.budget.whole_bytes(baseline_bytes),
        plain=PlainTimeline(
            tuple(base.budget.resident_bytes + size for size in plain.memory_timeline),
            plain.backward_begins),
        tensors=tuple(tensors),
        inputs=inputs,
        signature=signature,
        training=step.training,
        overrides=step.overrides,
        holds_output=step.holds_output,
        backend=backend,
        cost_model=cost_model,
        parallel=parallel,
        budget_of=budget_of,
        surroundings=surroundings,
        baseline_reserved_bytes=reserved,
    )


def sizes_of_variants(prepared: PreparedStep, symbolic: SymbolicStep) -> tuple[SymbolicSizes, ...]:
    """Each variant of the step as a function of named sizes of its inputs; raises
    `CaptureError`."""
    try:
        return tuple(sizes_of(symbolic, variant) for variant in prepared.variants)
    except ValueError as error:
        raise CaptureError(f"the step's sizes cannot be written: {error}") from error


def with_sizes(prepared: PreparedStep, sizes: Sequence[SymbolicSizes]) -> PreparedStep:
    """The step as a function of named sizes, of each variant."""
    return replace(prepared, variants=tuple(
        replace(variant, sizes=each)
        for variant, each in zip(prepared.variants, sizes, strict=True)))


def _variant(step: CapturedStep, variant: StepVariant, accumulation: int, earlier_bytes: int | None
          ) -> Variant:
    """One graph variant of a step; for Inductor, with the breakdown of compiled code."""
    graph = variant.graph if accumulation == 1 else _accumulating(variant.graph, accumulation,
                                                                  earlier_bytes)
    problem, budget = lower(graph), StepBudget.of(graph, step.optimizer)
    if variant.kernels is None:
        return Variant(graph, problem, budget)
    from planner.step.compiled_breakdown import CompiledBreakdown

    return Variant(graph, problem, budget,
                   CompiledBreakdown(step.compiled, variant.saved_by_default, variant.saving_costs,
                                     variant.kernels))


def _accumulating(graph: TrainingGraph, accumulation: int, earlier_bytes: int | None
                  ) -> TrainingGraph:
    """The graph of a micro-batch after the first, with earlier gradients resident; `earlier_bytes`:
    their size, if it differs from that of its own gradients."""
    if earlier_bytes is None:
        earlier_bytes = graph.gradient_bytes
    return replace(
        graph, resident=replace(graph.resident, gradients_bytes=earlier_bytes),
        notes=(*graph.notes, f"gradients of {accumulation} micro-batches add up: those of the "
               "steps before are counted as resident; the output is taken to be let go as "
               "each backward ends"))


def _compared(variant: Variant, source: StepVariant, base: Variant) -> Variant:
    """A variant other than the base, with a note on its extra time."""
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
