"""A graph with symbolic sizes of a model that is trained within a budget.

The model of the world: where a call differs from a planned one in the sizes of its tensors alone,
the model is traced once more, with symbols for the sizes that differ.  From then on calls of other
sizes take no tracing.  A schedule is planned for the largest sizes met so far; for others its peak
is evaluated, by the project's simulator on the same problem with other numbers.  Where it does not
fit, a schedule is planned for those sizes on the same graph, and both are kept.  Of two calls of
other sizes that keep memory at once, the second is captured with its own sizes.

What a kernel takes for itself at smaller sizes is at first bounded by what it takes at the planned
ones; where that is too much, and for larger sizes, it is measured for each op and shape, once
(`planner.step.other_sizes`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import nn

from planner._apply.call_signature import Call, input_tensors
from planner._apply.symbolic_code import Schedule, SymbolicCallable, SymbolicCode
from planner._graph_capture.capture import SymbolicStep
from planner._graph_capture.joint_graph.symbolic_sizes import Values
from planner._graph_capture.module_forward import Forward
from planner._graph_capture.step.symbolic_region import NamedDimensions, SymbolicRegion
from planner._graph_capture.torch_compat import (
    TraceLimit,
    extents_of_whole,
    may_be_known,
    no_active_modes,
    pytree,
    runs_again,
)
from planner.arguments.inputs import size_name
from planner.attached.known import GraphPlanner, Searched
from planner.attached.planned_graph import PendingCall, PlannedGraph
from planner.captured_graph import with_least_memory
from planner.plans.plan import Plan
from planner.step.other_sizes import SizedPeak

log = logging.getLogger("planner")

_MOST_FIXED = 256
"""Remembered calls that need a graph with fixed sizes."""
_MOST_APART = 2
"""Graphs with fixed sizes for calls of other sizes that keep memory at the same time."""
_LEAST_SECONDS, _TIMES_FIXED = 10.0, 6.0
"""CPU time that a trace may take: so much, and as many times that of the capture with fixed sizes,
for which later sizes are captured instead."""
_MOST_FAILURES = 2
"""Attempts at a symbolic capture; torch fixes a size that equals one of the model's."""


