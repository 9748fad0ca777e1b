"""The code of a model whose repeated blocks are compiled one by one.

Each block runs the plan's graphs for it; everything else runs unchanged.  Blocks with the same
decisions share compiled code, so compile time grows with the number of different decisions, not of
blocks.  The blocks have their planned forwards only while the model's forward runs.  Wrappers that
wrap each block (fully sharded data parallel) find them in place at any time, and their hooks run
around the plan.

Blind spot: a block that is called outside of its model runs without the plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner._apply.errors import PlanMismatch
from planner._apply.outputs import with_missing_cache
from planner._apply.plan_backend import Fallback
from planner._apply.planned_code import (
    DID_MORE_OUTSIDE,
    CompiledCode,
    PlannedCode,
    known_tensors,
)
from planner._apply.rewrite_spec import RewriteSpec, decisions_of
from planner._apply.symbolic_code import SizedCode
from planner._graph_capture.dynamo.blocks import repeated_blocks
from planner._graph_capture.dynamo.distinct_inputs import with_distinct_tensors
from planner._graph_capture.dynamo.traced_code import TracedCode
from planner._graph_capture.model_state import ModelState
from planner._graph_capture.module_forward import (
    Forward,
    call_forward,
    hooks_within,
    in_place_of_forwards,
    own_forward,
)
from planner._graph_capture.outside_state import OutsideState
from planner._graph_capture.random_state import Dice
from planner._graph_capture.torch_compat import (
    as_plain_code,
    called_unseen,
    compile_settings,
    pytree,
)


class PlannedBlocks:
    """Code of the blocks of a model under one rewrite spec; the counterpart of `PlannedCode`."""

    def __init__(self, model: nn.Module, spec: RewriteSpec, *, may_exchange: bool = False,
                 traced: TracedCode | None = None) -> None:
        """`may_exchange`, `traced`: as for `code_of`."""
        self._model, self._may_exchange = model, may_exchange
        self.has_begun = False
        """True if the model's forward has begun; the part before the first block runs unchanged."""
        self.is_trial = False
        """True if a block that is not the plan's ends the call although others have run."""
        self._falls_back = False
        self._is_compiled = spec.backend == "inductor"
        self._runs = 0
        self.most_runs = dict[str, int]()
        """How often each block has run in a call, at most."""
        self.ran_more = False
        """True if a block has run more often in a call than planned."""
        self._did_more_outside = False
        self._may_vary = False
        self._alike: tuple[str, ...] = ()
        self._unlike: set[tuple[object, ...]] = set()  # calls of blocks that are not the plan's
        check_blocks(model, spec)
        self._codes = {
            each.blocks: PlannedCode(model, model.get_submodule(each.blocks[0]), spec, each.regions,
                                     may_exchange=may_exchange, traced=traced)
            for each in self._shared(spec)}
        self._code_of = {name: code for blocks, code in self._codes.items() for name in blocks}

    def exchange(self, spec: RewriteSpec) -> bool:
        """As `PlannedCode.exchange`."""
        shared = self._shared(spec)
        return [each.blocks for each in shared] == [*self._codes] and all(
            self._codes[each.blocks].exchange(spec, each.regions) for each in shared)

    def _shared(self, spec: RewriteSpec) -> tuple[SharedCode, ...]:
        """Group the blocks by what torch compiles once: where schedules are exchanged, blocks of
        one class share code whatever their decisions."""
        def kind(name: str) -> tuple[object, ...]:
            block = self._model.get_submodule(name)
            return bool(name), type(block), hooks_within(block)

        return shared_code(spec, kind if self._may_exchange else None)

    def fall_back(self, fallback: Fallback, *, may_vary: bool = False, sizes_vary: bool = False
                  ) -> None:
        """As `PlannedCode.fall_back`; a block that is not the plan's, where others have run, runs
        as it is written.  `may_vary`: calls run other blocks than the planned step did, or the same
        in another place; those that are not the plan's save their inputs alone.  `sizes_vary`: as
        there."""
        self._falls_back = True
        for code in self._codes.values():
            code.fall_back(fallback, sizes_vary=sizes_vary)
        self._may_vary = may_vary
        others = self._model.get_submodule
        kinds = {type(others(name)) for name in self._code_of}
        self._alike = tuple(name for name in repeated_blocks(self._model)
                            if name not in self._code_of and type(others(name)) in kinds
                            ) if may_vary else ()

    def take_larger(self) -> None:
        """As `PlannedCode.take_larger`."""
        for code in self._codes.values():
            code.take_larger()

    def compare_with(self, earlier: Code) -> None:
        """Like `PlannedCode.compare_with`."""
        found = {} if not isinstance(earlier, PlannedBlocks) else earlier._code_of
        for name, code in self._code_of.items():
            if name in found:
                code.compare_with(found[name])

    @property
    def met_unplanned_gradient(self) -> bool:
        """True if a gradient came through an output that the plan took for one without."""
        return any(code.met_unplanned_gradient for code in self._codes.values())

    @property
    def compilations(self) -> int:
        """Number of graphs compiled so far."""
        return sum(code.compilations for code in self._codes.values())

    def __call__(self, module: nn.Module, own: Forward | None, /, *args: Any, **kwargs: Any
                 ) -> Any:
        """Call a block.  `own`: the forward that the instance has; `None`: that of its class."""
        self.has_begun, self._runs, self._did_more_outside = True, 0, False
        blocks = [(name, self._model.get_submodule(name), code) for name, code in (
            *self._code_of.items(), *((name, None) for name in self._alike)) if name]
        rest = self._code_of.get("")
        unseen = () if rest is None else [block for _, block, _ in blocks]
        plain = (nullcontext() if self._is_compiled
                 else as_plain_code(partial(known_tensors, module, args, kwargs)))
        with (compile_settings(donated_buffers=self._is_compiled), plain,  # once for all blocks
              in_place_of_forwards((block, self._call_of(name, block, code))
                                   for name, block, code in blocks),
              called_unseen(unseen)):
            for code in self._codes.values():
                code.begin()
                code.is_trial = self.is_trial and (code is rest or not self._may_vary)
            if rest is None:
                return call_forward(module, own, *args, **kwargs)
            result = rest(module, own, *args, **kwargs)
            self._runs += rest.planned_runs
            self._did_more_outside |= rest.did_more_outside
            return result

    def _call_of(self, name: str, block: nn.Module, code: PlannedCode | None) -> Forward:
        own, runs = own_forward(block), 0
        as_written = partial(call_forward, block, own)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return as_written(*args, **kwargs)
            call_key = (code, _properties_of(args, kwargs)) if self._may_vary else ()
            nonlocal runs
            runs += 1
            self.most_runs[name] = max(self.most_runs.get(name, 0), runs)
            is_more = self._may_vary and code is not None and code.has_run_all(name)
            self.ran_more |= is_more
            if code is None or is_more or call_key in self._unlike:
                self._runs += 1
                return _checkpointed(as_written, args, kwargs)
            try:
                result = code.call_block(name, block, own, *args, **kwargs)
            except PlanMismatch as mismatch:
                if self._may_vary and not code.has_begun and len(self._unlike) < _UNLIKE:
                    self._unlike.add(call_key)
                    self._runs += 1
                    return _checkpointed(as_written, args, kwargs)
                if code.has_begun or self.is_trial or not (self._falls_back and self._runs):
                    raise
                warnings.warn("a block of this step is not the planned one; it runs as it is "
                              "written, and the step may take more than the budget: "
                              f"{mismatch}", stacklevel=2)
                return as_written(*args, **kwargs)
            self._runs += code.planned_runs
            self._did_more_outside |= code.did_more_outside
            return result

        # The code around breaks there.
        return torch.compiler.disable(call)

    def why_unplanned(self) -> str | None:
        """Reason why the last successful call ran without the plan; `None` if it ran under it."""
        if not self._runs:
            return None if self._may_vary else _NO_BLOCK
        return DID_MORE_OUTSIDE if self._did_more_outside else None


