"""Known facts of the step that a planned graph takes part in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import ref

from torch.optim import Optimizer

from planner._graph_capture.plain_step.loss import Until
from planner._graph_capture.plain_step.observed_loss import ObservedLoss
from planner.attached.outside import Outside


@dataclass(frozen=True, slots=True)
class Known:
    """Memory that a plan counts in addition to the graph."""

    optimizers: tuple[ref[Optimizer], ...] | None
    """The optimizers that step; `None`: the one that the user gave, or not known."""
    outside: Outside
    """Memory kept by others while the graph runs."""
    loss: ObservedLoss | None
    """The loss outside the model; `None`: it is inside, or the user gave it."""
    lives: tuple[Until, ...] | None = None
    """Without such a loss: lifetime of each output tensor; `None`: assumed to live until the
    end."""
    defers_reduction: bool = False
    """True if earlier gradients are whole ones, which `fully_shard` has yet to reduce."""

    early: tuple[tuple[str, int], ...] = ()
    """Gradients that hooks free as they come, and what that allocates."""
    room_bytes: int = 0
    """Memory to leave between forward and backward, to calls of other graphs."""
    is_lean: bool = False
    """True if calls are to save as little as possible."""

    @property
    def without_outside(self) -> Known:
        """The same facts without memory outside the graph."""
        return replace(self, outside=Outside())

    @property
    def accumulates(self) -> bool:
        """True if gradients exist when a backward begins."""
        return self.outside.accumulates

    @property
    def lets_output_go(self) -> bool:
        """True if, of the output, only the loss is alive when the backward begins."""
        return self.lives is not None and Until.LOSS in self.lives