class SymbolicGraph(PlannedGraph):
    """The graph of a model for any sizes."""

    code: SymbolicCode

    def __init__(self, fixed: PlannedGraph, module: nn.Module, inner: Forward | None) -> None:
        """`fixed`: the graph that was captured with fixed sizes."""
        super().__init__(fixed.call)
        self.began_with = fixed.call
        assert fixed.planner is not None
        self.plan, self.lives, self.plain_bytes = fixed.plan, fixed.lives, fixed.plain_bytes
        self.step_mates = fixed.step_mates.copy()
        self.loss = fixed.loss
        if fixed.unmeasured is not None:
            self.loss = fixed.planner.measured(fixed.unmeasured)
        self._fixed, self._fixed_planner = ref(fixed), fixed.planner
        self.outputs = fixed.planner.graph_outputs
        self.target: SymbolicCallable | None = None
        """The graph that the plan is of."""
        self.values: Values = ()
        """Of the symbols, at the sizes that the plan is made for."""
        self.has_run = False
        self._plans: dict[Schedule, tuple[Plan, SizedPeak]] = {}
        self._most_saved_bytes, self._plain_share = 0, 1.0
        """What a call kept that another one met, and what it would if it ran plain, as a multiple
        of what it would at the planned sizes."""
        self._is_for_more_sizes = False
        self._tensors_of = partial(input_tensors, module, inner)
        self.limit = TraceLimit(
            _LEAST_SECONDS + _TIMES_FIXED * fixed.planner.capture_seconds)
        """Of its first trace."""
        self.code = SymbolicCode(module, fixed.planner.cotangents,
                                 returns_in_order=fixed.planner.chose_blocks)
        self.code.fall_back(with_least_memory)

    def compile_again(self, module: nn.Module) -> None:
        """Capture and plan anew in the next call: torch may have given up on code that raised."""
        self.code.compile_again()

    def may_serve(self, call: Call) -> bool:
        """It is asked for by other means."""
        return False

    def note_sizes(self, call: Call, named: NamedDimensions) -> None:
        """Note which sizes of a call differ from those planned for: they are to be symbolic, and so
        are those `named`."""
        assert self.call is not None
        mine, dimensions = self.call.sizes, self.code.backend.dimensions
        for name, places in named.items():
            dimensions.setdefault(name, {}).update(places)
        for name, sizes in call.sizes.items():
            for place, (left, right) in enumerate(zip(sizes, mine[name], strict=True)):
                if left != right:
                    dimensions.setdefault(name, {}).setdefault(place, size_name(name, place))
        rows = {sizes[0] for sizes in (*call.sizes.values(), *mine.values()) if sizes}
        if dimensions and len(rows) == 1 and rows != {1}:
            # The last batch of an epoch has fewer rows.
            for name, sizes in call.sizes.items():
                if sizes:
                    dimensions.setdefault(name, {}).setdefault(0, size_name(name, 0))

    def choose_sizes(self, target: SymbolicCallable, call: Call) -> Call:
        """Choose the sizes to plan for: those planned for so far where none of the call's is
        larger, else the call's own.  Returns a call that has them."""
        chosen = call
        if self.call is not None and (target is not self.target or not self.values) and (
                self._serves_larger(target.region, call, self.call)):
            chosen = self.call
        self._is_for_more_sizes = target is self.target
        self.target = target
        self.take_sizes(chosen)
        return chosen

    def take_sizes(self, call: Call) -> None:
        """Plan for the sizes of a call."""
        assert self.target is not None
        self.call = call
        self.values = self.target.region.values_at(self._named(call.sizes))

    def _serves_larger(self, region: SymbolicRegion, call: Call, larger: Call) -> bool:
        """True if the graph of a call is that of `larger` sizes, too."""
        for name, sizes in call.sizes.items():
            places = self.code.backend.dimensions.get(name, {})
            for place, (mine, theirs) in enumerate(zip(sizes, larger.sizes[name], strict=True)):
                if mine > theirs or (mine < theirs and places.get(place) not in region.same):
                    return False
        named = self._named(larger.sizes)
        return (all(named[size] == named[other] for size, other in region.same.items())
                and region.serves(region.values_at(named)))

    @property
    def loss_planner(self) -> GraphPlanner | None:
        """The planner of the sizes for which its loss is known."""
        return self.planner or self._fixed_planner

    @property
    def earlier(self) -> Searched | None:
        """The last plan of the graph at other sizes than those that were chosen."""
        return self.planner.earlier if self._is_for_more_sizes and self.planner else None

    def _named(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        return {size: sizes[name][place] for name, places in self.code.backend.dimensions.items()
                for place, size in places.items()}

    def symbolic_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicStep:
        """The step of a call of the sizes that were chosen."""
        assert self.target is not None
        return SymbolicStep.of(self.target.region, self.outputs, self.code.backend.dimensions,
                               self._tensors_of(args, kwargs))

    def arguments_at(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
                     ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with tensors of the sizes of another one."""
        return enlarged_arguments(self._tensors_of(args, kwargs), call, args, kwargs)

    def adopt(self, module: nn.Module, plan: Plan) -> None:
        """Run under this plan from here on, or, where it was made for more sizes, as well."""
        assert self.target is not None and self.planner is not None and self.known is not None
        self.plan, self.plain_bytes = plan, plan.baseline_peak_bytes
        if (fixed := self._fixed()) is not None and fixed.is_provisional:
            fixed.plain_bytes = 0  # its plan is in force no more
        variant, order = self.planner.schedule_of(plan, self.known)
        # The plan may be one for the step as assumed, of which less was counted.
        assert variant.sizes is not None
        region = self.target.region
        peak = self._peak = SizedPeak(variant, order, variant.sizes, self.planner.workspace)
        # A plan that is over the budget is the one that uses least, and was said to be.
        planned_for, limit_bytes = self.values, max(plan.budget_bytes or 0, plan.peak_bytes)

        def fits(values: Values) -> bool:
            if plan.budget_bytes is None or values == planned_for:
                return True
            with no_active_modes():  # it is no part of a step that is watched
                return peak.is_within(limit_bytes, region.named(values))

        made = self.target.adopt(plan.spec, fits, instead=not self._is_for_more_sizes)
        self._is_for_more_sizes = False
        self._plans = {each: self._plans[each] for target in self.code.backend.graphs
                       for each in target.schedules if each in self._plans}
        self._plans[made] = plan, peak
        self._most_saved_bytes, self._plain_share = 0, 1.0

    def note_run(self, call: Call) -> None:
        """Note that a call went well."""
        self.has_run = True
        self.ran_at = self._named(call.sizes)
        if (used := self.code.backend.used) in self._plans:
            self.plan, self._peak = self._plans[used]

    @property
    def saved_bytes(self) -> int:
        """That of the planned sizes, or of larger ones that another call has met."""
        return max(super().saved_bytes, self._most_saved_bytes)

    @property
    def plain_saved_bytes(self) -> int:
        """The same if it runs plain."""
        return math.ceil(self._plain_share * super().plain_saved_bytes)

    def saves(self) -> Callable[[], int]:
        """Evaluated where it is asked for, at the sizes of the call."""
        return partial(self._peak.saved_bytes_at, self.ran_at)

    def note_pending(self, call: PendingCall) -> bool:
        """Count it at its own sizes."""
        if call.saved_bytes <= self.saved_bytes:
            return False
        self._most_saved_bytes = call.saved_bytes
        self._plain_share = max(self._plain_share, self._peak.plain_share_at(call.sizes))
        return True


def enlarged_arguments(tensors: Mapping[str, torch.Tensor], call: Call, args: tuple[Any, ...],
                       kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments, whose `tensors` have these names, with tensors of the sizes of a larger call."""
    names, sizes = {id(tensor): name for name, tensor in tensors.items()}, call.sizes
    resized: dict[int, torch.Tensor] = {}

    def of(leaf: Any) -> Any:
        wanted = sizes.get(names.get(id(leaf), ""))
        if not isinstance(leaf, torch.Tensor) or wanted in (None, tuple(leaf.shape)):
            return leaf
        if id(leaf) not in resized:
            resized[id(leaf)] = _enlarged(leaf, wanted)
        return resized[id(leaf)]

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(of, (args, kwargs))
    return found


def _enlarged(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """A tensor that is at least as large in each dimension: a slice of the same storage where that
    has room for it, as one long tensor that all batches are slices of does, else one that leaves
    out as much of a storage of its own.  Of values that code may decide by, the last ones go on
    there, so that a mask of ones stays one."""
    strides = list(tensor.stride())
    extents = extents_of_whole(tensor)
    for (inner, extent), (outer, _) in pairwise(extents):
        if strides[outer] < strides[inner] * sizes[inner]:
            left_out = max(0, extent - tensor.size(inner))
            strides[outer] = strides[inner] * (sizes[inner] + left_out)
    outermost, offset = extents[-1][0], tensor.storage_offset()
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    whole = tensor.detach()
    values: torch.Tensor | None = None
    if last * tensor.element_size() >= tensor.untyped_storage().nbytes():
        whole, offset = whole.new_empty(max(1, strides[outermost] * sizes[outermost])), 0
        values = tensor.detach() if may_be_known(tensor) and tensor.numel() else None
    enlarged = whole.as_strided(sizes, strides, offset)
    if values is not None:
        for place, size in enumerate(sizes):
            places = torch.arange(size, device=values.device)
            values = values.index_select(place, places.clamp(max=values.size(place) - 1))
        enlarged.copy_(values)
    return enlarged.requires_grad_(tensor.requires_grad)


def _differing_sizes(call: Call, graph: PlannedGraph) -> tuple[int, int]:
    """How many sizes of a call differ from those that the graph had at first, and how many of them
    by more than a factor of two."""
    first = graph.began_with if isinstance(graph, SymbolicGraph) else graph.call
    assert first is not None
    pairs = [pair for name, sizes in call.sizes.items()
             for pair in zip(sizes, first.sizes[name], strict=True)]
    return (sum(mine != theirs for mine, theirs in pairs),
            sum(max(pair) > 2 * min(pair) for pair in pairs))


class SymbolicGraphs:
    """Graphs with symbolic sizes for calls that differ in sizes alone, from the second size on.

    Of two calls that keep memory at the same time each has a graph of its own, where both vary in
    the same sizes and differ in another (batches of 16 and of 32 sentences, of any length), or are
    far apart (short questions and long answers).
    """

    def __init__(self, module: nn.Module, inner: Forward | None) -> None:
        self._module, self._inner = module, inner
        self._by_call: dict[Call, list[SymbolicGraph] | None] = {}
        """By calls without sizes; `None`: it cannot be captured so."""
        self._failures = 0
        self._fixed: dict[Call, None] = {}
        """Calls for which torch makes a graph with fixed sizes."""

    def graph_for(self, call: Call, graphs: Sequence[PlannedGraph], *, at_once: bool = False
                  ) -> SymbolicGraph | None:
        """The graph for a call which no graph with fixed sizes is for, or, `at_once`, for any; or
        `None`."""
        fixed = [graph for graph in graphs if not isinstance(graph, SymbolicGraph)]
        kind = call.without_sizes
        made = self._by_call.get(kind, [])
        if made is None or call in self._fixed or runs_again() or (
                not at_once and any(graph.call == call and not (made and graph.is_provisional)
                                    for graph in fixed)):
            return None
        sources = [] if len(made) == _MOST_APART else [
            graph for graph in fixed if graph.planner is not None and graph.call
            and graph.call.without_sizes == kind and graph.planner.can_be_symbolic
            and not any(each.began_with == graph.call for each in made)]
        nearest = min([*made, *sources], key=partial(_differing_sizes, call), default=None)
        if nearest is not None and not isinstance(nearest, SymbolicGraph):
            nearest = SymbolicGraph(nearest, self._module, self._inner)
            self._by_call[kind] = [*made, nearest]
        return nearest

    def keeps_apart(self, call: Call, graphs: Sequence[PlannedGraph],
                    pending: Collection[PlannedGraph]) -> bool:
        """True if a call is to have a graph with fixed sizes, as a call of other sizes keeps memory
        beside it: a graph with symbolic sizes counts both at the largest."""
        kind = call.without_sizes
        alike = [graph for graph in graphs if graph.call and graph.call.without_sizes == kind]
        return (kind not in self._by_call and len(alike) < _MOST_APART
                and any(graph in pending and graph.call != call for graph in alike))

    def give_up(self, graph: SymbolicGraph, call: Call, reason: BaseException) -> None:
        """Note that this call, or where no call has run, all like it, takes a graph with fixed
        sizes; said once."""
        if len(self._fixed) < _MOST_FIXED:
            self._fixed[call] = None
        self._failures += 1
        reason = graph.limit.exceeded or reason
        if graph.has_run or (self._failures < _MOST_FAILURES and not graph.limit.exceeded):
            return
        self._by_call[call.without_sizes] = None
        log.warning("%s cannot be captured with symbolic sizes, so that each size of its inputs "
                    "is captured by itself: %s", type(self._module).__name__,
                    str(reason).strip().partition("\n")[0] or type(reason).__name__)
