"""`planner.within` for the Trainer of Lightning."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.attached.within import plan_of
from planner.integrations.training import BudgetedTraining

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("planner.integrations.lightning needs lightning: pip install lightning"
                      ) from error


class MemoryBudget(BudgetedTraining, Callback):
    """Keep the training steps of a Lightning Trainer within a budget.

        trainer = Trainer(callbacks=[MemoryBudget("8GB")], ...)

    The planned module is the one that `training_step` calls: the LightningModule (`self(batch)`),
    the one child that has all of its parameters (`self.net(batch)`), or the one that `module`
    names. Optimizers and accumulation are those of the Trainer; its precision is observed in the
    first step, as in `planner.within`.  Gradient clipping works in place.  At the end, the log
    `planner` reports how many steps ran under a plan.

    Args:
        budget, budget_gb: as for `planner.within`.
        module: name of the module in the LightningModule that `training_step` calls.
        **arguments: as for `planner.within`.

    Raises `ValueError` when training begins, if the module already checkpoints its activations or
    no module has that name, and after the first batch, if the module was not called.
    """

    def __init__(self, budget: int | str | None = None, *, budget_gb: float | None = None,
                 module: str | None = None, **arguments: Any) -> None:
        super().__init__(budget, budget_gb=budget_gb, **arguments)
        self._name = module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan from the next step on."""
        self._module = self._planned(pl_module)
        self._begin(self._module, trainer.optimizers, trainer.accumulate_grad_batches, 1,
                    "switch that off in the model or in the strategy")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Check that the module was called."""
        if plan_of(self._module) is None:
            raise ValueError(
                f"training_step of {type(pl_module).__name__} did not call "
                f"{self._name or 'the LightningModule'} in its first batch, so that nothing was "
                "planned; name the module that it calls, such as "
                f"MemoryBudget(..., module={next(iter(dict(pl_module.named_children())), '')!r})")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log how many steps ran under the plan."""
        self._end(self._module)

    def _planned(self, pl_module: LightningModule) -> nn.Module:
        """The module whose forward is planned."""
        children: dict[str, nn.Module] = dict(pl_module.named_children())
        if self._name is None:
            trained = {id(p) for p in pl_module.parameters()}
            whole = [child for child in children.values()
                     if {id(p) for p in child.parameters()} == trained]
            return whole[0] if len(whole) == 1 else pl_module
        named: dict[str, nn.Module] = dict(pl_module.named_modules())
        if self._name not in named:
            raise ValueError(f"module={self._name!r}: {type(pl_module).__name__} has none of that "
                             f"name; it has {', '.join(children)}")
        return named[self._name]
