"""What the callbacks for trainers have in common: `planner.within`, begun and told of at the end.

Blind spots: checkpointing is seen where a module says so by `gradient_checkpointing`, as those of
transformers and diffusers do, or is wrapped for it by torch; not where its code calls
`torch.utils.checkpoint` itself, which is captured with it.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from planner.attached.within import plan_of, within
from planner.reporters.one_line import summarize
from planner.running.applying import steps_of

log = logging.getLogger("planner")


class BudgetedTraining:
    """Trains a model within a budget, from the begin of its training to the end."""

    def __init__(self, budget: int | str | None = None, *, budget_gb: float | None = None,
                 **arguments: Any) -> None:
        """Arguments and errors are those of `planner.within`."""
        super().__init__()
        self._arguments = {"budget": budget, "budget_gb": budget_gb, **arguments}
        within(nn.Module(), **self._arguments)  # which raises here what is wrong with them

    def _begin(self, model: nn.Module, optimizer: object, accumulation: int, switch: str) -> None:
        """Plan the steps of `model`, with what its trainer says where the user did not; `switch`:
        how the trainer's own checkpointing is switched off."""
        for name, module in model.named_modules():
            if getattr(module, "gradient_checkpointing", False) is True or (
                    type(module).__name__ == "CheckpointWrapper"):
                raise ValueError(
                    f"{name or type(model).__name__} checkpoints its activations already, so that "
                    f"the plan could not choose what is recomputed; {switch}, or train without "
                    f"{type(self).__name__}")
        within(model, **{"optimizer": optimizer, "accumulation": accumulation, **self._arguments})

    def _end(self, model: nn.Module) -> None:
        """Say in the log how many steps ran under the plan."""
        steps, plan = steps_of(model), plan_of(model)
        log.info("%s: %d of %d steps ran under a plan%s%s", type(model).__name__, steps.planned,
                 steps.planned + steps.unplanned,
                 f"; the last of the others did not, since {steps.last_reason}"
                 if steps.unplanned else "",
                 "" if plan is None else f"; {summarize(plan)}")
