"""The applied model whose repeated blocks are compiled one by one.

Each block runs the plan's graphs for it; everything else runs as it is written.  Blocks with the
same decisions share compiled code, so that compiling takes as long as there are different
decisions, not as there are blocks.  Wrappers that want each block for itself (as fully sharded data
parallel does) find them in place.

Blind spot: a copy of a block without its model is an ordinary module, and runs without the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from apply.errors import PlanMismatch
from apply.planned_code import PlannedCode
from apply.planned_forward import CountingForward
from apply.recipe import OpKey, Recipe, RegionRecipe
from apply.step_counts import reason_of_mode
from graph_capture.module_forward import (
    Forward,
    StandIn,
    own_forward,
    set_forward,
    standing_in,
)


def attach_to_blocks(model: nn.Module, recipe: Recipe,
                     block_of: Callable[[str], nn.Module | None]) -> None:
    """Put planned forwards into `model` and its blocks, which `block_of` finds by name; raises
    `PlanMismatch` where the model has no such blocks."""
    for shared in shared_code(recipe):
        blocks = []
        for name in shared.blocks:
            block = block_of(name)
            if block is None:
                raise PlanMismatch(f"the plan has a block {name}, this model has none; make a plan "
                                   "for this model")
            blocks.append(block)
        code = PlannedCode(type(blocks[0]).__name__, model, recipe, shared.regions)
        for block in blocks:
            set_forward(block, BlockForward(block, own_forward(block), code))
    set_forward(model, ModelForward(model, own_forward(model), recipe))


class BlockForward(StandIn):
    """The planned forward of a block."""

    def __init__(self, block: nn.Module, inner: Forward | None, code: PlannedCode | None) -> None:
        """`code`: `None` runs the block as it is written."""
        super().__init__(block, inner)
        self.planned_runs = 0
        """Regions of the plan that have run here."""
        self._code = code

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = super().__deepcopy__(memo)
        if self._code is not None:
            is_copied_with_model = id(self._code.model) in memo
            new._code = copy.deepcopy(self._code, memo) if is_copied_with_model else None
        return new

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, code = self.without_self(args), self._code
        if (code is None or not torch.is_grad_enabled()
                or self.__self__.training != code.recipe.training):
            return self.plain(*args, **kwargs)
        result = code(self.__self__, self.inner, *args, **kwargs)
        self.planned_runs += code.planned_runs
        return result


class ModelForward(CountingForward):
    """The forward of a model with planned blocks: its own, with the arguments that capture forced.
    """

    def __init__(self, model: nn.Module, inner: Forward | None, recipe: Recipe) -> None:
        super().__init__(model, inner)
        self.recipes = (recipe,)
        self.recipe: Recipe | None = recipe

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self.without_self(args)
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        recipe, = self.recipes
        if self.__self__.training != recipe.training:
            self.steps.count(reason_of_mode(recipe.training))
            return self.plain(*args, **kwargs)
        before = self._planned_runs()
        try:
            result = self.plain(*args, **{**dict(recipe.overrides), **kwargs})
        except PlanMismatch as error:
            raise self.explained(recipe, error, args, kwargs) from None
        self.steps.count(None if self._planned_runs() > before else _NO_BLOCK)
        return result

    def _planned_runs(self) -> int:
        found = (standing_in(self.__self__.get_submodule(name))
                 for recipe in self.recipes for name in recipe.blocks)
        return sum(block.planned_runs for block in found if isinstance(block, BlockForward))


_NO_BLOCK = ("no block of the plan ran in this step, which ran as it is written: something else "
             "than the blocks in the model was called. Apply the plan before the model is wrapped")


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
