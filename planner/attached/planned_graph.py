"""Planned graphs of a model that is trained within a budget, and their calls that keep memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from weakref import WeakSet, ref

import torch
from torch import nn

from planner._apply.blocks import Code, PlannedBlocks, code_of
from planner._apply.call_signature import Call
from planner._apply.errors import PlanMismatch
from planner._apply.planned_code import PlannedCode, is_exchangeable
from planner._apply.symbolic_code import SymbolicCode
from planner._graph_capture.plain_step.loss import Until
from planner._graph_capture.plain_step.observed_loss import ObservedLoss, UnmeasuredLoss
from planner._graph_capture.torch_compat import backward_keeps_graph, running_backward
from planner.attached.known import GraphPlanner
from planner.attached.outside import Known, Moment, Outside, fullest
from planner.captured_graph import with_least_memory
from planner.plans.plan import Plan

_CLOSE = 0.01
"""A graph is planned again if the memory outside it changes by more than this fraction of the
budget."""
_CLOSE_TO_PLAIN = 0.002
"""The same for the plain step, of which a budget may be a percentage."""


class PlannedGraph:
    """One graph of the model with its current plan."""

    plan: Plan
    code: Code | SymbolicCode
    ran_at: Mapping[str, int] = {}
    """The named sizes of its last call."""

    def __init__(self, call: Call | None = None, planner: GraphPlanner | None = None) -> None:
        """`call`, `planner`: the captured call and its planner; `None` if the plan was given."""
        self.call, self.planner = call, planner
        self.known: Known | None = None
        """The facts that the plan counts; `None` if the plan was given."""
        self.is_provisional = True
        """True if a part of `known` is assumed."""
        self.plans_made = 0
        self.compiled_in_a_row = 0
        """Number of its last calls, without a gap, in which code was compiled."""
        self.is_settled = True
        """True if a percentage was taken of a plain step that is known."""
        self.loss: ObservedLoss | None = None
        """The observed loss of this graph's output."""
        self.unmeasured: UnmeasuredLoss | None = None
        """The loss, observed and not yet measured."""
        self.steps_to_observe = set[int]()
        """Numbers of the steps in which its loss was to be observed."""
        self.is_followed = False
        """True if another call came between a call of this graph and the loss."""
        self.lives: tuple[Until, ...] | None = None
        """Lifetime of each output tensor."""
        self.expected_lives: tuple[Until, ...] | None = None
        """The same until it is observed, where no plan fits that keeps them to the end."""
        self.moments: dict[Present, set[Present]] = {}
        """Memory present when calls began, and then when their backwards began."""
        self.companions: WeakSet[PlannedGraph] = WeakSet()
        """Other graphs, of this and other models, whose calls hold memory beside its own."""
        self.step_mates: WeakSet[PlannedGraph] = WeakSet()
        """Other graphs that were called in the same step, perhaps one after the other."""
        self.followed_by: Callable[[], PlannedGraph | None] = lambda: None
        """Returns the graph that served the model's next call, the last time."""
        self.room_bytes = 0
        """Memory to leave between its forward and backward, so that its companions fit there."""
        self.is_lean = False
        """True if it saves as little as it can, so that its companions fit beside it."""
        self.plain_bytes = 0
        """Peak of the plain step with it; 0: it was not planned yet."""
        self.compared: WeakSet[PlannedGraph] = WeakSet()
        """Other graphs, of the largest plain step of which a percentage is taken where that of its
        own step cannot be met."""
        self.takes_larger = False
        """True if larger sizes, which values decide, run under its schedule, too."""
        self.is_kept = False
        """True if a backward kept what a call saves for another (`retain_graph=True`): then what
        the plan recomputes is kept, too."""
        self.is_differentiated_again = False
        """True if a backward of a call was to be differentiated again (`create_graph=True`)."""
        self._looks: list[tuple[int, int]] = []  # the last two: number of the step, bytes
        self.checked = -1
        """Number of observations when its plan was last compared with them."""

    def adopt(self, module: nn.Module, plan: Plan) -> None:
        """Run under this plan from now on."""
        earlier = getattr(self, "code", None)
        self.plan, self.plain_bytes = plan, plan.baseline_peak_bytes
        if isinstance(earlier, PlannedCode | PlannedBlocks) and earlier.exchange(plan.sized_spec):
            return
        planner = self.planner
        may_exchange = planner is not None and is_exchangeable(plan.spec)
        traced = planner.take_code() if planner is not None and may_exchange else None
        made = partial(code_of, module, plan.sized_spec, may_exchange=may_exchange)
        try:
            code = made(traced=traced)
        except PlanMismatch:
            if traced is None:
                raise
            code = made()  # what was compiled of a copy is not the model's
        self.code = code
        sizes_vary = planner is not None and planner.sizes_vary
        if isinstance(code, PlannedBlocks):
            code.fall_back(with_least_memory, may_vary=self.may_skip, sizes_vary=sizes_vary)
        else:
            code.fall_back(with_least_memory, may_take_other_paths=self.has_control_flow,
                           sizes_vary=sizes_vary)
        if self.takes_larger:
            code.take_larger()
        if isinstance(earlier, PlannedCode | PlannedBlocks):
            code.compare_with(earlier)

    def may_replace(self, smaller: PlannedGraph) -> bool:
        """True if its plan will serve all calls of a smaller graph, by the code of that one; not if
        both keep memory at the same time, where each is to count its own."""
        planner, other = self.planner, smaller.planner
        return (planner is not None and other is not None and smaller not in self.companions
                and planner.sizes_vary
                and other.sizes_vary and not planner.has_control_flow
                and not other.has_control_flow and self.call is not None
                and smaller.call is not None
                and smaller.call.without_sizes == self.call.without_sizes
                and smaller.call.may_be_served_as(self.call))

    def take_code(self, smaller: PlannedGraph) -> None:
        """Run by the code of a smaller graph, which is traced once for all sizes."""
        assert self.call is not None and smaller.call is not None
        self.code = smaller.code
        if isinstance(self.code, PlannedCode):
            for name, sizes in smaller.call.sizes.items():
                self.code.varying.setdefault(name, set()).update(
                    place for place, (mine, theirs) in enumerate(
                        zip(self.call.sizes[name], sizes, strict=True)) if mine != theirs)

    def take_larger(self) -> bool:
        """Run larger sizes, which values decide, under the plan's schedule, too; return whether
        that is possible and new."""
        if self.takes_larger or not (self.has_control_flow and isinstance(
                self.code, PlannedCode | PlannedBlocks)):
            return False
        self.takes_larger = True
        self.code.take_larger()
        return True

    @property
    def is_one_graph(self) -> bool:
        """True if a call is the model's one graph, or one of each block."""
        spec = self.plan.spec
        return not self.has_control_flow and (bool(spec.blocks) or len(spec.regions) == 1)

    def compile_again(self, module: nn.Module) -> None:
        """Take other code for the same plan: torch may have given up on code that raised."""
        if isinstance(self.code, PlannedCode | PlannedBlocks):
            del self.code
            self.adopt(module, self.plan)

    @property
    def saved_bytes(self) -> int:
        """Memory that a call keeps from the end of its forward to its backward; 0 if not known."""
        return 0 if self.planner is None else self.planner.saved_bytes

    def saves(self) -> Callable[[], int]:
        """Returns, now or later, the memory that its last call keeps for its backward."""
        saved_bytes = self.saved_bytes
        return lambda: saved_bytes

    def note_pending(self, call: PendingCall) -> bool:
        """Note that another call begins before the backward of this one; return whether it keeps
        more than is counted."""
        return False

    @property
    def loss_planner(self) -> GraphPlanner | None:
        """The planner of the step that its loss was observed in."""
        return self.planner

    @property
    def plain_saved_bytes(self) -> int:
        """The same if the call runs plain."""
        return 0 if self.planner is None else self.planner.plain_saved_bytes

    @property
    def held_bytes(self) -> int:
        """The most that the loop held beside the model in the last two steps in which a call of
        this graph was looked at."""
        return max((held_bytes for _, held_bytes in self._looks), default=0)

    @property
    def is_held_known(self) -> bool:
        """True if a call was looked at, by the present way of counting."""
        return bool(self._looks)

    def forget_held(self) -> None:
        """Forget what the loop held: it is counted otherwise from here on."""
        self._looks.clear()

    def note_held(self, step: int, held_bytes: int) -> bool:
        """Record what the loop holds beside the model as a call begins; return whether more or less
        is to be counted."""
        before = self.held_bytes
        if self._looks and self._looks[-1][0] == step:
            held_bytes = max(held_bytes, self._looks.pop()[1])
        self._looks = [*self._looks[-1:], (step, held_bytes)]
        return self.held_bytes != before

    @property
    def has_control_flow(self) -> bool:
        """True if values of tensors decide the step's control flow: any call may need another
        graph."""
        return self.planner is not None and self.planner.has_control_flow and not self.may_skip

    @property
    def may_skip(self) -> bool:
        """True if calls run fewer blocks than were planned, or the same in other places."""
        return self.planner is not None and self.planner.may_skip

    def may_serve(self, call: Call) -> bool:
        """True if the plan may be for this call; the plan's digests decide."""
        return self.call is None or call.may_be_served_as(self.call)

    def outside(self, unforeseen_bytes: int) -> Outside:
        """All memory observed outside calls of this graph.  Until a backward was observed, it is
        assumed to meet what is left of the forward's, and in the plain step no gradients."""
        observed = [each for ends in self.moments.values() for each in ends]
        assumed = [begin.later() for begin, ends in self.moments.items() if not ends]
        without = [replace(each, has_gradients=False) for each in assumed]
        forward, backward, plain = (
            fullest(each.outside(self) for each in presents)
            for presents in (self.moments, [*observed, *assumed], [*observed, *without]))
        return Outside(self.held_bytes + unforeseen_bytes,
                       unforeseen_bytes if self.is_kept else 0, forward, backward, plain,
                       largest_plain_bytes(self.compared | self.step_mates))

    @property
    def is_observed(self) -> bool:
        """True if a backward was observed for each of the moments at which calls begin."""
        return all(self.moments.values())

    @property
    def shared_loss(self) -> ObservedLoss | None:
        """The loss; where calls share a step, each output may live until the end."""
        if self.loss is None or not (self.companions or any(
                present.pending for present in self.moments)):
            return self.loss
        return replace(self.loss, outputs=tuple(replace(each, until=Until.END)
                                                for each in self.loss.outputs))

    def note(self, present: Present) -> bool:
        """Record the memory present as a call begins; return whether it is new."""
        if present in self.moments:
            return False
        self.moments[present] = set()
        for found in present.graphs - {self}:
            self.companions.add(found)
            found.companions.add(self)
        return True

    def compare(self, others: Iterable[PlannedGraph]) -> bool:
        """Take percentages of the largest plain step from here on; return whether one of these
        graphs has a larger one than was known."""
        before = largest_plain_bytes(self.compared)
        self.compared.update(each for each in others if each is not self)
        return largest_plain_bytes(self.compared) > before

    def share_step(self, others: Iterable[PlannedGraph]) -> bool:
        """Note that these graphs are called in the same step; return whether that is new."""
        new = {each for each in others if each is not self and each not in self.step_mates}
        for each in new:
            self.step_mates.add(each)
            each.step_mates.add(self)
        return bool(new)

    def make_way(self, least: Plan) -> bool:
        """Make all companions leave memory to this graph, whose plan of the smallest peak exceeds
        the budget, or, if they cannot, save as little as possible; return whether any changed."""
        net_bytes = least.peak_bytes - least.resident_bytes
        excess_bytes = least.peak_bytes - (least.budget_bytes or 0)
        others = [each for each in self.companions if not each.is_lean]
        for each in others:
            left_bytes = (each.plan.budget_bytes or 0) - each.plan.resident_bytes - each.saved_bytes
            before_bytes = each.room_bytes
            each.room_bytes = max(net_bytes, left_bytes + excess_bytes)
            each.is_lean = each.planner is None or each.room_bytes <= before_bytes
        return bool(others)

    def serves(self, known: Known) -> bool:
        """True if the plan is valid for what is known now, or has headroom for the change."""
        planned = self.known
        if (planned is None or planned.outside.without_bytes != known.outside.without_bytes
                or planned.without_outside != known.without_outside):
            return False
        was, now = planned.outside, known.outside
        baseline_bytes = self.plan.baseline_peak_bytes
        plain_was = max(was.plain_bytes, baseline_bytes)
        plain_now = max(now.plain_bytes,
                        baseline_bytes + now.most_plain_bytes - was.most_plain_bytes)
        if self.planner is not None and self.planner.is_percentage and (
                abs(plain_now - plain_was) > _CLOSE_TO_PLAIN * plain_was):
            return False
        growth = now.most_bytes - was.most_bytes
        limit_bytes = self.plan.budget_bytes
        if growth == 0 or limit_bytes is None:
            return growth == 0
        return (abs(growth) < _CLOSE * limit_bytes
                and self.plan.limited_bytes + growth <= limit_bytes)


