"""The applied model: the user's module, whose training step runs the planned graphs.

`torch.compile` captures the model again, now with its real tensors; AOTAutograd keeps aliasing,
input mutation and tied weights right; the backend in `plan_backend` puts the plan's graphs in the
place of what it is given.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from apply.errors import GraphMismatch
from apply.plan_backend import PlanBackend
from apply.recipe import ParameterKey, Recipe
from graph_capture.torch_compat import (
    BackendCompilerFailed,
    compile_call,
    compile_settings,
    sizes_as_they_are,
)

Replan = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Recipe]
"""Makes a recipe for a model called with these positional and keyword arguments."""


def apply_recipe(
    model: nn.Module, recipe: Recipe, *, mismatch: type[Exception] = GraphMismatch,
    replan: Replan | None = None,
) -> nn.Module:
    """A module that trains as `model` does, with the recipe's recomputations.

    It is of the same class, shares every submodule, parameter and buffer with `model` (which itself
    stays as it was), and so has the same `state_dict` keys.  Without gradients, and in the other of
    train and eval mode than the plan was made in, it runs the plain forward.

    A step with inputs of another size runs the same recipe where its graph is the same but for
    sizes and no tensor is larger than planned; otherwise the recipe that `replan` gives for the
    model and these arguments, asked once for inputs of these shapes.

    Raises `mismatch`, here if parameters or buffers differ from those of the plan, and in the
    first training step if the captured graph does (and there is no `replan`).
    """
    try:
        _check_tensors(model, recipe.tensors)
    except GraphMismatch as error:
        raise mismatch(str(error)) from None
    if recipe.blocks:
        from apply.blocks import apply_by_blocks

        if replan is not None:
            raise ValueError("replan works with plans of the whole model, and this one is made of "
                             "blocks; leave it out")
        return apply_by_blocks(model, recipe, mismatch)
    applied = copy.copy(model)
    applied._compiled_call_impl = _PlannedCall(  # type: ignore[assignment]
        applied, recipe, mismatch, replan)
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
            raise GraphMismatch(
                "the plan was made for another model; the first difference: the plan has "
                f"{_describe_tensor(want)}, this model has {_describe_tensor(have)}. "
                "Make a plan for this model")
    if len(found) != len(expected):
        longer, side = ((found, "this model") if len(found) > len(expected)
                        else (expected, "the plan"))
        extra = longer[min(len(found), len(expected))]
        raise GraphMismatch(
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

    def __init__(self, model: nn.Module, recipe: Recipe, mismatch: type[Exception],
                 replan: Replan | None) -> None:
        self._model = model
        self._recipe = recipe
        self._mismatch = mismatch
        self._replan = replan
        self._warned = False
        self._planned = PlannedCode(type(model).__name__, model, recipe, mismatch)
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
        except GraphMismatch as error:
            hint = _FIRST_CALL_HINT if self._is_first_step else ""
            raise self._mismatch(f"{error}{hint}") from None
        self._is_first_step = False
        return result

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = None if self._replan is None else _shapes_of(args, kwargs)
        if shapes not in self._replanned:
            try:
                return self._planned(self._model, *args, **kwargs)
            except GraphMismatch:
                # What has begun may have changed random state and buffers.
                if self._replan is None or self._planned.has_begun:
                    raise
            assert shapes is not None
            self._replanned[shapes] = PlannedCode(
                type(self._model).__name__, self._model,
                self._replan(self._model, args, kwargs), self._mismatch)
        return self._replanned[shapes](self._model, *args, **kwargs)

    def _warn_of_mode(self) -> None:
        if not self._warned:
            self._warned = True
            warn_of_mode(self._recipe)


def warn_of_mode(recipe: Recipe) -> None:
    """Tell the user that a step runs without its plan."""
    planned, now = ("train", "eval") if recipe.training else ("eval", "train")
    warnings.warn(
        f"the plan was made in {planned} mode; this step in {now} mode runs without it",
        stacklevel=5)


_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def _shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Shapes:
    return tuple((tuple(leaf.shape), leaf.dtype)
                 for leaf in pytree.tree_leaves((args, dict(sorted(kwargs.items()))))
                 if isinstance(leaf, torch.Tensor))


class PlannedCode:
    """Compiled code of the model, or of blocks that share it, under one recipe; raises
    `GraphMismatch` where the recipe is for another graph."""

    def __init__(self, name: str, model: nn.Module, recipe: Recipe, mismatch: type[Exception],
                 regions: Sequence[int] | None = None) -> None:
        """`regions`: those of the recipe that may be met here, by default all."""
        self._backend = _backend_of(model, recipe, mismatch, regions)
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
                if isinstance(error.inner_exception, GraphMismatch):
                    raise error.inner_exception from None
                raise
        if not self._backend.has_begun and not self._warned:
            self._warned = True
            warnings.warn(
                "torch.compile ran this step as it is written, without the plan: it gave up on the "
                "model's code, or a dispatch mode is active. If the model sets something up in its "
                "first call, call it once before the plan is applied", stacklevel=5)
        return result


def _backend_of(model: nn.Module, recipe: Recipe, mismatch: type[Exception],
                regions: Sequence[int] | None) -> PlanBackend:
    """The Dynamo backend that runs a recipe's graphs, by default those of all regions."""
    if recipe.backend == "inductor":
        from apply.inductor import InductorBackend

        return InductorBackend(model, recipe, mismatch, regions)
    return PlanBackend(model, recipe, mismatch, regions)