Code = PlannedCode | PlannedBlocks | SizedCode


def code_of(model: nn.Module, spec: RewriteSpec, *, may_exchange: bool = False,
            traced: TracedCode | None = None) -> Code:
    """Return the code of a model under a rewrite spec; it is compiled at its first call.  Raises
    `PlanMismatch` if the model lacks blocks of the rewrite spec.

    `may_exchange`: its `exchange` will be asked for; only where `is_exchangeable`.  `traced`: what
    was compiled of the same graphs, which then runs in place of new code.
    """
    if spec.blocks:
        return PlannedBlocks(model, spec, may_exchange=may_exchange, traced=traced)
    if spec.sizes is not None:
        return SizedCode(model, spec)
    return PlannedCode(model, model, spec, may_exchange=may_exchange, traced=traced)


def run_step(code: Code | CompiledCode, spec: RewriteSpec, module: nn.Module, own: Forward | None,
             args: tuple[Any, ...], kwargs: dict[str, Any], *, is_trial: bool = False) -> Any:
    """Call `code(module, own, ...)` with the arguments that the rewrite spec expects.  `is_trial`:
    random state, buffers and what the code has changed outside are left as they were where the call
    raises `PlanMismatch`, though a part may have run."""
    args, kwargs = with_distinct_tensors(args, {**dict(spec.overrides), **kwargs})
    finish = with_missing_cache if spec.overrides else lambda output: output
    if not is_trial:
        return finish(code(module, own, *args, **kwargs))
    restore = ModelState(module).restore
    outside = OutsideState(module, with_attributes=True, copies_tensors=False)
    code.is_trial = True
    try:
        return finish(code(module, own, *args, **kwargs))
    except PlanMismatch:
        restore()
        outside.put_back()
        raise
    finally:
        code.is_trial = False


