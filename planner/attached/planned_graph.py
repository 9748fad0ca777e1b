"""One graph of a model that is trained within a budget, and the calls of it that hold memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from weakref import WeakSet, ref

from torch import nn

from planner._apply.blocks import code_of
from planner._apply.call_signature import Call
from planner._graph_capture.plain_step.loss import Until
from planner._graph_capture.plain_step.observed_loss import ObservedLoss, UnmeasuredLoss
from planner.attached.known import GraphPlanner
from planner.attached.outside import Moment, Outside, fullest
from planner.attached.step_known import Known
from planner.captured_graph import with_least_memory
from planner.plans.plan import Plan

_CLOSE = 0.01
"""Part of the budget by which what lies beside a graph may change before it is planned again."""


class PlannedGraph:
    """One graph of the model, and the plan that it runs under now."""

    plan: Plan

    def __init__(self, call: Call | None = None, planner: GraphPlanner | None = None) -> None:
        """`call`, `planner`: what it was captured from; `None`: the plan was given."""
        self.call, self.planner = call, planner
        self.known: Known | None = None
        """What the plan counts; `None`: it was given."""
        self.is_provisional = True
        """Whether a part of it is assumed."""
        self.loss: ObservedLoss | None = None
        """The loss that the caller made of this graph's output."""
        self.unmeasured: UnmeasuredLoss | None = None
        """It, seen and not yet measured."""
        self.is_followed = False
        """Whether another call came between a call of it and the loss."""
        self.lives: tuple[Until, ...] | None = None
        """How long each tensor of the output is there."""
        self.moments: dict[Present, set[Present]] = {}
        """What was there when calls of it began, and then when their backward did."""
        self.companions: WeakSet[PlannedGraph] = WeakSet()
        """Other graphs, of this and other models, that share a step with it."""
        self.is_lean = False
        """Whether it saves as little as it can, so that its companions fit beside it."""
        self.checked = -1
        """How much was known when its plan was last compared with what is known."""

    def adopt(self, module: nn.Module, plan: Plan) -> None:
        """Run under this plan from here on."""
        earlier = getattr(self, "code", None)
        self.plan = plan
        self.code = code_of(module, plan.spec)
        self.code.fall_back(with_least_memory)
        if earlier is not None:
            self.code.compare_with(earlier)

    @property
    def saved_bytes(self) -> int:
        """What a call holds from the end of its forward to its backward; 0: not known."""
        return 0 if self.planner is None else self.planner.saved_bytes

    @property
    def has_control_flow(self) -> bool:
        """Whether values of tensors decide what the step is, so that any call may need another
        graph."""
        return self.planner is not None and self.planner.has_control_flow

    def may_serve(self, call: Call) -> bool:
        """Whether the plan may be for this call; its digests decide."""
        return self.call is None or call.may_be_served_as(self.call)

    def outside(self, held_bytes: int) -> Outside:
        """All that was there beside calls of it.  Until a backward was seen, it is taken to meet
        what its forward has met."""
        return Outside(held_bytes, fullest(each.outside(self) for each in self.moments),
                      fullest(each.outside(self) for begin, ends in self.moments.items()
                              for each in ends or (begin,)),
                      max((each.plan.baseline_peak_bytes for each in self.companions), default=0))

    @property
    def shared_loss(self) -> ObservedLoss | None:
        """The loss; where calls share a step, each may hold its output longer than the last one."""
        if self.loss is None or not (self.companions or any(
                present.pending for present in self.moments)):
            return self.loss
        return replace(self.loss, outputs=tuple(replace(each, until=Until.END)
                                                for each in self.loss.outputs))

    def note(self, present: Present) -> bool:
        """Note what is there as a call of it begins; whether that is new."""
        if present in self.moments:
            return False
        self.moments[present] = set()
        for each, _ in present.pending:
            found = each()
            if found is not None and found is not self:
                self.companions.add(found)
                found.companions.add(self)
        return True

    def make_way(self) -> bool:
        """Have all graphs whose calls hold memory beside this one save as little as they can;
        whether that is new."""
        others = [each for each in self.companions if not each.is_lean]
        for each in others:
            each.is_lean = True
        return bool(others)

    def serves(self, known: Known) -> bool:
        """Whether the plan is for what is known now, or has room for what came."""
        planned = self.known
        if (
            planned is None
            or planned.outside.region_signature != known.outside.region_signature
            or (planned.without_outside != known.without_outside)
        ):
            return False
        plain_bytes = [max(each.outside.plain_bytes, self.plan.baseline_peak_bytes)
                       for each in (planned, known)]
        if abs(plain_bytes[1] - plain_bytes[0]) > _CLOSE * plain_bytes[0]:
            return False
        growth = known.outside.most_bytes - planned.outside.most_bytes
        limit_bytes = self.plan.budget_bytes
        if growth == 0 or limit_bytes is None:
            return growth == 0
        return (abs(growth) < _CLOSE * limit_bytes
                and self.plan.limited_bytes + growth <= limit_bytes)


class PendingCall:
    """A call that holds memory for its backward, as long as that may come: the nodes of autograd's
    graph keep it alive."""

    def __init__(self, graph: PlannedGraph) -> None:
        self.graph = ref(graph)
        self.has_begun = False
        """Whether its backward has reached the output."""
        _pending.add(self)

    def begin_backward(self) -> bool:
        """Note that its backward begins; whether it has not begun before."""
        is_first, self.has_begun = not self.has_begun, True
        _pending.discard(self)
        return is_first


_pending: WeakSet[PendingCall] = WeakSet()
"""Those of all planned models."""


def pending_calls() -> list[PendingCall]:
    """Those of all planned models."""
    return list(_pending)


def pending_bytes() -> int:
    """What pending calls hold."""
    return sum(graph.saved_bytes for call in _pending if (graph := call.graph()) is not None)


@dataclass(frozen=True, slots=True)
class Present:
    """What is there at some moment."""

    pending: frozenset[tuple[ref[PlannedGraph], int]]
    """Graphs of calls whose backward is yet to come, and how many each has."""
    has_gradients: bool

    @classmethod
    def now(cls, *, has_gradients: bool) -> Present:
        """What is there now."""
        return cls(frozenset(Counter(call.graph for call in _pending).items()), has_gradients)

    def outside(self, graph: PlannedGraph) -> Moment:
        """It beside a call of one graph."""
        pending = others_bytes = 0
        for each, count in self.pending:
            found = each()
            if found is graph:
                pending = count
            elif found is not None:
                others_bytes += count * found.saved_bytes
        return Moment(pending, others_bytes, self.has_gradients)
