"""Code that `torch.compile` makes under a recipe, with a word to the user where it runs without."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from apply.errors import PlanMismatch
from apply.plan_backend import PlanBackend
from apply.recipe import Recipe
from graph_capture.torch_compat import (
    BackendCompilerFailed,
    compile_call,
    compile_settings,
    sizes_as_they_are,
)


class PlannedCode:
    """Compiled code of the model, or of blocks that share it, under one recipe; raises
    `PlanMismatch` where the recipe is for another graph."""

    def __init__(self, name: str, model: nn.Module, recipe: Recipe,
                 regions: Sequence[int] | None = None) -> None:
        """`regions`: those of the recipe that may be met here, by default all."""
        self._backend = _backend_of(model, recipe, regions)
        self._compiled = compile_call(name, self._backend)
        self._donated_buffers = recipe.backend == "inductor"
        self._warned = False

    @property
    def has_begun(self) -> bool:
        """Whether a part of the model has run in the last call."""
        return self._backend.has_begun

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        self._backend.has_begun = False
        with (compile_settings(donated_buffers=self._donated_buffers),
              sizes_as_they_are((args, kwargs))):
            try:
                result = self._compiled(module, *args, **kwargs)
            except BackendCompilerFailed as error:
                if isinstance(error.inner_exception, PlanMismatch):
                    raise error.inner_exception from None
                raise
        if not self._backend.has_begun and not self._warned:
            self._warned = True
            warnings.warn(
                "torch.compile ran this step as it is written, without the plan: it gave up on the "
                "model's code, or a dispatch mode is active. If the model sets something up in its "
                "first call, call it once before the plan is applied", stacklevel=5)
        return result


def _backend_of(model: nn.Module, recipe: Recipe, regions: Sequence[int] | None) -> PlanBackend:
    """The Dynamo backend that runs a recipe's graphs, by default those of all regions."""
    if recipe.backend == "inductor":
        from apply.inductor import InductorBackend

        return InductorBackend(model, recipe, regions)
    return PlanBackend(model, recipe, regions)


def warn_of_mode(recipe: Recipe) -> None:
    """Tell the user that a step runs without its plan."""
    planned, now = ("train", "eval") if recipe.training else ("eval", "train")
    warnings.warn(
        f"the plan was made in {planned} mode; this step in {now} mode runs without it",
        stacklevel=5)
