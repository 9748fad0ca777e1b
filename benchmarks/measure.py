"""Measure training steps: peak, gradients, and times that are robust to other load on the machine.

Steps are forward, loss and backward from `grad = None`; there is no optimizer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.models import Workload
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.plain_step.loss import objective
from planner.errors import InfeasibleBudget
from planner.plans.plan import Plan
from planner.search.planning import Effort, plan_within
from planner.step.prepared import PreparedStep

MEGABYTE = 1e6


def run_step(workload: Workload, model: nn.Module) -> None:
    """Run one step of `model` in place of the workload's.  Gradients start from `None`, and the
    output stays alive to the end, as in a training loop."""
    model.zero_grad(set_to_none=True)
    output = workload.call(model)
    objective(output, workload.loss_fn).backward()


def peak_bytes(workload: Workload, model: nn.Module) -> int:
    """Measure the peak of one step above the resident memory before it; a step before it compiles.
    """
    run_step(workload, model)
    model.zero_grad(set_to_none=True)
    peak = record_peak(lambda: run_step(workload, model), "cpu").peak_bytes
    model.zero_grad(set_to_none=True)
    return peak


def plan_or_smallest(plan: Callable[[Any], Plan], budget: int | str = 1) -> Plan:
    """Return what `plan` makes of a budget, or of the smallest feasible one where that is more."""
    try:
        return plan(budget)
    except InfeasibleBudget as refusal:
        return plan(refusal.minimum_bytes)


def thorough(step: PreparedStep, time_limit: float) -> Callable[[int], Plan]:
    """Return a function from a budget of the whole step to a plan that takes all of the time."""
    return partial(plan_within, step, effort=Effort(time_limit=time_limit, is_thorough=True))


def with_gradient_checkpointing(workload: Workload) -> nn.Module | None:
    """Return a copy of the model under `gradient_checkpointing_enable()`; `None` if it has none."""
    if not hasattr(workload.model, "gradient_checkpointing_enable"):
        return None
    model = copy.deepcopy(workload.model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def held_by_loss(workload: Workload) -> list[object]:
    """Return the objects that the loss keeps alive, including its labels; the breakdown counts
    these among the buffers."""
    closure = getattr(workload.loss_fn, "__closure__", None) or ()
    return [cell.cell_contents for cell in closure]


def storage_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of the storages of the tensors among these; of a sharded one, on this rank.
    """
    local = [t._local_tensor if isinstance(t, DTensor) else t
             for t in tensors if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


def gradients(workload: Workload, model: nn.Module, *, seed: int = 1) -> torch.Tensor:
    """Return all gradients of the second of two steps in a row, as one vector, in float64.

    The second step shows random numbers that were not replayed.  Buffers are restored afterwards,
    so that every model starts from the same ones.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    torch.manual_seed(seed)
    run_step(workload, model)
    run_step(workload, model)
    vector = torch.cat([p.grad.double().flatten() for p in model.parameters()
                        if p.grad is not None])
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return vector


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 distance of two vectors."""
    return float((found - expected).norm() / expected.norm())


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two times."""

    median: float
    low: float
    """Lower quartile."""
    high: float
    """Upper quartile."""

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f} {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of several alternatives, run in turns."""

    seconds: tuple[tuple[float, ...], ...]
    """One row for each alternative, one entry for each round."""

    def ratio(self, index: int, base: int) -> Ratio:
        """Return the ratio of the times of two alternatives in the same round."""
        ratios = [a / b for a, b in zip(self.seconds[index], self.seconds[base], strict=True)]
        low, middle, high = quantiles(ratios, n=4, method="inclusive")
        return Ratio(middle, low, high)


def time_steps(workload: Workload, models: Iterable[nn.Module], rounds: int) -> Times:
    """Measure the times of a step of each model, run in turns."""
    return time_in_turns([partial(run_step, workload, model) for model in models], rounds)


def time_in_turns(alternatives: Sequence[Callable[[], object]], rounds: int,
                  warm_up: int = 2) -> Times:
    """Run the alternatives A, B, C, A, B, C, … `rounds` times, after some rounds that do not count.

    Every other round runs backwards, so that none profits from its place.
    """
    seconds: list[list[float]] = [[] for _ in alternatives]
    for count in range(warm_up + rounds):
        order = range(len(alternatives)) if count % 2 else reversed(range(len(alternatives)))
        for index in order:
            started = time.perf_counter()
            alternatives[index]()
            elapsed = time.perf_counter() - started
            if count >= warm_up:
                seconds[index].append(elapsed)
    return Times(tuple(map(tuple, seconds)))
