"""The Dynamo backend of a plan: it checks that each captured region is the planned one, and
replaces it by the plan's graphs.

The graphs run op by op, boxed, so that memory is as simulated.
"""

from __future__ import annotations

import copy
import operator
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import fx, nn

from planner._apply.errors import PlanMismatch
from planner._apply.exchangeable import (
    GradientLayout,
    ScheduledGraphs,
    checked_backward,
)
from planner._apply.outputs import places_to_watch, watch, without_elided
from planner._apply.rewrite import RewrittenRegion, rewrite
from planner._apply.rewrite_spec import OpKey, RegionSpec, RewriteSpec, decisions_of
from planner._apply.same_step import difference_from_step, outputs_let_go
from planner._graph_capture.dynamo.stub_graphs import compiled_as_stubs
from planner._graph_capture.dynamo.traced_code import TracedCode
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.joint_graph.joint import count_cotangents, is_number, primals_of
from planner._graph_capture.joint_graph.lower import LoweredRegion, region_at, region_signature
from planner._graph_capture.joint_graph.naming import (
    modules_as_in,
    name_modules,
    names_in_model,
    rename_modules,
)
from planner._graph_capture.joint_graph.pipeline import (
    JointVariant,
    LoweredGraphs,
    lower_joint_graph,
)
from planner._graph_capture.joint_graph.replay import is_random
from planner._graph_capture.joint_graph.symbolic_sizes import Sizes, Values
from planner._graph_capture.torch_compat import (
    Branch,
    CallState,
    OpOverload,
    PartitionFunction,
    aot_backend,
    boxed_callable,
    branches_of,
    compile_otherwise,
    constants_otherwise,
    differentiate_again,
    fix_sizes,
    has_varying_numbers,
    mutated_inputs,
    pass_absent_gradients,
    primal_sources,
    schema_of,
    take_equal_sizes_for_one,
)
from planner._graph_capture.training_graph import RegionSignature

_MOST_SIZES = 1024
"""Of how many sizes a graph remembers its schedule."""

Fallback = Callable[[fx.GraphModule], Callable[..., Any]]
"""Converts a captured graph into a function of its inputs that trains it."""


@dataclass(frozen=True, slots=True)
class Match:
    """A captured graph and its region in the rewrite spec."""

    index: int
    """The region's number."""
    region: RegionSpec
    lowered: LoweredRegion
    is_resized: bool
    """True if it is the region with smaller tensors."""


@dataclass(slots=True, eq=False)
class _Traced:
    """A traced graph whose schedule can be exchanged.  Blocks that run it have one each, or several
    where they run several times, and so has each size where values decide sizes, which are symbols
    of the graph then: it runs under the plan's schedule wherever no size is larger than planned."""

    module: fx.GraphModule
    joint: fx.GraphModule
    num_outputs: int
    given: dict[str, Sequence[str | None]]
    """For each block that has run it, names of the parameters and buffers among its inputs."""
    lowered: LoweredGraphs = field(default_factory=dict)
    sizes: Sizes = field(init=False)
    """Its symbols."""
    made: dict[object, ScheduledGraphs] = field(default_factory=dict)
    """By region, and by the decisions of a block and the number of regions that ran before it."""
    schedules: OrderedDict[tuple[str, int, Values], ScheduledGraphs] = field(
        default_factory=OrderedDict)
    """By block, number of regions that ran before it there, and sizes."""
    refused: dict[tuple[str, int, Values], tuple[type[PlanMismatch], str]] = field(
        default_factory=dict)
    """Why it has no schedule there."""
    unlike: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Code that runs instead in blocks of which it is not the plan's graph."""
    running: ScheduledGraphs = field(init=False)
    """The schedule chosen last."""
    values: Values = ()
    """The sizes that it was chosen for."""

    def __post_init__(self) -> None:
        self.sizes = Sizes.of(primals_of(self.joint))

    def forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        """Outputs of the forward, and the tensor that carries what is saved."""
        return self.running.run_forward(args, partial(self.sizes.number, values=self.values))


_OUTPUT_IS_HELD = (
    "the plan counts on the model's output being let go before the backward (hold_output=False), "
    "and {bytes:,} bytes of it are still held, so that the step may take that much more than the "
    "budget: keep the loss alone, or plan with hold_output=True")
