"""Training steps to compare: their results, bit by bit, and their memory.

`random_schedule` draws legal schedules of a real step, far from those that a solver would choose:
results are dropped and recomputed anywhere, in the forward and in the backward.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import planner
from planner._apply.planned_forward import apply_spec
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.plain_step.loss import objective
from planner._graph_capture.torch_compat import compile_settings
from planner.api import capture
from planner.errors import InfeasibleBudget
from planner.plans.decisions import build_spec
from planner.plans.plan import Plan
from planner.search.planning import Effort, plan_within
from planner.solvers.problem import Problem, Schedule
from planner.solvers.simulator import Timeline, unroll
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant
from tests.support.models import BUILDERS, HF, Case

SEED = 5


@dataclass(frozen=True)
class Trace:
    """All results of consecutive training steps."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random_state: Tensor

    def differences(self, other: Trace) -> list[str]:
        """Return the names of results that differ, to the last bit."""
        found = [f"output {index}" for index, (mine, theirs) in enumerate(
            zip(self.outputs, other.outputs, strict=True)) if not _equal(mine, theirs)]
        for mine, theirs in ((self.gradients, other.gradients), (self.buffers, other.buffers)):
            assert mine.keys() == theirs.keys()
            found += [name for name in mine if not _equal(mine[name], theirs[name])]
        if not torch.equal(self.random_state, other.random_state):
            found.append("state of the random generator")
        return found

    def distance(self, other: Trace) -> float:
        """Return the largest relative L2 distance of a loss, a gradient or a buffer."""
        pairs = [*zip(self.outputs, other.outputs, strict=True)]
        for name, mine in self.gradients.items():
            theirs = other.gradients[name]
            assert (mine is None) == (theirs is None), f"only one step has a gradient of {name}"
            if mine is not None and theirs is not None:
                pairs.append((mine, theirs))
        pairs += [(self.buffers[name], other.buffers[name]) for name in self.buffers]
        return max(_relative(mine, theirs) for mine, theirs in pairs)