def largest_plain_bytes(graphs: Iterable[PlannedGraph]) -> int:
    """The largest peak of the plain steps of some graphs, by their present plans."""
    return max((each.plain_bytes for each in graphs), default=0)


class PendingCall:
    """A call that keeps memory for a backward that may still come; autograd's nodes keep this
    object alive."""

    def __init__(self, graph: PlannedGraph) -> None:
        self.graph = ref(graph)
        self._saves, self.sizes = graph.saves(), graph.ran_at
        self.has_begun = False
        """True if a backward has reached the output."""
        self._backward: int | None = None
        """The last one that has."""
        self.returned_before: Sequence[ref[torch.Tensor]] = ()
        """What earlier calls had returned, and the loop still referred to as this one began."""
        self.attributes_before: Sequence[ref[torch.Tensor]] = ()
        """What earlier calls had left in attributes of the model."""
        _pending.add(self)

    @cached_property
    def saved_bytes(self) -> int:
        """Memory that it keeps, under the plan that it ran under."""
        return self._saves()

    def begin_backward(self) -> bool:
        """Record that a backward reaches an output; return whether it is the first that it
        reaches."""
        before, self._backward, self.has_begun = self._backward, running_backward(), True
        if not backward_keeps_graph():
            _pending.discard(self)
        elif (graph := self.graph()) is not None:
            graph.is_kept = True
        return before is None or before != self._backward