_DIFFERENTIATED_AGAIN = (
    "a gradient that came through the planned step is differentiated again (create_graph=True, as "
    "for a gradient penalty): what was planned is computed once more as it is written, and what "
    "that takes is not in the plan")


class Backend:
    """Base of the Dynamo backends of plans: the state of the running call.  It warns once if the
    caller keeps an output that the plan expects it to release, or differentiates gradients."""

    _warned: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        # Compiled code refers to this object, and torch's cache, which the garbage collector does
        # not see, refers to the code: a model that the caller deletes would stay.
        self._model = weakref.ref(model)
        self.block = ""
        """Name of the block that is called; empty for the model."""
        self.running: nn.Module | None = None
        """The module whose forward is being called: the model or a block; `None`: unknown, and
        modules keep the names of the graph."""
        self.compilations = 0
        """Number of graphs compiled so far."""
        self.planned_runs = 0
        """Number of regions of the plan that have run in this call."""
        self.has_run = False
        """True if any captured graph has run in this call."""
        self.has_begun = False
        """True if the part that has run may have changed random state or buffers, so that the call
        cannot start over."""
        self.is_trial = False
        """True if a graph that is not the plan's ends the call although others have run."""
        self.fallback: Fallback | None = None
        """Replacement for a graph that is not the plan's once others have run; `None`: that is an
        error, and so is a gradient that is not planned."""
        self.met_unplanned_gradient = False
        """True if a gradient came through an output that the plan took for one without."""
        self._unplanned: PlanMismatch | None = None
        self._replaces = False
        """True if unplanned gradients of the running backward will be replaced."""

    def begin_call(self, block: str, module: nn.Module) -> None:
        """Note that the forward of a block is called, or of the model."""
        self.block, self.running, self.planned_runs = block, module, 0
        self.has_run = self.has_begun = False

    def _names(self, inputs: Sequence[Any]) -> list[str | None]:
        """Names of the parameters and buffers among a graph's inputs."""
        model = self._model()
        assert model is not None  # it is being called
        return names_in_model(model, inputs)

    def _begin_compiling(self, module: fx.GraphModule, inputs: Sequence[Any]
                         ) -> tuple[Sequence[Branch], list[str | None]]:
        """The branches that a captured graph has taken, and the names of its inputs."""
        branches = branches_of(module)
        self.compilations += 1
        if self.running is not None:
            name_modules(module, self.running)
        return branches, self._names(inputs)

    def _follow_gradients(self, outputs: Sequence[Any], args: Sequence[Any],
                          module: fx.GraphModule, state: CallState | None,
                          cotangents: Sequence[bool], *, holds_inputs: bool) -> None:
        """Compute gradients through these outputs of a graph, `module`, that the plan does not;
        `cotangents`: for each differentiable output, whether its gradient is planned."""
        pass_absent_gradients(outputs)
        differentiate_again(outputs, args, module,
                            partial(self._warn_once, _DIFFERENTIATED_AGAIN),
                            _refuse_double_backward, state=state, expected=cotangents,
                            holds_inputs=holds_inputs, begin=self._begin_to_replace,
                            unplanned=self._take_unplanned)

    def _begin_to_replace(self) -> None:
        self._replaces = True

    def _note_unplanned(self, mismatch: PlanMismatch) -> None:
        if self.fallback is None or not self._replaces:
            raise mismatch
        self._unplanned, self.met_unplanned_gradient = mismatch, True

    def _take_unplanned(self) -> PlanMismatch | None:
        found, self._unplanned, self._replaces = self._unplanned, None, False
        return found

    def _output_is_held(self, size_bytes: int) -> None:
        self._warn_once(_OUTPUT_IS_HELD, bytes=size_bytes)

    def _warn_once(self, words: str, **figures: int) -> None:
        if words not in self._warned:
            self._warned |= {words}
            warnings.warn(words.format(**figures), stacklevel=3)


