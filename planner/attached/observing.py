"""Observation of the training loop by a planned forward: steps, calls, optimizers, memory.

Model of the world: a step ends when an optimizer steps the model; if no torch optimizer does, it
ends with the backward after which no gradients exist.

Blind spot: an optimizer that steps in the backward counts a step for each of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from planner._apply.planned_forward import CountingForward
from planner._graph_capture.plain_step.observed_loss import LossWatch
from planner._graph_capture.torch_compat import pytree, running_node_number
from planner.arguments.budget import Budget
from planner.arguments.planning import Planning
from planner.attached.held import LoopMemory, device_of, tensors_of
from planner.attached.known import GraphPlanner
from planner.attached.optimizers import observe, observers
from planner.attached.planned_graph import PendingCall, PlannedGraph, Present, pending_bytes
from planner.attached.status import Status
from planner.plans.plan import Plan

_NOT_CALLED = (
    "an optimizer has stepped a model that planner.within was called for, while its forward was "
    "not called with gradients: the step ran without a plan, and nothing keeps it within the "
    "budget. Train the model by its forward, or call planner.within for the submodule that is "
    "called")

OnNew = Literal["replan", "refuse"]

_clock = itertools.count(1)
"""Counts calls of planned models: those called after a model was planned belong to its loop."""
STEPS_LOOKED_AT = 3
"""Number of steps in which the loop's memory outside the model is measured."""


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
    """Number of batches that the caller keeps besides the one in use."""


class ObservingForward(CountingForward):
    """Forward override that observes the training loop."""

    settings: Settings
    running: PlannedGraph | None

    def _begin_observing(self) -> None:
        """Reset: nothing observed."""
        self._watch: LossWatch | None = None
        self._optimizers: list[ref[Optimizer]] = []
        self._defers_reduction = self._backward_seen = self._in_backward = False
        self._learned = 0
        """Counts new observations."""
        self._looks: list[list[int]] = [[]]
        """Bytes that the loop kept alive outside the model, by step."""
        self._worst_bytes: int | None = None
        self._plans, self._planning_seconds = 0, 0.0
        self._steps = self._planned_steps = self._calls = self._calls_of_step = 0
        self._calls_before: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._unplanned_before = self.steps.unplanned
        self._loop, self._begun = LoopMemory(), next(_clock)
        self._began_in_step = False
        self._last_call = 0
        observe(self)

    def begin_in_step(self) -> None:
        """Note that the current step called the model before observation began."""
        self._began_in_step = True

    def _begin_call(self) -> None:
        """Reset per-call state."""
        self._in_backward, self._last_call = False, next(_clock)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step."""
        return None if self.running is None else self.running.plan

    @property
    def status(self) -> Status:
        """Figures of the training so far."""
        is_open = self._calls_of_step > 0 and not self._optimizers and self._backward_seen
        planned = self.steps.unplanned == self._unplanned_before
        return Status(
            self.plan, self._steps + is_open, self._planned_steps + (is_open and planned),
            self._calls, self._worst_bytes, None if self.plan is None else self.plan.budget_bytes,
            self._plans, self._planning_seconds, self.steps.last_reason)

    @property
    def _has_gradients(self) -> bool:
        """True if gradients exist to which the next ones are added."""
        return (self._defers_reduction or self.settings.planning.accumulation > 1
                or any(p.grad is not None for p in self.__self__.parameters()))

    def _look_outside(self, planner: GraphPlanner, args: tuple[Any, ...], kwargs: dict[str, Any]
                     ) -> None:
        """Measure the memory that the loop keeps alive outside the model in this step."""
        if not planner.is_alone:
            return
        own = [*planner.own_tensors, *tensors_of(self.__self__, alive(self._optimizers)),
               *(leaf for leaf in pytree.tree_leaves((args, kwargs))
                 if isinstance(leaf, torch.Tensor))]
        before = self._held_bytes
        others = [tensor for each in observers() if isinstance(each, ObservingForward)
                  and each._last_call > self._begun for tensor in tensors_of(each.__self__)]
        self._looks[-1].append(self._loop.outside_bytes(
            device_of(self.__self__), own, others, pending_bytes()))
        self._learned += self._held_bytes != before

    @property
    def _held_bytes(self) -> int:
        """The most that the loop kept alive outside the model in the last two steps."""
        return max((size for step in self._looks[-2:] for size in step), default=0)

    @property
    def _stepping(self) -> tuple[ref[Optimizer], ...] | None:
        """The optimizers that have stepped; `None` if not known, or if the user gave one."""
        if self.settings.planning.optimizer is not None:
            return None
        alive = tuple(each for each in self._optimizers if each() is not None)
        return alive or None

    def stepping(self, optimizer: Optimizer) -> None:
        """Record an optimizer if it steps this model's parameters."""
        self._end_watch()
        if any(each() is optimizer for each in self._optimizers):
            self._stepped(optimizer)
            return
        mine = {id(parameter) for parameter in self.__self__.parameters()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            if not self._optimizers:
                self._steps = self._planned_steps = 0  # earlier calls were parts of a step
                self._unplanned_before = 0
            self._optimizers.append(ref(optimizer))
            self._learned += 1
            self._stepped(optimizer)

    def _stepped(self, optimizer: Optimizer) -> None:
        """Count the step that this optimizer completes."""
        began_in_step, self._began_in_step = self._began_in_step, False
        if not began_in_step and self._calls == self._calls_before.get(optimizer, 0) and any(
                p.grad is not None for p in self.__self__.parameters()):
            self.steps.count(_NOT_CALLED)
            self._steps += 1
        self._calls_before[optimizer] = self._calls
        self._end_step()

    def _end_step(self) -> None:
        """Count the calls since the last step as one step."""
        if not self._calls_of_step:
            return
        self._steps += 1
        self._planned_steps += self.steps.unplanned == self._unplanned_before
        self._unplanned_before, self._calls_of_step = self.steps.unplanned, 0
        if len(self._looks) < STEPS_LOOKED_AT:
            self._looks.append([])

    def note_backward(self, graph: PlannedGraph, present: Present, pending: PendingCall) -> None:
        """Record that the backward of a call has begun; `present`: memory present when the call
        began."""
        if not pending.begin_backward():
            return
        now = Present.now(has_gradients=self._in_backward or self._has_gradients)
        self._in_backward = True
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


def alive(optimizers: Iterable[ref[Optimizer]]) -> list[Optimizer]:
    """The optimizers that still exist."""
    return [found for each in optimizers if (found := each()) is not None]


def needs_gradient(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call of the module may belong to a training step."""
    leaves: Iterable[Any] = pytree.tree_leaves((args, kwargs))
    return any(p.requires_grad for p in module.parameters()) or any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