_pending: WeakSet[PendingCall] = WeakSet()
"""Pending calls of all planned models."""


def pending_calls() -> list[PendingCall]:
    """Pending calls of all planned models."""
    return list(_pending)


def note_pending() -> bool:
    """Note what pending calls keep while another begins; return whether that is more than is
    counted."""
    found = [graph.note_pending(call) for call in _pending
             if (graph := call.graph()) is not None]
    return any(found)


def pending_bytes() -> int:
    """Memory that pending calls keep."""
    return sum(call.saved_bytes for call in _pending)


class ReturnedTensors:
    """What the calls of a model have returned, or left in its attributes, while it is alive."""

    def __init__(self) -> None:
        self._found: list[tuple[ref[torch.Tensor], ref[PendingCall]]] = []

    def add(self, tensors: Iterable[torch.Tensor], call: PendingCall) -> None:
        """Note that a call returns these tensors."""
        self._found += [(ref(tensor), ref(call)) for tensor in tensors
                        if not isinstance(tensor, nn.Parameter)]

    def of_earlier_steps(self) -> list[torch.Tensor]:
        """Those whose backward has begun, or never comes."""
        self._found = [each for each in self._found if each[0]() is not None]
        return [tensor for each, call in self._found if (tensor := each()) is not None
                and ((found := call()) is None or found.has_begun)]


