"""The applied model whose repeated blocks are compiled one by one.

Each block runs the plan's graphs for it; everything else runs as it is written.  Blocks with the
same decisions share compiled code, so that compiling takes as long as there are different
decisions, not as there are blocks.  The modules on the way from the model to its blocks, and the
blocks, are copies that share parameters, buffers and all other submodules with the user's model;
wrappers that want each block for itself (as fully sharded data parallel does) find them in place.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from apply.errors import PlanMismatch
from apply.planned_code import PlannedCode, warn_of_mode
from apply.recipe import OpKey, Recipe, RegionRecipe


def apply_by_blocks(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy of `model` with planned blocks; raises `PlanMismatch` where it has no such blocks."""
    copies: dict[str, nn.Module] = {"": copy.copy(model)}

    def copied(path: str) -> nn.Module:
        if path not in copies:
            outer, _, name = path.rpartition(".")
            parent = copied(outer)
            if (block := parent._modules.get(name)) is None:
                raise PlanMismatch(f"the plan has a block {path}, this model has none; make a plan "
                                   "for this model")
            copies[path] = copy.copy(block)
            parent.__dict__["_modules"] = {**parent._modules, name: copies[path]}
        return copies[path]

    for shared in shared_code(recipe):
        first, *_ = shared.blocks
        code = PlannedCode(type(copied(first)).__name__, model, recipe, shared.regions)
        for name in shared.blocks:
            block = copied(name)
            block._compiled_call_impl = _BlockCall(block, code, recipe)
    applied = copies[""]
    applied._compiled_call_impl = _ModelCall(applied, recipe)
    return applied


class _BlockCall:
    """What runs when a block is called."""

    def __init__(self, block: nn.Module, code: PlannedCode, recipe: Recipe) -> None:
        self._block, self._code, self._recipe = block, code, recipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._block.training != self._recipe.training:
            return self._block._call_impl(*args, **kwargs)
        return self._code(self._block, *args, **kwargs)


class _ModelCall:
    """What runs when the applied model is called: itself, with the arguments that capture forced.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            if self._model.training == self._recipe.training:
                for name, value in self._recipe.overrides:
                    kwargs.setdefault(name, value)
            elif not self._warned:
                self._warned = True
                warn_of_mode(self._recipe)
        return self._model._call_impl(*args, **kwargs)


@dataclass(frozen=True)
class SharedCode:
    """Blocks that run the same compiled code."""

    decisions: tuple[object, ...]
    """All that it depends on beside the captured graphs: for each region of a block."""
    blocks: tuple[str, ...]
    regions: tuple[int, ...]
    """Those of the first block, then those of the next."""


def shared_code(recipe: Recipe) -> tuple[SharedCode, ...]:
    """The blocks of a recipe (the whole model is one, called "") by their decisions."""
    regions: dict[str, list[int]] = {}
    for index, region in enumerate(recipe.regions):
        regions.setdefault(region.block, []).append(index)
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, indices in regions.items():
        alike.setdefault(tuple(_decisions(recipe.regions[index], index) for index in indices),
                         []).append(name)
    return tuple(SharedCode(decisions, tuple(blocks),
                            tuple(index for name in blocks for index in regions[name]))
                 for decisions, blocks in alike.items())


def count_decisions(recipe: Recipe) -> int:
    """How many different pieces of code the regions of a recipe need."""
    return len({_decisions(region, index) for index, region in enumerate(recipe.regions)})


def _decisions(region: RegionRecipe, index: int) -> object:
    """What a block's code depends on beside its graph: equal for blocks that may share code."""

    def local(name: str) -> str:
        """The op's name within the block."""
        bare = name.removeprefix(f"{index}:")
        mark = "~" if bare.startswith("~") else ""
        return mark + bare.removeprefix(mark).removeprefix(region.block)

    def ops(keys: tuple[OpKey, ...]) -> tuple[tuple[str, str], ...]:
        return tuple((local(key.name), key.result) for key in keys)

    sizes = region.outline and (region.outline.storage_bytes, region.outline.input_bytes)
    return (ops(region.forward), ops(region.backward), region.cotangents, sizes, region.hoisted,
            tuple((local(group.before), tuple(local(action.op) for action in group.actions))
                  for group in region.insertions),
            tuple((local(reuse.op), reuse.run, reuse.candidate) for reuse in region.inplace_reuses))
