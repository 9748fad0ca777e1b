"""Runs of repeated blocks that a call has skipped: by dice (layer drop, a random depth), or by
values (early exit).

The model of the world: another call may run them, and a plan is to serve it, too.  So a step whose
code throws dice or asks for values is captured as if no block were skipped, and each ran as often
as it ever did: a skipped one runs behind a block of its class, with that one's output as its input.
A call that runs fewer blocks holds no more at any time.

Blind spots: a skipped block whose input is not like its output, and one of a class of which no
block has run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from planner._graph_capture.errors import DataDependentValue
from planner._graph_capture.module_forward import removed_afterwards
from planner._graph_capture.torch_compat import pytree

if TYPE_CHECKING:
    from planner._graph_capture.fake_copies.fake import FakeCopy

SkippedBlocks = tuple[tuple[str, tuple[str, ...]], ...]
"""Names of blocks that ran -> of those that are to run behind them."""


def skipped_blocks(fake_copy: FakeCopy, blocks: Sequence[str],
                   most_runs: Mapping[str, int]) -> SkippedBlocks:
    """The blocks that the fake copy's call skips, each behind the last one of its class that runs
    before its turn, or else behind the first; those that run less often than in `most_runs` behind
    themselves."""
    model, ran = fake_copy.model, Counter[str]()
    hooks = [model.get_submodule(name).register_forward_pre_hook(
        lambda *_, name=name: ran.update([name])) for name in blocks]
    try:
        with (removed_afterwards(hooks), fake_copy.as_on_device(), fake_copy.forward_context(),
              torch.no_grad(), fake_copy.mode):
            fake_copy.call()
    except DataDependentValue:
        return ()  # the code asks for more where it is not traced
    behind: dict[str, list[str]] = {}
    for place, name in enumerate(blocks):
        lacking = max(most_runs.get(name, 1), 1) - ran[name]
        if lacking <= 0:
            continue
        if name in ran:
            behind.setdefault(name, []).extend([name] * lacking)
            continue
        kind = type(model.get_submodule(name))
        alike = [other for other in blocks if other in ran
                 and type(model.get_submodule(other)) is kind]
        before = [other for other in alike if other in blocks[:place]]
        if alike:
            behind.setdefault(before[-1] if before else alike[0], []).extend([name] * lacking)
    return tuple((name, tuple(names)) for name, names in behind.items())


def running_skipped(model: nn.Module, skipped: SkippedBlocks) -> AbstractContextManager[None]:
    """Inside, one call of the model runs the skipped blocks as well."""
    return removed_afterwards([model.get_submodule(name).register_forward_hook(
        _RunsBehind([model.get_submodule(each) for each in names]), with_kwargs=True)
                               for name, names in skipped])


class _RunsBehind:
    """A forward hook that runs other blocks on a block's output, the first time."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = list(blocks)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                 output: Any) -> Any:
        while self._blocks:
            output = _run_on(self._blocks.pop(0), args, kwargs, output)
        return output


def _run_on(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """The output of a block whose input is the output of another; that itself where it is not like
    any argument."""
    made = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)
                 and leaf.is_floating_point()), None)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    for place, leaf in enumerate(leaves):
        if (made is not None and isinstance(leaf, torch.Tensor) and leaf.shape == made.shape
                and leaf.dtype == made.dtype):
            leaves[place] = made
            block_args, block_kwargs = pytree.tree_unflatten(leaves, structure)
            return block(*block_args, **block_kwargs)
    return output
