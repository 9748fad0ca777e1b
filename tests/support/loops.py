"""Real training loops on the CPU, measured phase by phase, to evaluate breakdowns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner._graph_capture.plain_step.loss import objective
from planner.step.loop_trace import StepPhase
from planner.training_loop.report import LoopBreakdown
from tests.support.stages import record_stages

STEPS = 3
MEASURED_PHASES = (StepPhase.FORWARD, StepPhase.LOSS, StepPhase.BACKWARD,
                   StepPhase.OPTIMIZER_STEP)


@dataclass
class RealLoop:
    """A loop with the options of `planner.memory`; the model is trained unchanged."""

    model: nn.Module
    inputs: Any
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    step: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None
    """Replacement for the optimizer's step and the reset of gradients."""
    accumulation: int = 1
    autocast: torch.dtype | None = None
    grad_clip: float | None = None
    grad_scaler: bool = False
    set_to_none: bool = True
    zero_grad: str = "after_step"
    hold_output: str = "step"
    held: dict[str, Any] = field(default_factory=dict)

    def measure(self) -> list[dict[StepPhase, tuple[int, int]]]:
        """Return, for each step and phase, the peak and the bytes alive at its end, above the
        parameters, buffers and inputs."""
        stages: list[Callable[[], None]] = [self._make_optimizer]
        phases: list[tuple[int, StepPhase]] = []
        for step in range(STEPS):
            for _ in range(self.accumulation):
                stages += [self._forward, self._loss, self._backward]
                phases += [(step, phase) for phase in MEASURED_PHASES[:3]]
            stages.append(self._optimize)
            phases.append((step, StepPhase.OPTIMIZER_STEP))
        _, *records = record_stages(stages)
        found: list[dict[StepPhase, tuple[int, int]]] = [{} for _ in range(STEPS)]
        for (step, phase), record in zip(phases, records, strict=True):
            before = found[step].get(phase, (0, 0))[0]
            found[step][phase] = max(before, record.peak_bytes), record.end_bytes
        self.held.clear()
        self.model.zero_grad()
        return found

    def _make_optimizer(self) -> None:
        self.held["optimizer"] = None if self.optimizer is None else self.optimizer(self.model)
        if self.grad_scaler:
            self.held["scaler"] = torch.amp.GradScaler("cpu")
            self.held["scaler"].scale(torch.ones(()))

    def _forward(self) -> None:
        self.held["casts"] = (nullcontext() if self.autocast is None
                              else torch.autocast("cpu", self.autocast))
        self.held["casts"].__enter__()
        self.held["output"] = (self.model(**self.inputs) if isinstance(self.inputs, dict)
                               else self.model(*self.inputs))

    def _loss(self) -> None:
        self.held["goal"] = objective(self.held["output"], self.loss_fn)
        self.held["casts"].__exit__(None, None, None)

    def _backward(self) -> None:
        if self.zero_grad == "before_backward" and self.held.pop("stale", False):
            self._reset()
        goal = self.held["goal"]
        roots = [self.held["scaler"].scale(root) if self.grad_scaler else root
                 for root in goal.roots]
        torch.autograd.backward(roots, goal.seeds)
        del roots, goal
        if self.hold_output == "backward":
            self._let_go()

    def _optimize(self) -> None:
        optimizer = self.held["optimizer"]
        if self.step is not None:
            self.step(self.model, optimizer)
        elif optimizer is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if self.grad_clip is not None:
                if self.grad_scaler:
                    self.held["scaler"].unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, self.grad_clip)
            if self.grad_scaler:
                self.held["scaler"].step(optimizer)
                self.held["scaler"].update()
            else:
                optimizer.step()
        if self.zero_grad == "after_step":
            self._reset()
        self.held["stale"] = True
        if self.hold_output != "loop":
            self._let_go()

    def _reset(self) -> None:
        optimizer = self.held["optimizer"]
        (self.model if optimizer is None or self.step is not None else optimizer).zero_grad(
            set_to_none=self.set_to_none)

    def _let_go(self) -> None:
        self.held["output"] = self.held["goal"] = None


def deviations(breakdown: LoopBreakdown, measured: list[dict[StepPhase, tuple[int, int]]],
               ) -> dict[tuple[int, str], float]:
    """Return predicted over measured peak, less 1, of every step and phase, with resident memory.
    """
    memory = breakdown.loading.memory
    base = memory.parameters + memory.buffers + breakdown.resident.inputs
    found = {}
    for step, phases in enumerate(measured):
        predicted = breakdown.first if step == 0 else breakdown.steady
        for phase, (peak, _) in phases.items():
            found[step, phase.value] = predicted[phase].peak_bytes / (base + peak) - 1
    return found


def resident_error_bytes(breakdown: LoopBreakdown,
                         measured: list[dict[StepPhase, tuple[int, int]]]) -> int:
    """Return predicted less measured bytes between steps, the larger of the last two."""
    memory = breakdown.loading.memory
    base = memory.parameters + memory.buffers + breakdown.resident.inputs
    return max((breakdown.resident_bytes - base - phases[StepPhase.OPTIMIZER_STEP][1]
                for phases in measured[1:]), key=abs)


class Network(nn.Module):
    """An embedding, wide and narrow layers, a norm with buffers, and an unused head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(500, 64, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for _ in range(3))
        self.norm = nn.BatchNorm1d(64, dtype=dtype)
        self.wide = nn.Sequential(nn.Linear(64, 512, dtype=dtype), nn.GELU(),
                                  nn.Linear(512, 64, dtype=dtype))
        self.head = nn.Linear(64, 200, dtype=dtype)
        self.unused = nn.Linear(64, 64, dtype=dtype)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.head(self.wide(x))


IDS = torch.arange(16 * 12).view(16, 12) % 500

LABELS = (IDS % 200).flatten()


def loss_fn(logits):
    return F.cross_entropy(logits.flatten(0, 1).float(), LABELS)


def check(optimizer=None, *, model=None, step=None, exact=True, **options):
    """Compare the breakdown of this loop with the real one, and return it."""
    model = Network() if model is None else model
    made = optimizer(model) if callable(optimizer) else optimizer
    report = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=made, **options)
    measured = RealLoop(copy.deepcopy(model), (IDS,), loss_fn, optimizer, step,
                        **options).measure()
    for (number, phase), off in deviations(report.breakdown, measured).items():
        assert abs(off) < 0.002, (number, phase, off)
    if exact:
        assert resident_error_bytes(report.breakdown, measured) == 0
    return report


def adamw(**options):
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