class PlanBackend(Backend):
    """The Dynamo backend that replaces captured graphs by a rewrite spec's graphs."""

    def __init__(self, model: nn.Module, spec: RewriteSpec, regions: Sequence[int] | None = None
                 ) -> None:
        """Create the backend.  `regions`: those of the rewrite spec that may be met, by default
        all."""
        super().__init__(model)
        self._choose(spec, regions)
        self._compiled_regions = 0
        self._lowered: dict[fx.GraphModule, LoweredGraphs] | None = None
        self.may_take_other_paths = False
        """True if values of tensors decide what runs behind a graph, and so through which of its
        outputs gradients come: then its inputs are held for them."""
        self.takes_larger = False
        """True if larger sizes, which values decide, run under the schedule planned for smaller."""
        self._leaves_no_trace = False  # the graph without gradients that was compiled last
        self.runs = Counter[str]()
        """Number of regions of the plan that have run since the model was called, by block: a block
        may be called several times."""
        self.is_exchangeable = False
        """True if `exchange` may be asked for; then autograd does not see the tensors saved."""
        self._traced: list[_Traced] = []
        self._code: TracedCode | None = None
        """Keeps the code that refers to its graphs weakly."""

    def _choose(self, spec: RewriteSpec, regions: Sequence[int] | None) -> None:
        """Take the graphs from these regions of a rewrite spec."""
        self._spec = spec
        self._regions = tuple(range(len(spec.regions)) if regions is None else regions)

    def exchange(self, spec: RewriteSpec, regions: Sequence[int] | None = None) -> bool:
        """Run under another rewrite spec of the same graphs from the next call on, without tracing;
        return whether that is possible.  `regions`: as for the constructor."""
        earlier = self._spec, self._regions
        self._choose(spec, regions)
        try:
            if self._code is not None:
                self.run_kept(self._code)
            made = [(each, self._schedules(each)) for each in self._traced
                    if not each.sizes.symbols]
        except PlanMismatch:
            made = None
        if made is None or not self._traced:
            self._choose(*earlier)
            return False
        for each in self._traced:
            for under_earlier in (each.made, each.schedules, each.refused, each.unlike):
                under_earlier.clear()
        for each, schedules in made:
            each.schedules.update(schedules)
        return True

    def take_larger(self) -> None:
        """From now on, run larger sizes, which values decide, under the plan's schedule, too."""
        self.takes_larger = True
        for traced in self._traced:
            traced.refused.clear()

    def _schedules(self, traced: _Traced) -> dict[tuple[str, int, Values], ScheduledGraphs]:
        """The schedules of a graph without symbols in the blocks that have run it, in one run of
        each."""
        made: dict[object, ScheduledGraphs] = {}
        found: dict[tuple[str, int, Values], ScheduledGraphs] = {}
        for block, given in traced.given.items():
            scheduled = self._scheduled(traced, made, given, block, 0, ())
            found[block, scheduled.place, ()] = scheduled
        return found

    def _scheduled(self, traced: _Traced, made: dict[object, ScheduledGraphs],
                   given: Sequence[str | None], block: str, start: int, values: Values
                   ) -> ScheduledGraphs:
        """A graph under the schedule that it has in a block in which `start` regions have run, with
        inputs of these names, where the symbols have these values; one of `made` if it is there."""
        regions = self._regions_of(block)
        # Of which region a call of some size is shows only when they are compared.
        alike = None if values else (decisions_of(self._spec, regions), start)
        if alike in made:
            return made[alike]
        match = self._matching_region(
            traced.joint, traced.num_outputs, given, regions, start, traced.lowered,
            partial(region_at, sizes=traced.sizes, values=values) if values else nullcontext)
        if match.index not in made:
            made[match.index] = ScheduledGraphs.of(self._spec, match.index, match.lowered,
                                                   self._note_unplanned)
        if alike is not None:
            made[alike] = made[match.index]
        return made[match.index]

    def count_regions(self, block: str) -> int:
        """Number of the plan's regions of a block."""
        return len(self._regions_of(block))

    def _regions_of(self, block: str) -> tuple[int, ...]:
        return tuple(index for index in self._regions if self._spec.regions[index].block == block)

    def with_spec(self, spec: RewriteSpec, regions: Sequence[int]) -> Self:
        """Return the backend of these regions of another rewrite spec for the same captured graphs
        (the same modules).  Graphs that this one has lowered are not lowered again."""
        if self._lowered is None:
            self._lowered = {}
        other = copy.copy(self)
        other._choose(spec, regions)
        return other

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Read now: the model may have other parameters than when the plan was applied.  Only the
        # names, since the compiler keeps `partition`, and an input may be an activation.
        branches, given = self._begin_compiling(module, inputs)
        self._leaves_no_trace = False
        try:
            compile_as = (self._of_any_size if any(isinstance(each, torch.SymInt)
                                                   for each in inputs) else self._of_fixed_sizes)
            with constants_otherwise(module, _is_mismatch):
                run = compile_as(module, inputs, given, branches)
        except Exception as error:
            mismatch = getattr(error, "inner_exception", error)
            if not isinstance(mismatch, PlanMismatch):
                raise
            run = self._calling(module, self._fallen_back(module, mismatch), branches)
        return torch.compiler.disable(run)

    def _fallen_back(self, module: fx.GraphModule, mismatch: PlanMismatch) -> Callable[..., Any]:
        """Code that runs in the place of a graph that is not the plan's; raises where none may."""
        if self.is_trial or not (self.fallback and self.has_begun):
            try:
                raise mismatch
            finally:
                del mismatch  # a frame that refers to its own error is garbage that holds results
        warnings.warn("a part of this step is not the planned one; it runs under the schedule "
                      "that takes least, and the step may take more than the budget: "
                      f"{mismatch}", stacklevel=2)
        return self.fallback(module)

    def _fixed(self, module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[str | None],
               branches: Sequence[Branch]) -> Callable[..., Any]:
        """Code that is called in the place of a graph, compiled for good."""
        match: Match | None = None
        captured: fx.GraphModule | None = None
        watched: Sequence[int] = ()

        def partition(
            joint: fx.GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **_: object
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            nonlocal match, watched, captured
            check_numbers(module, joint, num_fwd_outputs)
            captured = joint
            match = self._matching_region(
                joint, num_fwd_outputs, given, self._regions, self._compiled_regions,
                None if self._lowered is None else self._lowered.setdefault(module, {}))
            self._compiled_regions += 1
            region = match.region
            rewritten = rewrite(match.lowered, region.insertions, region.inplace_reuses,
                                region.released)
            watched = places_to_watch(
                outputs_let_go(self._spec, match.index, match.lowered), match.lowered, rewritten)
            rewritten = self._prepared(match, rewritten, num_fwd_outputs)
            return rewritten.forward, rewritten.backward

        compiled = self._compile(module, inputs, partition, lambda: match)
        if match is None:
            return self._calling(module, compiled, branches,
                                 leaves_no_trace=self._leaves_no_trace)
        elided = match.region.elided

        def run(*args: Any) -> Any:
            self._count_run()
            outputs = compiled(*args)
            watch(outputs, watched, self._output_is_held)
            return outputs if not elided else without_elided(outputs, elided)

        return self._calling(module, run, branches, joint=captured,
                             cotangents=lambda: match.region.cotangents)

    def _exchangeable(self, module: fx.GraphModule, inputs: Sequence[Any],
                      given: Sequence[str | None], branches: Sequence[Branch]
                      ) -> Callable[..., Any]:
        """Code that is called in the place of a graph, under whatever schedule it has then."""
        def target_of(joint: fx.GraphModule, num_outputs: int) -> _Traced:
            traced = _Traced(module, joint, num_outputs, {self.block: given})
            try:
                self._choose_schedule(traced, traced.sizes.now, inputs)
            except PlanMismatch:
                if traced.sizes.symbols:
                    raise
                compile_otherwise(module, is_other=True)
                traced.given.clear()  # said when it runs, so that it is compiled once
            return traced

        compiled, traced = compiled_as_stubs(module, inputs, target_of, self._without_gradient)
        if traced is None:
            return self._calling(module, compiled, branches,
                                 leaves_no_trace=self._leaves_no_trace)
        self._traced.append(traced)
        return self._calling_traced(compiled, branches, traced, traced.sizes.places_among(inputs))

    def run_kept(self, code: TracedCode) -> None:
        """Run the regions' graphs in code that was compiled of the same graphs."""
        self._code = code
        blocks = {self._spec.regions[index].block for index in self._regions}
        known = {each.module: each for each in self._traced}
        for graph in code.graphs:
            if graph.block not in blocks:
                continue
            if graph.region is None:
                graph.run = self._calling(graph.module, graph.module, graph.branches)
                continue
            traced = known.get(graph.module)
            if traced is None:
                traced = _Traced(graph.module, graph.region.joint,
                                 graph.region.num_forward_outputs, graph.given,
                                 graph.region.lowered)
                traced.schedules.update(self._schedules(traced))
                self._traced.append(traced)
            graph.region.forward = traced.forward
            graph.run = self._calling_traced(graph.compiled, graph.branches, traced)

    def _without_gradient(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Code of a graph that needs no gradient."""
        self._leaves_no_trace = _leaves_no_trace(graph.graph)
        return boxed_callable(graph)

    def _count_run(self) -> None:
        self.planned_runs += 1
        self.runs[self.block] += 1

    @property
    def _of_fixed_sizes(self) -> Callable[..., Callable[..., Any]]:
        return self._exchangeable if self.is_exchangeable else self._fixed

    def _of_any_size(self, module: fx.GraphModule, inputs: Sequence[Any],
                     given: Sequence[str | None], branches: Sequence[Branch]
                     ) -> Callable[..., Any]:
        """Code that is called in the place of a graph with symbolic sizes, unless it has other ops
        than one with fixed sizes."""
        take_equal_sizes_for_one(inputs)
        try:
            return self._exchangeable(module, inputs, given, branches)
        except Exception as error:
            if not _is_mismatch(error):
                raise
            fix_sizes(inputs)
            return self._of_fixed_sizes(module, inputs, given, branches)

    def _choose_schedule(self, traced: _Traced, values: Values, args: Sequence[Any]) -> None:
        """Let a graph run as the region that it matches in the running block, where the symbols
        have these values; raises `PlanMismatch`."""
        key = self.block, self.runs[self.block], values
        if key in traced.refused:
            kind, words = traced.refused[key]
            raise kind(words)
        if key not in traced.schedules:
            given = self._names(args)
            try:
                traced.schedules[key] = self._scheduled(traced, traced.made, given, *key)
            except PlanMismatch as mismatch:
                traced.refused[key] = type(mismatch), str(mismatch)  # the error holds its frames
                raise
            traced.given.setdefault(self.block, given)
            if len(traced.schedules) > _MOST_SIZES:
                traced.schedules.popitem(last=False)
        traced.running, traced.values = traced.schedules[key], values

    def _calling_traced(self, compiled: Callable[..., Any], branches: Sequence[Branch],
                        traced: _Traced, symbols: Sequence[int] = ()) -> Callable[..., Any]:
        """Code that is called in the place of a traced graph; `symbols`: places of its symbols
        among its inputs."""
        def run(*args: Any) -> Any:
            self._count_run()
            outputs = compiled(*args)
            watch(outputs, traced.running.watched, self._output_is_held)
            return outputs

        planned = self._calling(traced.module, run, branches, joint=traced.joint,
                                cotangents=lambda: traced.running.cotangents)

        def call(*args: Any) -> Any:
            block = self.block
            if symbols or block not in traced.unlike:
                try:
                    self._choose_schedule(
                        traced, tuple(int(args[index]) for index in symbols), args)
                except PlanMismatch as mismatch:
                    traced.given.pop(block, None)
                    if block not in traced.unlike or self.is_trial or not self.has_begun:
                        traced.unlike[block] = self._calling(
                            traced.module, self._fallen_back(traced.module, mismatch), branches)
                else:
                    return planned(*args)
            return traced.unlike[block](*args)

        return call

    def _calling(self, module: fx.GraphModule, compiled: Callable[..., Any],
                 branches: Sequence[Branch], *, joint: fx.GraphModule | None = None,
                 cotangents: Callable[[], Sequence[bool]] = tuple,
                 leaves_no_trace: bool = False) -> Callable[..., Any]:
        """Code that is called in the place of a graph, `module`; `compiled`: runs it; `joint`: its
        joint graph, where it is one of the plan's; `cotangents`: for each differentiable output,
        whether its gradient is planned."""
        written = () if joint is None else written_places(joint)
        is_whole = len(self._spec.regions) == 1  # its inputs are counted to the end of the step

        def call(*args: Any) -> Any:
            check_branches(branches, args)
            self.has_run = True
            self.has_begun |= not leaves_no_trace
            # Such gradients are computed again of the graph as it is written.
            planned = cotangents()
            state = CallState(args, written) if self.fallback and False in planned else None
            outputs = compiled(*args)
            self._follow_gradients(
                outputs, args, module, state, planned, holds_inputs=state is not None and (
                    self.may_take_other_paths or is_whole))
            return outputs

        return call

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionFunction,
                 match: Callable[[], Match | None]) -> Callable[..., Any]:
        """Return the captured module, compiled with the graphs of `partition`; `match` is the
        region that it found."""

        def forward(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
            self._leaves_no_trace = match() is None and _leaves_no_trace(graph.graph)
            return boxed_callable(graph)

        def backward(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
            found, run = match(), boxed_callable(graph)
            return run if found is None else self._checked(found, run)

        return aot_backend(partition, forward, backward)(module, list(inputs))

    def _checked(self, match: Match, run_backward: Callable[[list[Any]], Any]
                 ) -> Callable[[list[Any]], Any]:
        """The backward of a region, with a check of its cotangents."""
        return checked_backward(run_backward, GradientLayout.of(match.lowered.joint),
                                match.region.cotangents, self._note_unplanned)

    def _prepared(self, match: Match, graphs: RewrittenRegion, num_outputs: int
                  ) -> RewrittenRegion:
        """Return the graphs in the form for their compiler; the forward's first `num_outputs`
        outputs are the caller's."""
        return graphs

    def _matching_region(
        self, joint: fx.GraphModule, num_forward_outputs: int, given: Sequence[str | None],
        regions: Sequence[int], start: int, known: LoweredGraphs | None,
        at: Callable[[LoweredRegion], AbstractContextManager[LoweredRegion]] = nullcontext,
    ) -> Match:
        """Return the one of these regions of the rewrite spec, looked through from the `start`-th
        on, that equals this graph, whose inputs have these names, if any; raise `PlanMismatch` if
        there is none.  `at`: gives a graph with symbolic sizes numbers for them."""
        names = [source.name(given) for source in primal_sources(primals_of(joint))]
        variant = JointVariant(self._spec.backend == "inductor", self._spec.low_peak,
                               self._spec.chunks, self._spec.inner_chunks)
        first_difference, is_larger = "", False
        start %= max(len(regions), 1)
        # Torch runs code that it compiled for one module for another one like it, too.
        places = (*regions[start:], *regions[:start])
        for index, may_rename in (*((index, False) for index in places),
                                  *((index, True) for index in places if known is not None)):
            region = self._spec.regions[index]
            if len(region.cotangents) != count_cotangents(joint):
                first_difference = first_difference or (
                    f"the plan has {len(region.cotangents)} differentiable outputs, "
                    f"this model {count_cotangents(joint)}")
                continue
            lower = partial(
                lower_joint_graph, joint, num_forward_outputs, variant,
                cotangents=region.cotangents, input_names=names, hoisted=region.hoisted,
                region=index, block=region.block, elided=region.elided, known=known)
            lowered = lower()
            if may_rename:
                renamed = modules_as_in([op.name for op in lowered.ops], [
                    op.name for op in (*region.forward, *region.backward)])
                if region.block or not renamed or known is None:
                    continue
                rename_modules(joint.graph, renamed)
                known.clear()
                lowered = lower()
            with at(lowered) as sized:
                difference = different_op(region, sized)
                is_resized = difference is not None
                if difference is not None and region.region_signature is not None:
                    # In a step that may fall back, code may size tensors by values, with equal
                    # inputs.
                    difference, grew = self._why_not_served(
                        region.region_signature, region_signature(sized), difference,
                        numbers_vary=any(map(is_number, sized.joint.primals)))
                    is_larger |= grew
                if difference is None:
                    difference = difference_from_step(
                        self._spec, index, sized, may_be_larger=self.takes_larger)
            if difference is None:
                return Match(index, region, lowered, is_resized)
            first_difference = first_difference or difference
        raise (LargerSizes if is_larger else PlanMismatch)(
            f"the plan does not fit this model and these inputs; the first difference: "
            f"{first_difference}. Make a plan for them")

    def _why_not_served(
        self, planned: RegionSignature, found: RegionSignature, difference: str, *,
        numbers_vary: bool,
    ) -> tuple[str | None, bool]:
        """Reason why a region that differs from the planned one cannot run its schedule within its
        memory; `None` if it can, since it has the same ops on smaller tensors, or on other numbers
        (`numbers_vary`).  And whether a tensor is larger."""
        # In a step that may fall back, values may decide sizes, so that equal inputs prove nothing.
        may_be_equal = (self.fallback is not None or numbers_vary) and planned.is_like(found)
        if not (planned.serves(found) or may_be_equal):
            return difference, False
        larger = planned.first_larger(found)
        if larger is None or self.takes_larger:
            return None, False
        return (f"{difference}, and with these inputs a tensor takes {larger[1]:,} bytes where the "
                f"plan has {larger[0]:,}: a plan serves inputs up to the size it was made with"
                ), True


class LargerSizes(PlanMismatch):
    """A region of the plan has larger tensors than planned."""


class OtherBranch(PlanMismatch):
    """The model's code decides by values, and goes another way than the graph."""


def check_branches(branches: Sequence[Branch], args: Sequence[Any]) -> None:
    """Raise `OtherBranch` if the model's code goes another way with these inputs of a graph."""
    for branch in branches:
        if not branch.holds(args):
            raise OtherBranch(
                f"the model's code decides by the values of its inputs ({branch.place}), and goes "
                f"another way than in the step that was planned, where the answer was "
                f"{branch.taken}. Make a plan for these inputs, or use planner.within(model, ...), "
                "which does")


def _refuse_double_backward() -> None:
    """Raise `CaptureError`: what was compiled is differentiated once."""
    raise CaptureError(
        "a gradient that came through the planned step is differentiated again (create_graph=True, "
        "as for a gradient penalty), and what torch.compile has captured can be differentiated "
        "once only; it cannot be computed again either, as an input is gone, or the model draws "
        "random numbers or updates what it reads. Make such a loss of the model as it is written: "
        "type(model).forward(model, ...) calls it without its plan; or plan only parts of the "
        "model that are differentiated once")


def written_places(joint: fx.GraphModule) -> tuple[int, ...]:
    """Positions, among a captured graph's inputs, of those that it writes."""
    sources = primal_sources(primals_of(joint))
    written = mutated_inputs(joint.graph.output_node()).values()
    return tuple(dict.fromkeys(sources[index].position for index in written))


def _is_mismatch(error: Exception) -> bool:
    return isinstance(getattr(error, "inner_exception", error), PlanMismatch)


def check_numbers(module: fx.GraphModule, joint: fx.GraphModule, num_outputs: int) -> None:
    """Raise `PlanMismatch` if a graph with numbers among its inputs returns numbers before tensors:
    a plan names outputs by place."""
    if has_varying_numbers(module):
        kinds = [is_number(node) for node in joint.graph.output_node().args[0][:num_outputs]
                 if isinstance(node, fx.Node)]
        if sorted(kinds) != kinds:
            raise PlanMismatch("numbers are returned before tensors")


def _leaves_no_trace(graph: fx.Graph) -> bool:
    """Return whether a graph only makes its outputs: it draws no random numbers and writes no
    input."""
    return not mutated_inputs(graph.output_node()) and all(
        isinstance(node.target, OpOverload) and not schema_of(node.target).is_mutable
        and not is_random(node) for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem)


def different_op(region: RegionSpec, lowered: LoweredRegion) -> str | None:
    """Describe the first op that differs between a region and a captured graph; `None` if there is
    none."""
    expected = (*region.forward, *region.backward)
    for want, have in zip(expected, lowered.ops, strict=False):
        if want.name != have.name or want.digest != have.digest:
            return (f"the plan has {_describe_op(want)}, "
                    f"the model has {_describe_op(OpKey(have.name, have.digest, have.result))}")
    if len(expected) != len(lowered.ops):
        return f"the plan has {len(expected)} ops, the model has {len(lowered.ops)}"
    if len(region.forward) != lowered.num_forward:
        return (f"the plan's forward has {len(region.forward)} ops, "
                f"the model's {lowered.num_forward}")
    return None


def _describe_op(key: OpKey) -> str:
    return f"{key.name} -> {key.result} [{key.digest[:8]}]"