@dataclass(frozen=True, slots=True)
class Present:
    """Memory present at some moment."""

    pending: frozenset[tuple[ref[PlannedGraph], int]]
    """Graphs with calls whose backward is yet to come, and the number of these calls."""
    has_gradients: bool
    gradient_bytes: int
    """Gradients of other models."""
    returned_bytes: int = 0
    """Returned by calls whose backward is over, or left in attributes and not replaced."""
    attribute_bytes: int = 0
    """Left in attributes of the model by earlier calls, for this one to replace: the plain step
    lets go of each as it makes the next, captured code of all at its end."""
    are_used: bool = False
    """True if an optimizer has stepped with the gradients that exist."""

    @classmethod
    def now(cls, *, has_gradients: bool, gradient_bytes: int, returned_bytes: int,
            attribute_bytes: int = 0, are_used: bool = False,
            running: PendingCall | None = None) -> Present:
        """The memory present now, without that of the call whose backward is running."""
        calls = Counter(call.graph for call in _pending if call is not running)
        return cls(frozenset(calls.items()), has_gradients, gradient_bytes, returned_bytes,
                   attribute_bytes, has_gradients and are_used)

    def later(self) -> Present:
        """What is left of it, as far as can be told, when the backward of the call begins: a loop
        that has stepped resets gradients, and lets go of an output as it assigns the next."""
        return replace(self, has_gradients=self.has_gradients and not self.are_used,
                       returned_bytes=0, attribute_bytes=0, are_used=False)

    @property
    def graphs(self) -> set[PlannedGraph]:
        """The graphs with pending calls."""
        return {found for each, _ in self.pending if (found := each()) is not None}

    def outside(self, graph: PlannedGraph) -> Moment:
        """The memory present outside a call of `graph`."""
        pending = 0
        plain_bytes = self.gradient_bytes + self.returned_bytes
        others_bytes = plain_bytes + self.attribute_bytes
        for each, count in self.pending:
            found = each()
            if found is graph:
                pending = count
            elif found is not None:
                others_bytes += count * found.saved_bytes
                plain_bytes += count * found.plain_saved_bytes
        return Moment(pending, others_bytes, plain_bytes, self.has_gradients)