def check_blocks(model: nn.Module, spec: RewriteSpec) -> None:
    """Raise `PlanMismatch` if the model lacks a block of the rewrite spec."""
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for name in spec.blocks:
        if name not in names:
            raise PlanMismatch(f"the plan has a block {name}, this model has none; make a plan "
                               "for this model")


_UNLIKE = 64
"""Remembered calls of blocks that the plan does not have."""


def _properties_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """Properties of a call that the graph of a block may depend on."""
    leaves: list[Any] = pytree.tree_leaves((args, kwargs))
    return tuple((leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor)
                 else type(leaf) for leaf in leaves)


def _checkpointed(run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of `run`, which saves its inputs and runs again in the backward."""
    dice = Dice()
    runs = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        with nullcontext() if runs == 1 else dice.again():
            return run(*args, **kwargs)

    return checkpoint(call, *args, use_reentrant=False, **kwargs)


_NO_BLOCK = ("no block of the plan ran in this step, which ran as it is written: something else "
             "than the blocks in the model was called. Apply the plan before the model is wrapped")


@dataclass(frozen=True)
class SharedCode:
    """Blocks that run the same compiled code."""

    kind: tuple[object, ...]
    """Properties that these blocks share."""
    blocks: tuple[str, ...]
    regions: tuple[int, ...]
    """Regions of the first block, then those of the next."""


def shared_code(spec: RewriteSpec,
                kind: Callable[[str], tuple[object, ...]] | None = None
                ) -> tuple[SharedCode, ...]:
    """Group the blocks of a rewrite spec (the whole model is one, called "") by `kind`, a function
    of a block's name; by default by their decisions."""
    regions: dict[str, list[int]] = {}
    for index, region in enumerate(spec.regions):
        regions.setdefault(region.block, []).append(index)
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, indices in regions.items():
        alike.setdefault(kind(name) if kind else decisions_of(spec, indices), []).append(name)
    return tuple(SharedCode(common, tuple(blocks),
                            tuple(index for name in blocks for index in regions[name]))
                 for common, blocks in alike.items())
