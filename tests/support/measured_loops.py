"""Third-party training loops, with and without a budget: losses, and the peak of each step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import planner
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.torch_compat import begin_stage
from tests.support.stages import record_stages


@dataclass
class MeasuredLoop:
    """Measurements of a loop that trained a model."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Peak of each step, with parameters and buffers."""
    own: list[torch.Tensor] = field(default_factory=list)
    """Further tensors of the model, such as the scales of quantized weights."""
    _is_step: list[bool] = field(default_factory=lambda: [False])

    def begin_step(self) -> None:
        """Begin a step of the loop, and end the one before if it has not ended."""
        self._begin(is_step=True)

    def end_step(self) -> None:
        """End the step; later work, such as an evaluation, is no part of it."""
        self._begin(is_step=False)

    def _begin(self, is_step: bool) -> None:
        self._is_step.append(is_step)
        begin_stage()

    def note_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of the step."""
        self.losses.append(loss.item())

    def run(self, train: Callable[[], object]) -> None:
        """Train, with the same random numbers each time.

        Garbage is collected only where the code asks for it.  Otherwise Python may collect on any
        thread, including that of pytest-xdist, and releases on another thread are not seen.
        """
        torch.manual_seed(7)
        gc.disable()
        try:
            records = record_stages([train])
        finally:
            gc.enable()
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in strided_tensors([
            *self.model.parameters(), *self.model.buffers(), *self.own])}
        self.peaks = [sum(tensors.values()) + record.peak_bytes for record, is_step
                      in zip(records, self._is_step, strict=True) if is_step]

    def distance_from(self, other: MeasuredLoop) -> float:
        """Return the relative distance between the trained models."""
        mine, theirs = (torch.cat([p.detach().double().flatten() for p in loop.model.parameters()])
                        for loop in (self, other))
        return float((mine - theirs).norm() / theirs.norm())

    def loss_distances_from(self, other: MeasuredLoop) -> list[float]:
        """Return the relative distances between the losses of each step."""
        return [abs(mine - theirs) / abs(theirs)
                for mine, theirs in zip(self.losses, other.losses, strict=True)]


class MeasuredTraining:
    """A callback for a Trainer of transformers; it begins a stage of the measurement with each
    step."""

    loop: MeasuredLoop

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.loop.begin_step()
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.loop.note_loss(loss)
        return loss


Train = Callable[[MeasuredLoop, int | None], object]
"""Runs a loop on its model, within a budget if there is one."""


@dataclass(frozen=True)
class Trial:
    """The same training without and within a budget."""

    plain: MeasuredLoop
    budgeted: MeasuredLoop
    budget: int

    @classmethod
    def of(cls, make: Callable[[], nn.Module], train: Train, share: float = 0.7) -> Trial:
        """Run both.  `share`: the budget, as a fraction of the plain peak."""
        plain, budgeted = MeasuredLoop(make()), MeasuredLoop(make())
        train(plain, None)
        budget = int(share * max(plain.peaks))
        train(budgeted, budget)
        return cls(plain, budgeted, budget)

    def check(self, steps: int) -> None:
        """Check that the given number of steps ran, each under a plan and within the budget."""
        assert len(self.budgeted.peaks) == steps
        plan = planner.plan_of(self.budgeted.model)
        assert max(self.budgeted.peaks) <= self.budget, (
            self.budgeted.peaks, self.budget, plan.peak_bytes, plan.overhead, plan.solve_seconds)
        counts = planner.steps_of(self.budgeted.model)
        assert (counts.planned, counts.unplanned) == (steps, 0)

    def check_equal(self) -> None:
        """Check that losses and trained models are equal, bit for bit."""
        assert self.budgeted.losses == self.plain.losses
        trained = self.budgeted.model.state_dict()
        for name, value in self.plain.model.state_dict().items():
            assert torch.equal(trained[name], value), name

    def check_near(self, make: Callable[[], nn.Module], train: Train) -> None:
        """Check that losses, step by step, and the trained model are near the plain run's.

        Near is twice the distance that torch's own graph capture shows.  For losses it is that of
        its farthest step (in bfloat16 the distance of one step is chance), or one rounding of
        float32 if it shows none.
        """
        captured = MeasuredLoop(make())
        torch.compiler.reset()
        captured.model.compile(backend="aot_eager")
        train(captured, None)
        allowed = 2 * captured.distance_from(self.plain)
        assert self.budgeted.distance_from(self.plain) <= allowed
        rounding = torch.finfo(torch.float32).eps
        allowed_loss = max(2 * max(captured.loss_distances_from(self.plain)), rounding)
        distances = self.budgeted.loss_distances_from(self.plain)
        assert max(distances) <= allowed_loss, (distances, allowed_loss)
