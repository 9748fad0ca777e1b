"""Observed facts of a step, and plans made with them.

Model of the world: a model sees its own calls.  Other memory of the step - optimizer state, earlier
gradients, the caller's loss - becomes known while the first step runs.  Until then a plan within
the budget leaves as much headroom as possible for the common cases: AdamW with gradients of an
earlier micro-batch, and a loss like the cross-entropy of the model's output.

The graph is captured once and planned again as more becomes known.  Another capture is needed only
for a loss that leaves out a differentiable output, and for a loss after a step of several graphs.
Code that reads values of tensors is called once without gradients to obtain them
(`graph_capture.fake_copies.data_dependent_values`).

Blind spot: the loss's memory is that of the first step; later growth is not observed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from planner._apply.blocks import PlannedBlocks
from planner._apply.call_signature import signature_of, tensor_keys
from planner._apply.rewrite_spec import ParameterKey, SymbolicSizes
from planner._graph_capture.capture import CapturedStep, SymbolicStep
from planner._graph_capture.completed import (
    with_earlier_gradients,
    with_held,
    with_held_in_forward,
    with_output_let_go,
    with_room,
    with_seen_loss,
)
from planner._graph_capture.dynamo.blocks import REPEATED_BLOCKS, most_alike, repeated_blocks
from planner._graph_capture.dynamo.traced_code import TracedCode
from planner._graph_capture.errors import CaptureError, DataDependentValue, OtherOutputs
from planner._graph_capture.fake_copies.data_dependent_values import (
    data_dependent_values,
    with_larger_selections,
)
from planner._graph_capture.fake_copies.fake import in_own_containers
from planner._graph_capture.fake_copies.input_values import named_inputs
from planner._graph_capture.fake_copies.storage_less import Answer
from planner._graph_capture.memory.tracker import Workspace
from planner._graph_capture.module_forward import own_forward
from planner._graph_capture.op_costs.headroom import ProbeHeadroom
from planner._graph_capture.optimizer.in_backward import EarlyGradients
from planner._graph_capture.optimizer.step import OptimizerTrace
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.plain_step.loss import OpenLoss, Until
from planner._graph_capture.plain_step.observed_loss import (
    ObservedLoss,
    ReplayedLoss,
    StepWatch,
    UnmeasuredLoss,
)
from planner._graph_capture.torch_compat import storage_key, wrapping_data_parallel
from planner._graph_capture.training_graph import HELD_IN_FORWARD, ModelOutput
from planner.api import capture_call
from planner.arguments.budget import Budget
from planner.arguments.inputs import describe_inputs
from planner.arguments.planning import Planning
from planner.attached.held import bytes_on, device_of, held_bytes
from planner.attached.optimizers import ObservedOptimizer
from planner.attached.outside import Known, Outside, plain_saved_bytes, saved_bytes
from planner.errors import InfeasibleBudget
from planner.plans.decisions import schedule_of
from planner.plans.plan import Plan
from planner.progress import watched
from planner.search.agreement import agreed, check_same_model
from planner.search.eager import make_plan
from planner.search.planning import Effort, leanest_plan, plan_within, told_in_percent
from planner.solvers.problem import Schedule
from planner.solvers.result import Result
from planner.step.prepared import PreparedStep, prepare, sizes_of_variants, with_sizes
from planner.step.variant import Variant
from planner.step.wrapped import group_of, with_wrappers
from planner.units import format_bytes

log = logging.getLogger("planner")

_ASSUMED_OPTIMIZER = "adamw"
"""Counted until an optimizer has stepped: no common optimizer has more state."""
_ASSUMED_LOSS = 6
"""Peak of an unknown loss, in multiples of the model's output: for cross-entropy in 16-bit floats
(its logits in 32 bits, their log-softmax, the gradients of both)."""
_TRIES = 3
"""Number of times that an unknown loss is assumed to be smaller before giving up on its
headroom."""
_NOT_FOLLOWED = (
    "and planner.within, which can give values and sizes, cannot give these. Either "
    "decide by shapes and arguments, or with torch.where; for a packed sequence, give the layer "
    "the padded batch and mask what it returns; or take that part out of the model, and call "
    "planner.within for the rest")
_MAY_EXCEED = (
    "a call that is not like those before takes %s at the least, and %g%% is %s of the %s of its "
    "plain step, as far as its loss is known from theirs: it runs, and may exceed the budget; when "
    "it comes again, it is refused if that is so")
_MOST_PREPARED = 3
"""Prepared steps that are kept; preparing one again traces the plain step."""
_TRIALS = 6
"""Number of plans tried until calls that keep memory at the same time fit together."""
_CLOSE = 0.005
"""The search ends when its interval is below this fraction of the budget."""
_LITTLE = 0.02
"""Fraction of the budget that is not worth another search."""
_PROVISIONAL_SHARE = 0.25
"""Fraction of the time limit for a plan that is made for one step."""


_DEEP = 24
"""Equal blocks from which on a step is captured by them, so that the time that tracing takes does
not grow with depth."""


@dataclass(frozen=True, slots=True)
class Searched:
    """The last plan of a graph, and the fraction of the budget that its search left unused."""

    plan: Plan
    unused: float


@dataclass(slots=True)
class _Completed:
    """The captured step with what is known of it."""

    facts: tuple[Any, ...]
    step: CapturedStep
    sizes: dict[bool, tuple[SymbolicSizes, ...]] = field(default_factory=dict)
    """Of each variant, if it was captured with symbolic sizes; by whether something is held in the
    forward alone."""


class OptimizerTraces:
    """The last trace of the optimizers, which the graphs of a model share."""

    def __init__(self) -> None:
        self._last: tuple[object, OptimizerTrace | None] | None = None

    def of(self, step: CapturedStep, tensors: tuple[ParameterKey, ...],
           optimizers: tuple[ObservedOptimizer, ...] | None, assumed: str | None
           ) -> OptimizerTrace | None:
        """Memory of these optimizers' steps, of `assumed` where it is given, after a step of the
        model with these tensors; `None` without any."""
        alive = tuple(found for each in optimizers or () if (found := each()) is not None)
        with_gradient = step.baseline.with_gradient
        key = (optimizers, assumed, with_gradient, tensors, {*step.tracing.early}, [
            id(parameter) for each in alive for group in each.param_groups
            for parameter in group["params"]])
        if self._last is None or self._last[0] != key:
            self._last = key, step.tracing.optimizer(assumed or alive or None, with_gradient)
        return self._last[1]


class GraphPlanner:
    """Plans one graph of a model: the step that began with some call."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 planning: Planning, limit: Budget | None, batches_ahead: int = 0,
                 stepping: Callable[[], Sequence[Optimizer]] = tuple,
                 optimizer_traces: OptimizerTraces | None = None,
                 left: Callable[[], Sequence[torch.Tensor]] = tuple,
                 symbolic: SymbolicStep | None = None, earlier: Searched | None = None,
                 early: EarlyGradients | None = None, is_whole: bool = False,
                 has_other_loss: bool = False, has_control_flow: bool = False,
                 earlier_answers: Sequence[tuple[Answer, ...]] = (), may_select_more: bool = True,
                 paths_vary: bool = False, known: Known | None = None) -> None:
        """Capture the step; raises `CaptureError`.  `batches_ahead`: how many batches the caller
        holds beside this one; `stepping`: the optimizers that were seen so far;
        `optimizer_traces`: what the model's other graphs know of them; `left`: what earlier calls
        have left in attributes of the model, which is no part of it; `symbolic`: the step's graph,
        where it was captured before with symbolic sizes; `earlier`: a plan of that graph at
        other sizes; `early`: gradients that hooks free as they come; `is_whole`: a deep
        model is one region, too; `has_other_loss`: the loss may be of any of the outputs, though
        one of them is a loss; `has_control_flow`: as it was found in a call of other sizes;
        `earlier_answers`: of such calls, for whose selections there is to be room if
        `may_select_more`; `paths_vary`: as for `capture_step`; `known`: what such a call has shown
        of the step."""
        self.is_whole = is_whole
        """True if no plan by blocks fits, so that a deep model is one region, too."""
        self.chose_blocks = False
        """True if the model is captured by its blocks because it is deep."""
        self._early = dict(early or {})
        self._has_other_loss = has_other_loss
        self._planning, self._limit, self._batches_ahead = planning, limit, batches_ahead
        self._stepping, self._symbolic = stepping, symbolic
        self._optimizer_traces, self._left = optimizer_traces or OptimizerTraces(), left
        self._kept_code: TracedCode | None = None  # for another capture of the same call
        self._kept_regions: str | Sequence[str] | None = None
        self._has_captured = False
        self.has_control_flow = has_control_flow
        """True if values of tensors decide the step's control flow."""
        self.seen_answers = [*earlier_answers]
        """The values that such calls have asked for."""
        self.may_select_more = may_select_more
        """True if the graph may have larger selections than the call."""
        self.selects_more = False
        """True if it has."""
        self._paths_vary = paths_vary
        self._most_runs: dict[str, int] = {}
        self.lacks_runs = False
        """True if blocks have run more often in one call than in the graph."""
        self.values_bytes = 0
        """What the call without gradients that learned them took, above the resident memory."""
        if known is None:
            self._capture(model, args, dict(kwargs), planning, earlier)
        else:
            self.capture_again(model, args, kwargs, known)
        self.saved_bytes = 0
        """Memory that a call keeps from the end of its forward to its backward, under the last
        plan."""
        self.loss_is_outside = (self._step.baseline.loss.is_missing if known is None
                                else known.loss is not None)
        """True if the caller computes the loss, by unknown code."""

    def _capture(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                 planning: Planning, earlier: Searched | None = None) -> None:
        self._with_loss: tuple[ObservedLoss, CapturedStep] | None = None
        self._captured_with: ObservedLoss | None = None  # the loss that the step was captured with
        self._captured_without_output = False
        self.earlier = earlier
        self._last = None if earlier is None else earlier.plan
        self._all_completed: list[_Completed] = []
        self._made: list[tuple[tuple[Known, int, str | None], PreparedStep]] = []
        self._lean: list[tuple[PreparedStep, Plan]] = []
        self._input_bytes = sum(tensor.nbytes for tensor in output_tensors((args, kwargs))
                                if tensor.layout is torch.strided)
        planning = with_wrappers(model, planning)
        if planning.parallel is None:
            planning = replace(planning, regions=planning.regions or None)
        self._parallel = planning.parallel
        self.chose_blocks = self._may_be_by_blocks(planning) and most_alike(model) >= _DEEP
        if self.chose_blocks:
            # A better way, not the only one: code may fail under it alone.
            with suppress(CaptureError):
                self._take(model, args, kwargs, replace(planning, regions=REPEATED_BLOCKS))
                return
            self.chose_blocks = False
        self._take(model, args, kwargs, planning)

    def _take(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
              planning: Planning) -> None:
        """Capture the step in these regions."""
        kept = self._kept_code if planning.regions == self._kept_regions else None
        if kept is not None and kept.has_others:
            kept = None
        unknown = (OpenLoss(math.inf, with_left=True) if self._has_other_loss
                   else OpenLoss(self._input_bytes))
        early = self._early if self._may_free(planning) else None
        headroom = self._probe_headroom(model)
        begun = time.thread_time()
        with watched(None) as report:
            capture = partial(capture_call, model, args, kwargs, planning, report,
                              unknown_loss=unknown, probe_headroom=headroom, early=early,
                              code=kept, keeps_code=self._symbolic is None,
                              paths_vary=self._paths_vary, most_runs=self._most_runs)
            if not self.has_control_flow or self.chose_blocks:
                try:
                    self._step = capture(symbolic=self._symbolic)
                except DataDependentValue:
                    if self.chose_blocks:
                        raise
                    self.has_control_flow = True
                    log.info("%s asks for values of tensors: its step is planned in the regions "
                             "that lie between, as this call takes them", type(model).__name__)
            if self.has_control_flow and not self.chose_blocks:
                answers = self._values_for(model, args, kwargs)
                self.selects_more = False
                larger = with_larger_selections(
                    answers, self.seen_answers) if self.may_select_more else None
                self.seen_answers.append(answers)
                if larger is not None:
                    # Sizes that go together may not grow alike.
                    with suppress(CaptureError):
                        self._step = capture(answers=answers, larger_answers=larger)
                        self.selects_more = True
                if not self.selects_more:
                    try:
                        self._step = capture(answers=answers)
                    except DataDependentValue as error:
                        raise CaptureError(f"{error.what or error}, {_NOT_FOLLOWED}") from error
        self.capture_seconds = time.thread_time() - begun
        """CPU time of the last capture."""
        # On one device, the loop's other memory is measured: `planner.attached.held`.
        held_bytes = 0 if self.is_alone else self._batches_ahead * self._input_bytes
        left = {*map(storage_key, self._left())}
        held_bytes -= bytes_on(device_of(model), (
            tensor for tensor in self._step.tracing.fake_copy.fake_of
            if storage_key(tensor) in left))
        self._code = self._kept_code = self._step.code
        self._kept_regions = planning.regions
        self._has_captured, self.lacks_runs = True, False
        self._step = with_held(self._step.without_recording(), held_bytes)
        self._tensors, self._inputs = tensor_keys(model), describe_inputs(args, kwargs)
        check_same_model(model, self._tensors, group_of(model))
        self._signature = signature_of(model, own_forward(model), args, kwargs)

    def _values_for(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
                    ) -> tuple[Answer, ...]:
        """The values that the model's code asks for in a call; notes what learning them takes."""
        own_args, own_kwargs = in_own_containers(model, (args, kwargs))
        watch = StepWatch(device_of(model), [
            *model.parameters(), *model.buffers(), *output_tensors((args, kwargs))])
        is_seen = watch.begin()
        try:
            return data_dependent_values(model, lambda: model.forward(*own_args, **own_kwargs))
        finally:
            if is_seen:
                watch.end()
            self.values_bytes = watch.peak_bytes - watch.begin_bytes

    def _may_be_by_blocks(self, planning: Planning) -> bool:
        return (planning.regions is None and self.is_alone and not self.is_whole
                and self._symbolic is None and planning.backend == "eager"
                and planning.budget_of == "allocated" and not planning.chunks and not self._early)

    def _probe_headroom(self, model: nn.Module) -> ProbeHeadroom | None:
        """Memory that the budget leaves to probing of ops."""
        if self._limit is None:
            return None
        # Keep only the batch's size: planning may happen again in a later step.
        batches_bytes = (1 + self._batches_ahead) * self._input_bytes
        resident_bytes = batches_bytes + sum(
            tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        limit, stepping = self._limit.size_bytes or self._limit.fraction, self._stepping
        assert limit is not None
        alive = ref(model)  # torch never releases a backend, and a capture's refers to the probe

        def held() -> int:
            found = alive()
            return batches_bytes + (0 if found is None else held_bytes(found, stepping()))

        return ProbeHeadroom(limit, held, resident_bytes,
                             self._step.baseline.peak_bytes if self._has_captured else None)

    @property
    def is_percentage(self) -> bool:
        """True if the budget is a percentage of the plain step's peak."""
        return self._limit is not None and self._limit.size_bytes is None

    @property
    def plain_saved_bytes(self) -> int:
        """The same if the call runs plain."""
        return plain_saved_bytes(self._step)

    @property
    def may_skip(self) -> bool:
        """True if any call may run fewer of the planned blocks."""
        return self._step.may_skip

    @property
    def sets_up(self) -> bool:
        """True if the first call of the model adds hooks to it."""
        return self._step.sets_up

    @property
    def unread(self) -> frozenset[int]:
        """Places, among the tensors that the model is called with, of those that no op reads."""
        return self._step.unread

    @property
    def output_tensors(self) -> int:
        """Number of tensors that the model returns."""
        return len(self._step.outputs)

    def note_runs(self, code: PlannedBlocks) -> bool:
        """Record how often blocks have run in one call; return whether a plan is to be made with
        more of them."""
        for name, count in code.most_runs.items():
            self._most_runs[name] = max(count, self._most_runs.get(name, 0))
        is_new = code.ran_more and not self.lacks_runs
        self.lacks_runs, code.ran_more = self.lacks_runs or code.ran_more, False
        return is_new

    def needs_capture_for(self, known: Known) -> bool:
        """True if the memory breakdown of the step needs another capture.

        This is so if blocks have run more often since, if the loss leaves out outputs that the
        graph was captured for (unless zeros in place of their gradients are small), or if loss or
        output belong to code between graphs, whose memory is not known separately.
        """
        if self.lacks_runs:
            return True
        seen, is_chunked = known.loss, len(self._step.graph.regions) > 1
        if self._may_free(self._planning) and dict(known.early) != self._early:
            return True
        if is_chunked and known.lets_output_go and not self._captured_without_output:
            return True
        if seen is None:
            return False
        if self._captured_with is None and is_chunked:
            return True
        outputs = self._step.outputs
        return len(outputs) == len(seen.outputs) and any(
            planned.flows and not gradient.flows and planned.size_bytes > self._input_bytes
            for planned, gradient in zip(outputs, seen.outputs, strict=True))

    def capture_again(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                      known: Known) -> None:
        """Take the graph of a step of which this is known."""
        planning, self._early = self._planning, dict(known.early)
        if known.loss is not None:
            planning = replace(planning, loss_fn=ReplayedLoss(known.loss))
        if known.lets_output_go:
            planning = replace(planning, hold_output=False)
        self._capture(model, args, dict(kwargs), planning)
        self._captured_with = known.loss
        self._captured_without_output = known.lets_output_go

    def _may_free(self, planning: Planning) -> bool:
        return self.is_alone and planning.accumulation == 1 and planning.backend == "eager"

    @property
    def assumed_loss(self) -> ObservedLoss:
        """A loss outside the model that uses as much memory as any in common use."""
        outputs = tuple(replace(each, until=Until.END) for each in self._step.outputs)
        size_bytes = sum(gradient.size_bytes for gradient in outputs)
        return ObservedLoss(_ASSUMED_LOSS * size_bytes + 8, 8, outputs)

    @property
    def may_leave_losses(self) -> bool:
        """True if calls may leave tensors that the caller differentiates beside what they return.
        """
        regions = self._step.graph.regions
        return len(regions) > 1 or sum(regions[0].cotangents) > sum(
            each.flows for each in self._step.outputs)

    def returned_bytes(self, flows: Sequence[bool]) -> int:
        """Bytes of the model's outputs; `flows`: for each of their tensors, true if it counts."""
        graph = self._step.graph
        return sum(graph.buffers[each.buffer].size_bytes for each in graph.outputs
                   if any(flows[place] for place in each.tensors))

    def returns_as_much_as(self, other: GraphPlanner | None) -> bool:
        """True if the outputs are as large as those of another planner's step."""
        return other is not None and self.output_tensors == other.output_tensors and all(
            self.returned_bytes(flows) == other.returned_bytes(flows)
            for flows in ([place == each for place in range(self.output_tensors)]
                          for each in range(self.output_tensors)))

    @property
    def passing_loss(self) -> ObservedLoss:
        """The loss of a call that is followed by another call, which is charged for the rest of the
        loss."""
        loss = self.assumed_loss
        return replace(loss, peak_bytes=loss.gradient_bytes, held_bytes=0)

    @property
    def has_attributes(self) -> bool:
        """True if a call leaves tensors in attributes of the model."""
        return any(not each.tensors for each in self._step.graph.outputs)

    @property
    def graph_outputs(self) -> tuple[ModelOutput, ...]:
        """Outputs of the model in the captured graph; where that is by blocks, in one of the whole
        model that returns them in their order."""
        found = self._step.graph.outputs
        return found if not self.chose_blocks else tuple(
            replace(each, region=0, places=each.tensors) for each in found if each.tensors)

    @property
    def cotangents(self) -> tuple[bool, ...]:
        """For each differentiable output of this graph, true if a gradient flows into it."""
        if not self.chose_blocks:
            return self._step.graph.regions[0].cotangents
        return tuple(gradient.flows for gradient, is_differentiable in zip(
            self._step.outputs, self._step.differentiable, strict=True) if is_differentiable)

    @property
    def workspace(self) -> Workspace:
        """Workspace of kernels."""
        return self._step.tracing.workspace

    def schedule_of(self, plan: Plan, known: Known) -> tuple[Variant, Schedule]:
        """The variant of the step that a plan made with `known` is of, and its schedule."""
        prepared = self._prepared(known)
        prepared = self._prepared(known, self._needed(known, prepared, plan))
        variant = prepared.variant_of(plan.spec)
        return variant, schedule_of(variant, plan.spec)

    @property
    def can_be_symbolic(self) -> bool:
        """True if the step may be captured with symbolic sizes: run op by op as one graph on one
        device, without parts in chunks."""
        planning = self._planning
        return (self.is_alone and not self.has_control_flow and not self._early
                and planning.backend == "eager" and planning.budget_of == "allocated"
                and not planning.chunks and (self.chose_blocks or (
                    len(self._step.graph.regions) == 1 and not self._step.graph.regions[0].block
                    and not any(op.target == "uncaptured code" for op in self._step.graph.ops))))

    @property
    def sizes_vary(self) -> bool:
        """True if code of this graph, or of each of its regions, is to serve all smaller sizes: no
        other graph will."""
        return (not self.can_be_symbolic and self._planning.backend == "eager"
                and not self._planning.chunks)

    @property
    def own_tensors(self) -> list[torch.Tensor]:
        """The tensors that the captured step counts beside its inputs, as far as they are alive."""
        fake_copy = self._step.tracing.fake_copy
        inputs = {id(fake) for _, fake in named_inputs(fake_copy)}
        return [own for own, fake in fake_copy.fake_of.items() if id(fake) not in inputs]

    def release_optimizer(self) -> None:
        """Refer no longer to the optimizer that the user gave."""
        self._planning = replace(self._planning, optimizer=None)

    def take_code(self) -> TracedCode | None:
        """The compiled code that capture has kept; `None` from the second call on."""
        code, self._code = self._code, None
        return code

    @property
    def is_alone(self) -> bool:
        """True if one device has the whole model, so that its other memory can be measured."""
        return self._parallel is None and wrapping_data_parallel() is None

    def measured(self, loss: UnmeasuredLoss) -> ObservedLoss:
        """The loss including the workspace of its kernels."""
        seen = loss.measured(self._step.tracing.workspace)
        if len(self._step.graph.regions) > 1:
            # Code between the regions is replayed with the loss: one peak serves both directions.
            seen = replace(seen, forward_peak_bytes=None)
        return seen

    def plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known, *,
             is_provisional: bool) -> Plan:
        """The plan for a call, all of whose step is known or some of it assumed; raises
        `InfeasibleBudget`.  A model that does not fit by blocks, though it needs not be
        captured so, is captured again as a whole, and a step that does not fit with larger
        selections again with its own.  One whose code breaks at values, and does not fit as a
        whole, is captured by its blocks."""
        make = self._provisional_plan if is_provisional else self._final_plan
        may_be_by_blocks = self.has_control_flow and not self._paths_vary

        def capture_otherwise() -> None:
            self._capture(model, args, kwargs, self._planning)
            if not is_provisional and self.needs_capture_for(known):
                self.capture_again(model, args, kwargs, known)

        if self.chose_blocks or self.selects_more or self._paths_vary:
            with suppress(InfeasibleBudget):
                self._last = plan = make(known)
                if plan.limited_bytes <= (plan.budget_bytes or math.inf):
                    return plan
            self.is_whole |= self.chose_blocks
            self.may_select_more &= not self.selects_more
            self._paths_vary = False
            capture_otherwise()
        try:
            self._last = plan = make(known)
        except InfeasibleBudget as refusal:
            if not (may_be_by_blocks and repeated_blocks(model)):
                raise
            self._paths_vary = True
            try:
                capture_otherwise()
            except OtherOutputs:  # values decide what this call returns
                raise refusal from None
            self._last = plan = make(known)
        return plan

    def _final_plan(self, known: Known) -> Plan:
        """The plan for a fully known step; raises `InfeasibleBudget`."""
        started = time.monotonic()
        prepared = self._prepared(known)
        left = self._planning.time_limit - (time.monotonic() - started)
        limit_bytes = self._limit_bytes(known, prepared)
        effort = Effort(solver=self._planning.solver,
                        time_limit=max(left, self._planning.time_limit / 2))
        with told_in_percent(self._limit, self._plain_bytes(known, prepared)):
            try:
                plan = agreed(lambda: self._fitting(known, prepared, limit_bytes, effort),
                              prepared, limit_bytes, effort)
                self._note_searched(plan, known, limit_bytes)
                return plan
            except InfeasibleBudget:
                if not known.room_bytes:
                    raise
                return self._leanest_within(known, prepared, limit_bytes)

    def _fitting(self, known: Known, prepared: PreparedStep, limit_bytes: int | None,
                 effort: Effort) -> Plan:
        """The plan that fits together with what its own schedule saves in other calls."""
        if known.is_lean:
            return self._leanest_within(known, prepared, limit_bytes)
        if (earlier := self._as_earlier(known, prepared, limit_bytes)) is not None:
            return earlier
        self._last = plan = plan_within(prepared, limit_bytes, effort,
                                        warm_start=self._last_schedule(prepared))
        low_bytes = known.outside.least_pending_bytes(prepared.base.graph.gradient_bytes)
        needed_bytes = self._needed(known, prepared, plan)
        bound, best = plan.overhead_bound, None
        if needed_bytes <= low_bytes:
            return plan
        if limit_bytes is None:
            return self._accounted(known, plan, needed_bytes, bound)
        # More memory for other calls leaves less for this one, which then saves less in each call.
        high_bytes, tried_bytes = needed_bytes, needed_bytes
        brief = replace(effort, time_limit=effort.time_limit / _TRIALS)
        for _ in range(_TRIALS):
            try:
                found = plan_within(self._prepared(known, tried_bytes), limit_bytes, brief,
                                    warm_start=self._last_schedule(prepared))
            except InfeasibleBudget:
                high_bytes = tried_bytes
            else:
                needed_bytes = self._needed(known, prepared, found)
                if needed_bytes <= tried_bytes:
                    best, high_bytes = (found, needed_bytes), tried_bytes
                    if tried_bytes - needed_bytes <= _LITTLE * limit_bytes:
                        break
                else:
                    low_bytes = tried_bytes
                    with suppress(InfeasibleBudget):
                        found = self._saving_less(known, prepared, found, tried_bytes, limit_bytes,
                                                  brief)
                        needed_bytes = self._needed(known, prepared, found)
                        if needed_bytes <= tried_bytes and (
                                best is None or found.overhead < best[0].overhead):
                            best = found, needed_bytes
            tried_bytes = (low_bytes + high_bytes) // 2
            if high_bytes - low_bytes < limit_bytes * _CLOSE:
                break
        if best is not None:
            return self._accounted(known, *best, bound)
        return self._leanest_within(known, prepared, limit_bytes)

    def _leanest_within(self, known: Known, prepared: PreparedStep, limit_bytes: int | None
                        ) -> Plan:
        """The plan with the lowest peak found; raises `InfeasibleBudget` if it does not fit."""
        least = self.leanest(known, limit_bytes)
        if limit_bytes is None or least.peak_bytes <= limit_bytes:
            return least
        raise InfeasibleBudget(
            limit_bytes, least.peak_bytes, f"Of it "
            f"{format_bytes(self._needed(known, prepared, least))} is held beside this call, by "
            "other calls of the model or as gradients of the step before.")

    def _last_schedule(self, prepared: PreparedStep) -> Schedule | None:
        """The schedule of the last plan of this graph, for a search to start from."""
        if self._last is None or prepared.base.compiled is not None or (
                not _describes(self._last, prepared)):
            return None
        return schedule_of(prepared.variant_of(self._last.spec), self._last.spec)

    def _saving_less(self, known: Known, prepared: PreparedStep, plan: Plan, pending_bytes: int,
                     limit_bytes: int, effort: Effort) -> Plan:
        """A plan whose calls save so much less than those of `plan` that all of them together keep
        `pending_bytes`; raises `InfeasibleBudget`."""
        variant = prepared.variant_of(plan.spec)
        saved = saved_bytes(variant, schedule_of(variant, plan.spec))
        net_bytes = self._prepared(known, pending_bytes).budget.net_bytes(limit_bytes)
        calls = max(1, *(each.pending for each in known.outside.backward))
        for _ in range(2):  # they keep a little more than what each saves
            saved -= -(-(self._needed(known, prepared, plan) - pending_bytes) // calls)
            room_bytes = max(known.room_bytes, net_bytes - saved)
            plan = plan_within(
                self._prepared(replace(known, room_bytes=room_bytes), pending_bytes), limit_bytes,
                effort, warm_start=self._last_schedule(prepared))
            if self._needed(known, prepared, plan) <= pending_bytes:
                break
        return plan

    def _as_earlier(self, known: Known, prepared: PreparedStep, limit_bytes: int | None
                    ) -> Plan | None:
        """The plan with the schedule of other sizes, or of a step of which less was known, if that
        leaves hardly more of the budget unused than its search did, or hardly any: another search
        would gain little."""
        if self.earlier is None or limit_bytes is None or (
                not _describes(self.earlier.plan, prepared)):
            return None
        plan = self.earlier.plan
        found = self._accounted(known, plan, self._needed(known, prepared, plan), 0.0, limit_bytes)
        unused = 1 - found.peak_bytes / limit_bytes
        return found if 0 <= unused <= self.earlier.unused + _LITTLE else None

    def _note_searched(self, plan: Plan, known: Known, limit_bytes: int | None) -> None:
        """Note the last plan; where its schedule was taken over, or uses the budget as well as the
        one before, the fraction left unused is the smaller one, so that it cannot creep up."""
        unused = 0.0 if limit_bytes is None or known.is_lean else max(
            0.0, 1 - plan.peak_bytes / limit_bytes)
        if self.earlier is not None and unused <= self.earlier.unused + _LITTLE:
            unused = min(unused, self.earlier.unused)
        self.earlier = Searched(plan, unused)

    def leanest(self, known: Known, limit_bytes: int | None = None) -> Plan:
        """The plan with the lowest peak found, within the budget or not."""
        prepared = self._prepared(known)
        if limit_bytes is None:
            limit_bytes = self._limit_bytes(known, prepared)
        effort = Effort(solver=self._planning.solver,
                        time_limit=_PROVISIONAL_SHARE * self._planning.time_limit)
        found = [self._leanest(prepared, effort)]
        if any(moment.pending for moment in known.outside.backward):
            # Of many calls, each of which saves as much, the peak is that of what they save.
            room_bytes = max(known.room_bytes, self._step.baseline.peak_bytes)
            found.append(self._leanest(
                self._prepared(replace(known, room_bytes=room_bytes)), effort))
        return min((self._accounted(known, each, self._needed(known, prepared, each), 0.0,
                                    limit_bytes) for each in found),
                   key=lambda plan: plan.peak_bytes)

    def _leanest(self, prepared: PreparedStep, effort: Effort) -> Plan:
        found = next((plan for other, plan in self._lean if other is prepared), None)
        if found is None:
            found = leanest_plan(prepared, effort)
            self._lean = [(prepared, found), *self._lean[:_MOST_PREPARED - 1]]
        return found

    def may_fit(self, known: Known) -> bool:
        """True if a schedule meets the step's budget where nothing beside the call holds memory."""
        limit_bytes = self._limit_bytes(known, self._prepared(known))
        alone = self.leanest(replace(known, outside=Outside()), limit_bytes)
        return limit_bytes is None or alone.peak_bytes <= limit_bytes

    def _limit_bytes(self, known: Known, prepared: PreparedStep) -> int | None:
        return None if self._limit is None else self._limit.resolve(
            self._plain_bytes(known, prepared))

    def _plain_bytes(self, known: Known, prepared: PreparedStep) -> int:
        return max(prepared.plain_bytes, known.outside.plain_bytes)

    def _needed(self, known: Known, prepared: PreparedStep, plan: Plan) -> int:
        variant = prepared.variant_of(plan.spec)
        loss = known.loss if self._captured_with is None else None
        if loss is not None and known.room_bytes > loss.peak_bytes:
            loss = replace(loss, forward_peak_bytes=None)
        return known.outside.pending_bytes(variant, schedule_of(variant, plan.spec), loss)

    def _accounted(self, known: Known, plan: Plan, pending_bytes: int, bound: float,
                   limit_bytes: int | None = None) -> Plan:
        """The plan with the memory that other calls keep under it included."""
        prepared = self._prepared(known, pending_bytes)
        if prepared.base.compiled is not None:
            return plan
        variant = prepared.variant_of(plan.spec)
        schedule = schedule_of(variant, plan.spec)
        return make_plan(prepared, variant, limit_bytes or plan.budget_bytes, Result(
            schedule, variant.net_peak_bytes(schedule), 1 + plan.overhead, 1.0, 1 + bound,
            "feasible", plan.solve_seconds or 0.0, plan.solver))

    def _provisional_plan(self, known: Known) -> Plan:
        """A plan for a step whose optimizer or loss is not known yet, within the budget and with as
        much headroom for them as possible.

        A percentage is of the step without them.  Raises `InfeasibleBudget` if the budget is too
        small regardless of them.  With a percentage this cannot be known, and the plan with the
        lowest peak is returned.
        """
        outside = known.outside.as_run(self.saved_bytes, self.plain_saved_bytes)
        if self._planning.backend != "eager":  # what the forward meets is not searched around here
            outside = replace(outside, backward=outside.backward | outside.forward)
        known = replace(known, outside=outside)
        as_known = self._prepared(known)
        limit_bytes = self._limit_bytes(known, as_known)
        effort = Effort(solver=self._planning.solver, is_brief=True,
                        time_limit=_PROVISIONAL_SHARE * self._planning.time_limit)
        plan = agreed(lambda: self._provisional(known, limit_bytes, effort), as_known,
                      limit_bytes, effort, "the first step")
        fraction = None if self._limit is None else self._limit.fraction
        if fraction and limit_bytes is not None and plan.limited_bytes > limit_bytes and (
                known.loss is not None and known.optimizers is not None):
            log.warning(_MAY_EXCEED, format_bytes(plan.limited_bytes), 100 * float(fraction),
                        format_bytes(limit_bytes), format_bytes(self._plain_bytes(known, as_known)))
        return plan

    def note_saved(self, plan: Plan, known: Known) -> None:
        """Record how much a call saves under a plan."""
        variant = self._prepared(known).variant_of(plan.spec)
        self.saved_bytes = saved_bytes(variant, schedule_of(variant, plan.spec))

    def _provisional(self, known: Known, limit_bytes: int | None, effort: Effort) -> Plan:
        loss = known.loss or (self.assumed_loss if self.loss_is_outside else None)
        if known.optimizers is None and self._planning.optimizer is None:
            outside = replace(known.outside, backward=frozenset(
                replace(moment, has_gradients=True) for moment in known.outside.backward))
            prepared = self._prepared(replace(known, outside=outside, loss=loss),
                                      assumed_optimizer=_ASSUMED_OPTIMIZER)
            if limit_bytes is None or prepared.may_fit(limit_bytes):
                with suppress(InfeasibleBudget):
                    return plan_within(prepared, limit_bytes, effort)
        for _ in range(_TRIES):
            if loss is None:
                break
            prepared = self._prepared(replace(known, loss=loss))
            try:
                return plan_within(prepared, limit_bytes, effort)
            except InfeasibleBudget as refusal:
                # The budget leaves this much less to the loss.
                loss = _smaller(loss, refusal.minimum_bytes - refusal.budget_bytes)
        least = self._prepared(replace(known, loss=known.loss or (
            self.passing_loss if self.loss_is_outside else None)))
        return (leanest_plan(least, effort) if self.is_percentage
                else plan_within(least, limit_bytes, effort))

    def _prepared(self, known: Known, pending_bytes: int | None = None, *,
                  assumed_optimizer: str | None = None) -> PreparedStep:
        """The step ready to be planned; `pending_bytes`: what other calls hold, by default without
        what those of the same graph do."""
        if pending_bytes is None:
            pending_bytes = known.outside.least_pending_bytes(self._step.graph.gradient_bytes)
        key = known, pending_bytes, assumed_optimizer
        found = next((prepared for other, prepared in self._made if other == key), None)
        if found is None:
            found = self._prepare(*key)
            self._made = [(key, found), *self._made[:_MOST_PREPARED - 1]]
        return found

    def _prepare(self, known: Known, pending_bytes: int, assumed_optimizer: str | None
                 ) -> PreparedStep:
        planning, parallel = self._planning, self._parallel
        completed = self._completed(known, assumed_optimizer)
        step = with_room(completed.step, known.room_bytes)
        if planning.backend == "eager":
            step = with_held_in_forward(
                step, known.outside.forward_bytes(step.graph.gradient_bytes),
                known.loss if self._captured_with is None else None)
        if known.defers_reduction and parallel is not None:
            parallel = replace(parallel, requires_gradient_sync=False)
        held_bytes = known.outside.held_bytes
        step = with_held(step, max(0, held_bytes), max(0, pending_bytes + min(0, held_bytes)))
        prepared = prepare(step, tensors=self._tensors, inputs=self._inputs,
                           signature=self._signature,
                           backend=planning.backend, cost_model=planning.cost_model,
                           accumulation=(max(2, planning.accumulation) if known.accumulates else 1),
                           parallel=parallel, budget_of=planning.budget_of,
                           plain_net_bytes=None if parallel is not None else (
                               known.outside.plain_net_bytes(step, pending_bytes)))
        if self._symbolic is None:
            return prepared
        held = HELD_IN_FORWARD in prepared.base.graph.index_of
        if held not in completed.sizes:
            completed.sizes[held] = sizes_of_variants(prepared, self._symbolic)
        return with_sizes(prepared, completed.sizes[held])

    def _completed(self, known: Known, assumed_optimizer: str | None) -> _Completed:
        """The captured step with what is known of its loss, output and optimizer, which takes
        traces of the plain step and of the optimizer's."""
        facts = (known.optimizers, known.loss, known.lives, known.accumulates, assumed_optimizer)
        found = next((each for each in self._all_completed if each.facts == facts), None)
        if found is None:
            found = _Completed(facts, self._complete(known, assumed_optimizer))
            self._all_completed = [found, *self._all_completed[:_MOST_PREPARED - 1]]
        return found

    def _complete(self, known: Known, assumed_optimizer: str | None) -> CapturedStep:
        planning, step = self._planning, self._step
        loss, lives = known.loss, known.lives
        if loss is not None and self._captured_with is not None:
            step = with_output_let_go(
                with_held(step, loss.held_bytes), [each.until for each in loss.outputs])
        elif loss is not None:
            if self._with_loss is None or self._with_loss[0] != loss:
                self._with_loss = loss, with_seen_loss(step, loss)
            step = self._with_loss[1]
        elif lives is not None:
            step = with_output_let_go(step, [
                max(until, each.until, key=[*Until].index)
                for until, each in zip(lives, step.outputs, strict=True)])
        if planning.optimizer is None or known.optimizers:
            step = replace(step, optimizer_steps=self._optimizer_traces.of(
                step, self._tensors, known.optimizers, assumed_optimizer))
        return with_earlier_gradients(step) if known.accumulates else step


def _describes(plan: Plan, prepared: PreparedStep) -> bool:
    """True if the step has each op before which the plan recomputes: ops that stand for the loop's
    memory come and go with what is known of it."""
    names = prepared.variant_of(plan.spec).graph.index_of
    return all(insertion.before in names
               for region in plan.spec.regions for insertion in region.insertions)


def _smaller(loss: ObservedLoss, by_bytes: int) -> ObservedLoss | None:
    """The loss with a lower peak; `None` if its gradients alone exceed that."""
    peak_bytes = loss.peak_bytes - by_bytes
    return None if peak_bytes < loss.gradient_bytes else replace(loss, peak_bytes=peak_bytes)
