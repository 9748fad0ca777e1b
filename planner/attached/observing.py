"""Observation of the training loop by a planned forward: steps, calls, optimizers, memory.

The model of the world: a step ends where an optimizer steps the model; where none of torch's does,
with the backward after which no gradients are there.  Several optimizers that step in one backward,
by hooks, make one step.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import nn
from torch.optim import Optimizer

from planner._apply.planned_forward import CountingForward
from planner._graph_capture.memory.allocator import heap_bytes
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.module_forward import (
    Forward,
    ForwardOverride,
    forward_override,
    modules_of,
    own_forward,
    parameters_of,
    set_forward,
)
from planner._graph_capture.optimizer.named import instances
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.plain_step.observed_loss import LossWatch
from planner._graph_capture.torch_compat import pytree, running_node_number, storage_key
from planner.arguments.budget import Budget
from planner.arguments.planning import Planning
from planner.attached.held import (
    LoopMemory,
    bytes_on,
    device_of,
    gradients_among,
    gradients_of,
    tensors_of,
)
from planner.attached.hooks import HookWatch, hook_signature
from planner.attached.measuring import (
    CLOSE,
    begin_measuring,
    compared_alone,
    conclude,
    enter_phase,
    watched_bytes_beside,
)
from planner.attached.methods import MethodSearch, model_of, plan_methods, planned_methods
from planner.attached.optimizers import (
    ObservedOptimizer,
    has_stepped,
    observe,
    observers,
    optimizers_of,
    stop_observing,
)
from planner.attached.outside import Known
from planner.attached.planned_graph import (
    PendingCall,
    PlannedGraph,
    Present,
    ReturnedTensors,
    note_pending,
    pending_bytes,
    pending_calls,
)
from planner.attached.status import Status
from planner.plans.plan import Plan
from planner.step.wrapped import group_of

log = logging.getLogger("planner")

_NOT_CALLED = (
    "an optimizer has stepped a model that planner.within was called for, while its forward was "
    "not called with gradients: the step ran without a plan, and nothing keeps it within the "
    "budget. Methods that train the model are looked for in the next step, and planned from then "
    "on. To plan them at once, name them: planner.within(..., methods=(\"forward\", \"encode\")); "
    "or call planner.within for the submodule that is called")

_REPLACED = (
    "the forward of a model was replaced after planner.within was called for it, and the new one "
    "does not call the planned one: the step ran without a plan, and nothing kept it within the "
    "budget. The new forward is planned from the next step on. To plan the first step, too, call "
    "planner.within after whatever replaces the forward")

_ASSIGNED = (
    "%s: its forward was replaced after planner.within was called for it, and the new one does not "
    "call the planned one: it is planned from now on, within the same budget")

OnNew = Literal["replan", "refuse"]

_clock = itertools.count(1)
"""Counts calls of planned models: those called after a model was planned belong to its loop."""
STEPS_LOOKED_AT = 3
"""Steps in which it is looked for what the loop holds beside the model."""
_STEPS_WATCHED = 6
"""First steps that are watched on a CPU."""
_OBJECTS_BYTES = 2 ** 17
"""Growth of the heap that Python's own objects explain."""
_WATCHING_SHARE = 0.02
"""Part of the time that watching may take, once the first steps are over."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's settings."""

    planning: Planning
    """Its `regions` are `None` for the regions that suit the model's wrappers."""
    limit: Budget | None
    on_new: OnNew = "replan"
    given: Plan | None = None
    """A saved plan."""
    batches_ahead: int = 0
    """Batches that the caller keeps in addition to the one in use."""
    methods: tuple[str, ...] = ("forward",)
    """Methods that are trained."""


@dataclass(slots=True)
class _Counts:
    """Counts of the training so far; see `Status`."""

    counted: tuple[int, int]
    """Calls, and unplanned calls, of all planned methods of the model, up to this step."""
    steps: int = 0
    planned_steps: int = 0
    calls: int = 0
    calls_before: WeakKeyDictionary[Optimizer, int] = field(default_factory=WeakKeyDictionary)
    """Calls up to the last step of each optimizer."""
    worst_bytes: int | None = None
    plans: int = 0
    planning_seconds: float = 0.0


