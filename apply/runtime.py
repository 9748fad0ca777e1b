"""The applied model: the user's module, whose training step runs the planned graphs.

A planned forward stands in the instance (`apply.planned_forward`).  `torch.compile` captures the
model's own forward again, now with its real tensors; AOTAutograd keeps aliasing, input mutation and
tied weights right; the backend in `plan_backend` puts the plan's graphs in the place of what it is
given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from torch import nn

from apply.blocks import attach_to_blocks
from apply.circumstances import tensor_keys
from apply.errors import PlanMismatch
from apply.planned_forward import PlannedForward, Replan
from apply.recipe import ParameterKey, Recipe
from graph_capture.module_forward import (
    StandIn,
    own_forward,
    rebound,
    set_forward,
    take_down,
)

__all__ = ["Replan", "apply_recipe", "attach", "detach"]


def apply_recipe(
    model: nn.Module, recipe: Recipe, *, replan: Replan | None = None,
) -> nn.Module:
    """A module that trains as `model` does, with the recipe's recomputations; see `attach`.

    Raises `PlanMismatch`, here if parameters or buffers differ from those of the plan, and in the
    first training step if the captured graph does (and there is no `replan`).
    """
    _check_tensors(model, recipe.tensors)
    return attach(model, (recipe,), replan=replan, in_place=False)


def attach(model: nn.Module, recipes: Sequence[Recipe] = (), *, replan: Replan | None = None,
           in_place: bool) -> nn.Module:
    """A module that trains as `model` does, each step under one of the recipes.

    In place, it is `model` itself, until `detach`.  Otherwise it is another module of the same
    class, which shares every submodule, parameter and buffer with `model` (which itself stays as it
    was); of the submodules, blocks that are compiled one by one, and what holds them, are copies
    too.  Both have the `state_dict` keys of `model`.  Without gradients it runs the plain forward,
    and, without `replan`, also in the other of train and eval mode than the recipes were made for.

    A step with inputs of another size runs a recipe where its graph is the same but for sizes and
    no tensor is larger than planned.  For a step that no recipe serves `replan` is asked for one,
    with the model and the arguments; from then on that is tried as the others are.  Recipes that
    were attached before are dropped.

    Raises `PlanMismatch` where the model lacks the blocks of a recipe; a step raises it where no
    recipe serves it (and there is no `replan`).
    """
    by_blocks = any(recipe.blocks for recipe in recipes)
    if by_blocks and replan is not None:
        raise ValueError("replan works with plans of the whole model, and this one is made of "
                         "blocks; leave it out")
    if by_blocks and len(recipes) > 1:
        raise ValueError(f"one recipe of blocks can be attached at a time, got {len(recipes)}")
    if in_place:
        take_down(model)
        attached, block_of = model, _found(model)
    else:
        copies = _Copies(model)
        attached, block_of = copies.root, copies.module
    if by_blocks:
        attach_to_blocks(attached, recipes[0], block_of)
    else:
        set_forward(attached, PlannedForward(attached, own_forward(attached), recipes, replan))
    return attached


def detach(model: nn.Module) -> None:
    """Take away what `attach` has put into a model, which then runs as it is written."""
    take_down(model)


def _found(model: nn.Module) -> Callable[[str], nn.Module | None]:
    modules = dict(model.named_modules(remove_duplicate=False))
    return modules.get


class _Copies:
    """Shallow copies of a model and of modules in it, which share all that is not copied; what
    stands in for a forward is left out."""

    def __init__(self, model: nn.Module) -> None:
        self.root = _shallow(model)
        self._copies = {"": self.root}
        for path, module in model.named_modules():
            if isinstance(vars(module).get("forward"), StandIn):
                self.module(path)

    def module(self, path: str) -> nn.Module | None:
        """The copy of the module at `path`, for which those around it are copied too; `None` where
        there is none."""
        if path not in self._copies:
            outer, _, name = path.rpartition(".")
            parent = self.module(outer)
            own = None if parent is None else parent._modules.get(name)
            if parent is None or own is None:
                return None
            self._copies[path] = _shallow(own)
            parent.__dict__["_modules"] = {**parent._modules, name: self._copies[path]}
        return self._copies[path]


def _shallow(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    set_forward(copied, rebound(own_forward(module), module, copied))
    return copied


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