def _equal(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return torch.equal(mine, theirs)


def _relative(mine: Tensor, theirs: Tensor) -> float:
    scale = theirs.double().norm().item()
    return (mine.double() - theirs.double()).norm().item() / (scale or 1.0)


def train(model: Callable[..., object], case: Case, *, steps: int = 2) -> Trace:
    """Run two training steps in a row without an optimizer between them, so that gradients add up;
    restore the model's buffers and gradients afterwards.

    `model` runs `case.model`: it, or something made of it.
    """
    owner = case.model
    owner.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    outputs: list[Tensor] = []
    with buffers_restored(owner):
        for _ in range(steps):
            output = model(*case.args, **case.kwargs)
            outputs += [tensor.detach().clone() for tensor in tree_leaves(output)
                        if isinstance(tensor, Tensor)]
            goal = objective(output, case.loss_fn)
            outputs += [root.detach().clone() for root in goal.roots]
            goal.backward()
        return Trace(outputs, {name: None if p.grad is None else p.grad.clone()
                               for name, p in owner.named_parameters()},
                     {name: buffer.clone() for name, buffer in owner.named_buffers()},
                     torch.get_rng_state())


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Context after which the buffers have their old values and nothing has a gradient."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


def reference(case: Case) -> Trace:
    """Run the model under `torch.compile` with nothing compiled: the same order of accumulation as
    a captured step, everything else plain PyTorch."""
    with compile_settings():
        return train(torch.compile(case.model, backend="eager"), case)


def measured_peak(model: Callable[..., object], case: Case) -> int:
    """Return the bytes that one training step uses above those allocated between steps; the model's
    buffers and gradients are restored afterwards."""

    def run() -> None:
        output = model(*case.args, **case.kwargs)
        goal = objective(output, case.loss_fn)
        goal.backward()

    case.model.zero_grad(set_to_none=True)
    with buffers_restored(case.model):
        return record_peak(run, "cpu").peak_bytes


def plan_or_smallest(model: nn.Module, inputs: object, **arguments: Any) -> Plan:
    """Return the plan within a budget, or within the smallest one where that is more."""
    try:
        return planner.plan(model, inputs, **arguments)
    except InfeasibleBudget as refusal:
        return planner.plan(model, inputs, **{**arguments, "budget": refusal.minimum_bytes})


def captured(case: Case, **arguments: Any) -> PreparedStep:
    """Return the case, ready to be planned."""
    return capture(case.model, case.inputs, loss_fn=case.loss_fn, **arguments)


def apply_schedule(
    case: Case, step: PreparedStep, schedule: Schedule, variant: Variant | None = None
) -> tuple[nn.Module, Timeline]:
    """Return the model that runs `schedule` (of the base variant unless another is given), and the
    timeline of the simulator."""
    variant = variant or step.base
    timeline = unroll(variant.problem, schedule)
    return apply_spec(case.model, build_spec(step, variant, timeline)), timeline


def random_schedule(problem: Problem, seed: int, share: float) -> Schedule:
    """Return a legal schedule in which about `share` of the recomputable ops are forgotten, most of
    them after their forward, some now and then, and run again wherever they are needed."""
    rng = random.Random(seed)
    forgettable = {index for index, op in enumerate(problem.ops)
                   if op.recomputable and rng.random() < share}
    producer = [storage.producer for storage in problem.storages]
    held: set[int] = set()
    runs: list[int] = []

    def need(storage: int, before: int) -> None:
        index = producer[storage]
        if storage in held or not problem.may_replay(index, before):
            return
        for source in problem.ops[index].inputs:
            need(source, before)
        runs.append(index)
        held.update(problem.ops[index].outputs)

    segment = 0
    for index, op in enumerate(problem.ops):
        turn = problem.segment_of[index] != segment
        segment = problem.segment_of[index]
        if turn or rng.random() < 0.2:
            chance = 1.0 if turn else 0.4
            held -= {storage for storage in sorted(held)
                     if producer[storage] in forgettable and rng.random() < chance}
        for storage in op.inputs:
            need(storage, index)
        runs.append(index)
        held.update(op.outputs)
    return tuple(runs)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model of `tests.support.models` with everything that its plans are evaluated by."""

    case: Case
    step: PreparedStep
    reference: Trace
    plain: Trace

    @functools.cached_property
    def smallest(self) -> Plan:
        """The plan for the smallest feasible budget."""
        try:
            return plan_within(self.step, self.step.resident_bytes, EFFORT)
        except InfeasibleBudget as refusal:
            return plan_within(self.step, refusal.minimum_bytes, EFFORT)

    @functools.cache  # noqa: B019 - subjects are kept for the whole run anyway
    def plan_at(self, share: float | None) -> Plan:
        """Return the plan for a share of the unplanned step's memory above resident, or for the
        smallest budget if that is more; `None`: no limit."""
        if share is None:
            return plan_within(self.step, None)
        resident = self.step.resident_bytes
        budget = resident + int(share * (self.step.keep_all_peak_bytes - resident))
        if share <= 0.5 and budget <= self.smallest.peak_bytes:
            return self.smallest
        try:
            return plan_within(self.step, budget, EFFORT)
        except InfeasibleBudget:
            return self.smallest


EFFORT = Effort(time_limit=1.0)
"""Enough for models of this size."""


@functools.cache
def subject(name: str) -> Subject:
    """Return the subject with this name, in a small size; made once and used by many tests."""
    case = BUILDERS[name](**SIZES.get(name, {}))
    return Subject(case, captured(case), reference(case), train(case.model, case))


SIZES: dict[str, dict[str, int]] = {
    **{name: {"layers": 1} for name in (*HF, "language_model", "lora", "autocast", "tied")},
    "resnet": {"stages": 2, "blocks": 1, "image": 32},
    "unet": {"depth": 1, "image": 32},
    "untied_embedding": {"layers": 1, "vocab": 1024},
}
"""Sizes that differ from the defaults of `tests.support.models`."""


def assert_same_gradients(mine: nn.Module, theirs: nn.Module) -> None:
    """Check that two models have the same gradients bit for bit."""
    for left, right in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
