"""The applied model: the user's module, whose training step runs the planned graphs.

`torch.compile` captures the model again, now with its real tensors; AOTAutograd keeps aliasing,
input mutation and tied weights right; the backend in `plan_backend` puts the plan's graphs in the
place of what it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from apply.blocks import apply_by_blocks
from apply.errors import PlanMismatch
from apply.planned_code import PlannedCode, warn_of_mode
from apply.recipe import ParameterKey, Recipe
from graph_capture.torch_compat import pytree

Replan = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Recipe]
"""Makes a recipe for a model called with these positional and keyword arguments."""


def apply_recipe(
    model: nn.Module, recipe: Recipe, *, replan: Replan | None = None,
) -> nn.Module:
    """A module that trains as `model` does, with the recipe's recomputations.

    It is of the same class, shares every submodule, parameter and buffer with `model` (which itself
    stays as it was), and so has the same `state_dict` keys.  Without gradients, and in the other of
    train and eval mode than the plan was made in, it runs the plain forward.

    A step with inputs of another size runs the same recipe where its graph is the same but for
    sizes and no tensor is larger than planned; otherwise the recipe that `replan` gives for the
    model and these arguments, asked once for inputs of these shapes.

    Raises `PlanMismatch`, here if parameters or buffers differ from those of the plan, and in the
    first training step if the captured graph does (and there is no `replan`).
    """
    _check_tensors(model, recipe.tensors)
    if recipe.blocks:
        if replan is not None:
            raise ValueError("replan works with plans of the whole model, and this one is made of "
                             "blocks; leave it out")
        return apply_by_blocks(model, recipe)
    applied = copy.copy(model)
    applied._compiled_call_impl = _PlannedCall(applied, recipe, replan)
    return applied


def tensor_keys(model: nn.Module) -> tuple[ParameterKey, ...]:
    """Every parameter and buffer of a model, as a recipe lists them."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return tuple(
        ParameterKey(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."),
                     tensor.requires_grad)
        for name, tensor in named)


def _check_tensors(model: nn.Module, expected: Sequence[ParameterKey]) -> None:
    found = tensor_keys(model)
    for have, want in zip(found, expected, strict=False):
        if have != want:
            raise PlanMismatch(
                "the plan was made for another model; the first difference: the plan has "
                f"{_describe_tensor(want)}, this model has {_describe_tensor(have)}. "
                "Make a plan for this model")
    if len(found) != len(expected):
        longer, side = ((found, "this model") if len(found) > len(expected)
                        else (expected, "the plan"))
        extra = longer[min(len(found), len(expected))]
        raise PlanMismatch(
            "the plan was made for another model; the first difference: only "
            f"{side} has {_describe_tensor(extra)}. Make a plan for this model")


def _describe_tensor(key: ParameterKey) -> str:
    frozen = "" if key.requires_grad else ", frozen"
    return f"{key.name} ({key.dtype}{list(key.shape)}{frozen})"


# Models of transformers may install hooks then, which breaks the captured graph once.
_FIRST_CALL_HINT = ("; or, if the model sets something up in its first call, call it once before "
                    "the plan is applied")


class _PlannedCall:
    """What runs when the applied module is called."""

    def __init__(self, model: nn.Module, recipe: Recipe, replan: Replan | None) -> None:
        self._model = model
        self._recipe = recipe
        self._replan = replan
        self._warned = False
        self._planned = PlannedCode(type(model).__name__, model, recipe)
        self._replanned: dict[_Shapes | None, PlannedCode] = {}
        self._is_first_step = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._model._call_impl(*args, **kwargs)
        if self._model.training != self._recipe.training:
            self._warn_of_mode()
            return self._model._call_impl(*args, **kwargs)
        for name, value in self._recipe.overrides:
            kwargs.setdefault(name, value)
        try:
            result = self._step(args, kwargs)
        except PlanMismatch as error:
            if not self._is_first_step:
                raise
            raise PlanMismatch(f"{error}{_FIRST_CALL_HINT}") from None
        self._is_first_step = False
        return result

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = None if self._replan is None else _shapes_of(args, kwargs)
        if shapes not in self._replanned:
            try:
                return self._planned(self._model, *args, **kwargs)
            except PlanMismatch:
                # What has begun may have changed random state and buffers.
                if self._replan is None or self._planned.has_begun:
                    raise
            assert shapes is not None
            self._replanned[shapes] = PlannedCode(
                type(self._model).__name__, self._model,
                self._replan(self._model, args, kwargs))
        return self._replanned[shapes](self._model, *args, **kwargs)

    def _warn_of_mode(self) -> None:
        if not self._warned:
            self._warned = True
            warn_of_mode(self._recipe)


_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def _shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Shapes:
    return tuple((tuple(leaf.shape), leaf.dtype)
                 for leaf in pytree.tree_leaves((args, dict(sorted(kwargs.items()))))
                 if isinstance(leaf, torch.Tensor))
