"""Common base of the trainer callbacks: begin `planner.within`, and report at the end.

Blind spots: checkpointing is detected if a module declares it by `gradient_checkpointing`, as in
transformers and diffusers, or if torch wraps it; not if its code calls `torch.utils.checkpoint`
itself, which is captured with it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from os import PathLike
from typing import Unpack

from torch import nn

from planner.arguments.planning import PlanArguments
from planner.attached.observing import OnNew
from planner.attached.within import attach, plan_of, release_optimizer, settings_of
from planner.plans.plan import Plan, summarize
from planner.running.applying import steps_of

log = logging.getLogger("planner")


class BudgetedTraining:
    """Trains a model within a budget, from the beginning of its training to the end."""

    def __init__(self, budget: int | str | None = None, *, budget_gb: float | None = None,
                 on_new: OnNew = "replan", plan: Plan | str | PathLike[str] | None = None,
                 **arguments: Unpack[PlanArguments]) -> None:
        """Arguments and errors are those of `planner.within`."""
        super().__init__()
        self._settings = settings_of(budget, budget_gb, on_new, plan, arguments)

    def _begin(self, model: nn.Module, optimizer: object, accumulation: int, batches_ahead: int,
               switch: str) -> None:
        """Plan the steps of `model`; optimizer and accumulation default to the trainer's.

        `batches_ahead`: number of batches that the trainer keeps besides the one in use; `switch`:
        words on how to turn off the trainer's own checkpointing.
        """
        for name, module in model.named_modules():
            if getattr(module, "gradient_checkpointing", False) is True or (
                    type(module).__name__ == "CheckpointWrapper"):
                raise ValueError(
                    f"{name or type(model).__name__} checkpoints its activations already, so that "
                    f"the plan could not choose what is recomputed; {switch}, or train without "
                    f"{type(self).__name__}")
        planning = self._settings.planning
        attach(model, replace(self._settings, batches_ahead=batches_ahead, planning=replace(
            planning, optimizer=planning.optimizer or optimizer,
            accumulation=max(planning.accumulation, accumulation))))

    def _end(self, model: nn.Module) -> None:
        """Log how many steps ran under the plan, and let go of the trainer's optimizer."""
        release_optimizer(model)
        steps, plan = steps_of(model), plan_of(model)
        log.info("%s: %d of %d steps ran under a plan%s%s", type(model).__name__, steps.planned,
                 steps.planned + steps.unplanned,
                 f"; the last of the others did not, since {steps.last_reason}"
                 if steps.unplanned else "",
                 "" if plan is None else f"; {summarize(plan)}")