class ObservingForward(CountingForward):
    """Forward override that observes the training loop."""

    settings: Settings
    running: PlannedGraph | None
    graphs: list[PlannedGraph]

    def __init__(self, module: nn.Module, inner: Forward | None, settings: Settings) -> None:
        super().__init__(module, inner)
        self.settings = settings

    def _begin_observing(self) -> None:
        """Reset: nothing observed."""
        self._watch: LossWatch | None = None
        self._optimizers: list[ObservedOptimizer] = []
        self._expected: list[ObservedOptimizer] = []
        """Optimizers that were there before any had stepped."""
        self._are_remade = set[ObservedOptimizer]()
        """Those that others have replaced which are like them, for example for each task."""
        self._in_step: ref[Optimizer] | None = None
        """The optimizer whose step runs; those that it steps itself are none of the loop's."""
        self._defers_reduction = self._backward_seen = self._in_backward = False
        self._returned = ReturnedTensors()
        self._returned_bytes = 0
        self._attributes = ReturnedTensors()
        self._attribute_bytes = 0
        """The most that a call has met of what earlier ones returned."""
        self._gradients_are_used = False
        """True if an optimizer has stepped since the last backward."""
        self._learned = 0
        """Counts new observations."""
        self.worst_ratio = 0.0
        """The highest peak of a step over its budget that was said, as a multiple of it."""
        self._unforeseen_bytes = 0
        """Memory by which a step exceeded what its plans predicted, where that broke the budget."""
        self._looks_until = STEPS_LOOKED_AT
        self._most_heap_bytes = 0
        """The largest heap of the process as a step began that was watched; 0: none is known."""
        self._most_given_bytes = 0
        """The largest arguments of a call without gradients that was measured."""
        self._steps_to_watch = _STEPS_WATCHED
        self._steps_to_skip = 0
        """Steps that are not watched on a CPU, so that watching takes a small share of the time."""
        self._counts = _Counts(counted=(0, self.steps.unplanned))
        self._search: MethodSearch | None = None
        self._has_searched = False
        self._loop, self._begun = LoopMemory(), next(_clock)
        self._began_in_step = False
        self._last_call = 0
        self._stepped_at: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """When each optimizer stepped last."""
        self._parameters: list[nn.Parameter] = []
        """Those that the model had as the last call began."""
        self._hooks: HookWatch | None = None
        self._graphs_of_step: WeakSet[PlannedGraph] = WeakSet()
        """Graphs of all planned models that were called since this one's optimizer stepped."""
        observe(self)

    def begin_in_step(self) -> None:
        """Note that the current step called the model before observation began."""
        self._began_in_step = True

    def _begin_call(self) -> None:
        """Reset per-call state.  The first call looks for the model's optimizers."""
        self._parameters = parameters_of(modules_of(self.__self__))
        if not self._last_call and not self._optimizers:
            for optimizer in optimizers_of(self._parameters):
                known = has_stepped(optimizer, self._parameters)
                (self._optimizers if known else self._expected).append(
                    ObservedOptimizer.of(optimizer))
                self._gradients_are_used |= known
        self._in_backward, self._last_call = False, next(_clock)

    def _observe_hooks(self) -> None:
        """See what hooks of the parameters do with gradients, in one backward."""
        watch = self._hooks
        if watch is not None and watch.has_seen and watch.end():
            self._learned += 1
        if watch is None or watch.hook_signature != hook_signature(self._parameters):
            if watch is not None:
                watch.end()
            self._hooks = watch = HookWatch(self.__self__)
            self._learned += 1
        if watch.hook_signature and not watch.has_seen and not watch.is_active:
            watch.begin()
            finalize(self, watch.end)  # else a model that is gone would leave it behind

    @property
    def _early(self) -> tuple[tuple[str, int], ...]:
        """Gradients that hooks free as they come."""
        return () if self._hooks is None else tuple(sorted(self._hooks.early.items()))

    def _share_step(self, graph: PlannedGraph) -> None:
        """Note that a graph of this model takes part in the step."""
        watching = observers()
        if graph.share_step(self._graphs_of_step):
            for each in watching:
                each._learned += 1
        for each in watching:
            each._graphs_of_step.add(graph)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step."""
        return None if self.running is None else self.running.plan

    @property
    def status(self) -> Status:
        """Figures of the training so far."""
        group = self._group()
        calls, unplanned = self._count()
        mine, counts = self._counts, [each._counts for each in group]
        is_open = calls > mine.counted[0] and not self._optimizers and any(
            each._backward_seen for each in group)
        last = max(group, key=lambda each: each._last_call)
        plan = last.plan
        worst_bytes = [each.worst_bytes for each in counts if each.worst_bytes is not None]
        return Status(
            plan, mine.steps + is_open,
            mine.planned_steps + (is_open and unplanned == mine.counted[1]),
            calls, max(worst_bytes, default=None), None if plan is None else plan.budget_bytes,
            sum(each.plans for each in counts), sum(each.planning_seconds for each in counts),
            next((each.steps.last_reason for each in (last, *group)
                  if each.steps.last_reason is not None), None))

    def _group(self) -> list[ObservingForward]:
        """The forwards of all planned methods of the model; the first counts the steps."""
        model = model_of(self.__self__)
        standing = forward_override(model)
        found = [standing] if isinstance(standing, ObservingForward) else []
        return [*found, *(each.planning for each in planned_methods(model))] or [self]

    def _count(self) -> tuple[int, int]:
        """Calls, and unplanned calls, of all planned methods of the model."""
        group = self._group()
        if group[0] is not self:
            group = [self]
        return (sum(each._counts.calls for each in group),
                sum(each.steps.unplanned for each in group))

    @property
    def _has_gradients(self) -> bool:
        """True if gradients exist to which the next ones are added."""
        return (self._defers_reduction or self.settings.planning.accumulation > 1
                or bool(gradients_among(self._parameters)))

    def _look_outside(self, graph: PlannedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
                      ) -> None:
        """Measure the memory that the loop keeps alive outside the model as a call begins."""
        planner = graph.planner
        if planner is None or not planner.is_alone:
            return
        if self._stepping_now and graph.is_held_known:
            return  # what a step holds that calls the model is counted by its own trace
        device, optimizers = device_of(self.__self__), alive(self._optimizers)
        inputs = output_tensors((args, kwargs))
        own = [*planner.own_tensors, *tensors_of(self.__self__, optimizers), *inputs,
               *self._gradients_of_others(), *self._returned_before(args, kwargs),
               *self._attributes.of_earlier_steps()]
        if not isinstance(self.settings.planning.optimizer, str | type):
            # Counted with the optimizer: copies of the parameters, another model.
            own += [p for each in optimizers for group in each.param_groups
                    for p in group["params"]]
        # Layers that were frozen later may have kept their gradients, which no plan counts.
        idle = {storage_key(p.grad) for p in self.__self__.parameters()
                if not p.requires_grad and p.grad is not None}
        parts = [each for each in strided_tensors(own) if storage_key(each) not in idle]
        watched_bytes = watched_bytes_beside(parts)
        found_bytes = (
            self._loop.outside_bytes(device, parts, self._tensors_of_others(), pending_bytes())
            if watched_bytes is None else watched_bytes - pending_bytes())
        # Inputs may be among what other calls keep: the output of another model.
        least_bytes = -bytes_on(device, strided_tensors(inputs))
        if watched_bytes is not None and not self._is_looked_at:
            # Tensors that the loop made before this call are not all known.
            found_bytes = max(found_bytes, graph.held_bytes)
        was_looked_at, before_bytes = graph.is_held_known, graph.held_bytes
        self._learned += graph.note_held(self._counts.steps, max(least_bytes, found_bytes))
        if was_looked_at and graph.held_bytes > before_bytes:
            # What a step allocated beyond its prediction was for what is held from then on.
            self._unforeseen_bytes = max(
                0, self._unforeseen_bytes - (graph.held_bytes - before_bytes))

    def _returned_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]
                         ) -> list[torch.Tensor]:
        """What earlier calls have returned and the loop still refers to, but for the inputs."""
        inputs = {storage_key(each) for each in strided_tensors(output_tensors((args, kwargs)))}
        return [tensor for tensor in self._returned.of_earlier_steps()
                if tensor.layout is torch.strided and storage_key(tensor) not in inputs]

    def _present(self, returned: Sequence[torch.Tensor], attributes: Sequence[torch.Tensor]
                 ) -> Present:
        """The memory present as a call begins; `returned`, `attributes`: what earlier calls have
        returned, and left in attributes."""
        if note_pending():
            for each in observers():
                each._learned += 1
        device = device_of(self.__self__)
        returned_bytes = bytes_on(device, returned)
        attribute_bytes = bytes_on(device, [*returned, *attributes]) - returned_bytes
        self._attribute_bytes = max(self._attribute_bytes, attribute_bytes)
        if returned_bytes:  # sizes that vary are no news
            returned_bytes = self._returned_bytes = max(self._returned_bytes, returned_bytes)
        return Present.now(
            has_gradients=self._has_gradients, gradient_bytes=self._others_gradient_bytes,
            returned_bytes=returned_bytes, are_used=self._gradients_are_used,
            attribute_bytes=self._attribute_bytes if attribute_bytes else 0)

    @property
    def _is_looked_at(self) -> bool:
        """True if this step looks through all tensors that Python knows."""
        return self._counts.steps < self._looks_until

    def _gradients_of_others(self) -> list[torch.Tensor]:
        """Gradients of other planned models of the same loop."""
        mine = model_of(self.__self__)
        others = {model_of(each.__self__) for each in observers()
                  if each._last_call > self._begun} - {mine}
        return [gradient for model in others for gradient in gradients_of(model)]

    def _has_gradients_beside(self, since: int) -> bool:
        """True if the model has gradients in parameters that it does not share with a planned model
        that was called since then."""
        shared = {id(parameter) for each in observers() if each._last_call > since
                  for parameter in each._parameters}
        return any(parameter.grad is not None and id(parameter) not in shared
                   for parameter in parameters_of(modules_of(self.__self__)))

    @property
    def _others_gradient_bytes(self) -> int:
        return bytes_on(device_of(self.__self__), strided_tensors(self._gradients_of_others()))

    def _tensors_of_others(self) -> list[torch.Tensor]:
        """Parameters, buffers and gradients of other planned models of the same loop."""
        return [tensor for each in observers() if each._last_call > self._begun
                for tensor in tensors_of(each.__self__)]

    def _tensors_held(self, args: tuple[Any, ...], kwargs: dict[str, Any]
                      ) -> Iterator[torch.Tensor]:
        """All tensors that the loop is known to hold now."""
        yield from tensors_of(self.__self__, alive(self._optimizers))
        yield from self._tensors_of_others()
        yield from output_tensors((args, kwargs))
        if self._is_looked_at:
            yield from self._loop.made()

    def _begin_measuring(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure the step that this call begins, where it is one of those that are measured."""
        device = device_of(self.__self__)
        if not self._optimizers and self._backward_seen:
            if not pending_calls():
                conclude()  # the step before, which no optimizer of torch's has ended
            if device.type != "cuda":
                return  # a watch would be left open behind the last step
        if running_node_number() is not None or group_of(self.__self__):
            return
        heap = heap_bytes() if device.type == "cpu" and not self._graphs_of_step else None
        before = self._most_heap_bytes
        if heap and before and self._exceeds_with(heap - before):
            self._looks_until = self._counts.steps + 1  # the loop holds more than it did
            self._watch_next_steps()
        if device.type == "cuda" or self._steps_to_watch > 0 or self._steps_to_skip <= 0:
            self._most_heap_bytes = max(heap or 0, before)
            begin_measuring(self, device, lambda: self._tensors_held(args, kwargs),
                            is_complete=self._is_looked_at, existed=self._loop.existed)

    def _compared_without_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]
                                    ) -> AbstractContextManager[None]:
        """Inside, a call that trains nothing, such as a rollout.  In training mode its memory is
        measured if its arguments are larger than those before."""
        plan = self.plan
        if (torch.is_grad_enabled() or not self.__self__.training or plan is None
                or plan.budget_bytes is None or running_node_number() is not None
                or group_of(self.__self__)):
            return nullcontext()
        device = device_of(self.__self__)
        given_bytes = bytes_on(device, strided_tensors(output_tensors((args, kwargs))))
        if given_bytes <= self._most_given_bytes:
            return nullcontext()
        self._most_given_bytes = given_bytes
        return compared_alone(
            self, plan.budget_bytes, device, lambda: self._tensors_held(args, kwargs),
            is_complete=self._is_looked_at, existed=self._loop.existed)

    def note_worst(self, peak_bytes: int) -> None:
        """So much memory was in use at one moment."""
        self._counts.worst_bytes = max(self._counts.worst_bytes or 0, peak_bytes)

    def _exceeds_with(self, more_bytes: int) -> bool:
        """True if the last plan exceeds its budget with this memory, which matters to it."""
        plan = self.plan
        if plan is None or plan.budget_bytes is None:
            return False
        close_bytes = CLOSE * plan.budget_bytes
        return more_bytes > max(close_bytes, _OBJECTS_BYTES) and (
            plan.peak_bytes + more_bytes > plan.budget_bytes + close_bytes)

    def _watch_next_steps(self) -> None:
        """Watch this step and the next: something is new in it."""
        self._steps_to_watch = max(self._steps_to_watch, 2)

    def note_peak(self, peak_bytes: int, unforeseen_bytes: int, watching_share: float) -> None:
        """A step that this model took part in was measured.  `unforeseen_bytes`: memory beyond the
        prediction that broke the budget; `watching_share`: part of the step's time."""
        self.note_worst(peak_bytes)
        self.note_watched(watching_share)
        if unforeseen_bytes:
            self._unforeseen_bytes += unforeseen_bytes
            self._learned += 1
            self._watch_next_steps()

    def note_watched(self, watching_share: float) -> None:
        """A step was measured, which took this part of its time."""
        self._steps_to_watch = max(0, self._steps_to_watch - 1)
        self._steps_to_skip = math.ceil(watching_share / _WATCHING_SHARE)

    @property
    def _stepping(self) -> tuple[ObservedOptimizer, ...] | None:
        """The optimizers that have stepped, or are to; `None` if not known, or if they are those
        that the user gave."""
        given = self.settings.planning.optimizer
        found = tuple(each for each in self._optimizers or self._expected if each() is not None)
        if given is not None:
            named = instances(given)
            if named is None or all(each() in named for each in found):
                return None
        return found or None

    def _with_remade(self, known: Known, planned: Known) -> Known:
        """The same with the optimizers that a plan counts, if those that are gone come again."""
        alive, counted = known.optimizers or (), planned.optimizers or ()
        gone = {*counted} - {*alive}
        return known if not {*alive} <= {*counted} or not gone <= self._are_remade else (
            replace(known, optimizers=counted))

    @property
    def _stepping_now(self) -> Optimizer | None:
        return None if self._in_step is None else self._in_step()

    def stepping(self, optimizer: Optimizer) -> None:
        """Record an optimizer if it steps this model's parameters."""
        if self._stepping_now not in (None, optimizer):
            return  # a part of the other's step
        self._end_watch()
        enter_phase("in the optimizer's step")
        if any(each() is optimizer for each in self._optimizers):
            self._stepped(optimizer)
            return
        mine = {id(parameter) for parameter in self.__self__.parameters()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            if not self._optimizers:  # what came before were parts of a step
                self._counts.steps = self._counts.planned_steps = 0
                self._counts.counted = (0, 0)
            observed = ObservedOptimizer.of(optimizer)
            if observed in self._optimizers:
                self._optimizers[self._optimizers.index(observed)] = observed
                self._are_remade.add(observed)
            else:
                self._optimizers.append(observed)
            for graph in self.graphs if optimizer.state else ():
                graph.forget_held()  # from here on the optimizer's tensors count as its own
            self._learned += 1
            self._stepped(optimizer)
        elif not self._counts.calls:
            self._graphs_of_step.clear()  # of another loop, as far as is known

    def stepped(self, optimizer: Optimizer) -> None:
        """End the measurement of a step of this model's parameters."""
        if self._stepping_now is optimizer:
            self._in_step = None
        if any(each() is optimizer for each in self._optimizers):
            conclude()

    def _stepped(self, optimizer: Optimizer) -> None:
        """Count the step that this optimizer completes."""
        self._in_step, self._gradients_are_used = ref(optimizer), True
        began_in_step, self._began_in_step = self._began_in_step, False
        calls, _ = self._count()
        calls_before = self._counts.calls_before.get(optimizer, 0)
        self._counts.calls_before[optimizer] = calls
        stepped_at = self._stepped_at.get(optimizer, 0)
        self._stepped_at[optimizer] = next(_clock)
        if self._search is not None:
            found, self._search = self._search.end(), None
            if found:
                log.info("%s is trained by its method %s, which is planned from now on",
                         type(self.__self__).__name__, " and ".join(found))
                plan_methods(self.__self__, found, self.settings, type(self))
        if (self._group()[0] is self and not began_in_step
                and calls == calls_before and self._has_gradients_beside(stepped_at)):
            # The model has another forward than this one, which need not call it.
            is_replaced = vars(self.__self__).get("forward") is not self and (
                forward_override(self.__self__) is self)
            self.steps.count(_REPLACED if is_replaced else _NOT_CALLED)
            self._counts.steps += 1
            self._counts.counted = self._count()
            if is_replaced:
                self._give_way()
                return
            if "forward" in self.settings.methods and not planned_methods(self.__self__) and (
                    not self._has_searched):
                self._search, self._has_searched = MethodSearch(self.__self__), True
        self._end_step()

    @property
    def was_passed_by(self) -> bool:
        """True if the model was trained so far without a call of its forward."""
        return bool(self._counts.steps) and not self._counts.calls

    def __del__(self) -> None:
        # Nothing refers to it: the forward was assigned, and does not call the one before.
        model: nn.Module | None = vars(self).get("__self__")
        forward = None if model is None else vars(model).get("forward")
        if model is not None and forward is not None and (
                forward_override(model) is self and not isinstance(forward, ForwardOverride)):
            log.warning(_ASSIGNED, type(model).__name__)
            self._give_way()

    def _give_way(self) -> None:
        """Plan the forward that has replaced this one, which from now on runs as written."""
        model, inner = self.__self__, self.inner
        stop_observing(self)
        if self._hooks is not None:
            self._hooks.end()
        new = type(self)(model, own_forward(model), self.settings)
        new.steps, new._counts, new._optimizers = self.steps, self._counts, self._optimizers
        set_forward(model, new)
        vars(self).clear()
        vars(self).update(__self__=model, inner=inner)
        self.__class__ = ForwardOverride  # type: ignore[assignment]

    def _end_step(self) -> None:
        """Count the step that the calls since the last one make."""
        calls, unplanned = self._count()
        if calls == self._counts.counted[0]:
            return
        self._counts.steps += 1
        self._steps_to_skip -= 1
        self._counts.planned_steps += unplanned == self._counts.counted[1]
        self._counts.counted = (calls, unplanned)
        self._graphs_of_step.clear()

    def note_backward(self, graph: PlannedGraph, present: Present, pending: PendingCall) -> None:
        """Record that the backward of a call has begun; `present`: memory present when the call
        began."""
        graph.is_differentiated_again |= torch.is_grad_enabled()
        had_begun = pending.has_begun
        if not pending.begin_backward() or (had_begun and not self._has_gradients):
            return
        left_bytes = 0
        for before, before_bytes in ((pending.returned_before, present.returned_bytes),
                                     (pending.attributes_before, present.attribute_bytes)):
            found_bytes = bytes_on(device_of(self.__self__), (
                tensor for each in before if (tensor := each()) is not None))
            # A small part of what was returned may stay, such as values of the loss.
            left_bytes += before_bytes * (2 * found_bytes > before_bytes)
        now = Present.now(
            has_gradients=self._in_backward or self._has_gradients,
            gradient_bytes=self._others_gradient_bytes, running=pending,
            returned_bytes=left_bytes)
        self._in_backward, self._gradients_are_used = True, False
        enter_phase(f"in the backward of {type(self.__self__).__name__}")
        ends = graph.moments.setdefault(present, set())
        if now not in ends or not self._backward_seen:
            ends.add(now)
            self._learned += 1
        self._backward_seen = True

    def _end_watch(self) -> None:
        # A watch that ends within a backward continues after it.
        if (self._watch is not None and running_node_number() is None
                and self._watch.end()):
            self._watch = None


def alive(optimizers: Iterable[ObservedOptimizer]) -> list[Optimizer]:
    """The optimizers that still exist."""
    return [found for each in optimizers if (found := each()) is not None]


def needs_gradient(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call of the module may belong to a training step."""
    leaves: Iterable[Any] = pytree.tree_leaves((args, kwargs))
    return any(p.requires_grad for p in module.parameters()) or any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
