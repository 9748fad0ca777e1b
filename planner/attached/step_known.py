"""What is known of the step that a planned graph takes part in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import ref

from torch.optim import Optimizer

from planner._graph_capture.plain_step.loss import Until
from planner._graph_capture.plain_step.observed_loss import ObservedLoss
from planner.attached.outside import Outside


@dataclass(frozen=True, slots=True)
class Known:
    """What a plan counts beside the graph."""

    optimizers: tuple[ref[Optimizer], ...] | None
    """Those that step; `None`: what the user gave, or nothing is known."""
    outside: Outside
    """What else is held while the graph runs."""
    loss: ObservedLoss | None
    """The loss outside of the model; `None`: it is inside, or the user gave it."""
    lives: tuple[Until, ...] | None = None
    """Where there is no such loss: how long each tensor of the output is there; `None`: it is taken
    to be held."""
    defers_reduction: bool = False
    """Whether the gradients there before are whole ones, which `fully_shard` has yet to reduce."""

    is_lean: bool = False
    """Whether calls are to save as little as they can."""

    @property
    def without_outside(self) -> Known:
        """It but for what lies beside the graph."""
        return replace(self, outside=Outside())

    @property
    def accumulates(self) -> bool:
        """Whether gradients are there when a backward begins."""
        return self.outside.accumulates

    @property
    def lets_output_go(self) -> bool:
        """Whether nothing of the output but the loss is there when the backward begins."""
        return self.lives is not None and Until.LOSS in self.lives
