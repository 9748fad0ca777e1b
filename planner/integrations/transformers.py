"""`planner.within` for the Trainer of transformers and its subclasses, such as TRL's."""

from __future__ import annotations

from typing import Any

from planner.integrations.training import BudgetedTraining

try:
    from transformers import (
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError("planner.integrations.transformers needs transformers and accelerate: "
                      "pip install transformers accelerate") from error


class MemoryBudgetCallback(BudgetedTraining, TrainerCallback):
    """Keep the training steps of a Trainer within a budget.

        trainer = Trainer(model, args, callbacks=[MemoryBudgetCallback("8GB")], ...)

    The optimizer and the number of micro-batches are those of the Trainer; its precision and the
    model's arguments are observed in the first step, as in `planner.within`.  Gradient clipping
    works in place.  At the end, the log `planner` reports how many steps ran under a plan.

    Args:
        budget, budget_gb: as for `planner.within`.
        **arguments: as for `planner.within`.

    Raises `ValueError` when training begins, if the model already checkpoints its activations
    (`activation_checkpointing=True`, or `gradient_checkpointing=True`).
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState,
                       control: TrainerControl, **kwargs: Any) -> None:
        """Plan from the next step on."""
        optimizer = kwargs["optimizer"]
        self._begin(kwargs["model"], getattr(optimizer, "optimizer", optimizer),  # accelerate's own
                    args.gradient_accumulation_steps, args.gradient_accumulation_steps,
                    "set activation_checkpointing=False (in older versions "
                    "gradient_checkpointing=False) in the TrainingArguments")

    def on_train_end(self, args: TrainingArguments, state: TrainerState,
                     control: TrainerControl, **kwargs: Any) -> None:
        """Log how many steps ran under the plan."""
        self._end(kwargs["model"])
