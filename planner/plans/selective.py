"""Translate a plan to policies of torch's selective activation checkpointing, as far as possible.

Model of the world: `torch.utils.checkpoint` drops the results of a block and recomputes the whole
block when its backward begins, except the results of selected ops, which it saves.  It selects by
kind of op (`aten.tanh`), per block.  So two parts of a plan remain: the blocks that recompute
anything, and in those the kinds of op whose every result the plan keeps for the backward.  A kind
of which the plan keeps some results and recomputes others is recomputed: memory comes first.

Blind spots: ops have the names of the captured graph; one that runs under another name in the eager
model (in place, say) is recomputed.  All results of an op are saved, even if the plan needs only
one.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planner.units import format_bytes, format_flops

if TYPE_CHECKING:
    from planner.plans.decisions import Decision
    from planner.plans.plan import Plan

_REPEATED = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.|$)")
"""The outermost numbered module of a path, such as an element of an `nn.ModuleList`."""


@dataclass(frozen=True, slots=True)
class SelectiveCheckpointing:
    """Policies for `torch.utils.checkpoint` per block, and the parts of the plan that they lose."""

    saved: Mapping[str, tuple[str, ...]] = field(hash=False)
    """For each block to checkpoint, the ops whose results it saves.  Blocks that are not named are
    not to be checkpointed."""
    not_expressed: tuple[str, ...]
    """The parts of the plan that these policies cannot express."""
    recompute_flops: int
    """Upper bound on recomputed FLOPs."""
    plan_recompute_flops: int
    """The same under the plan."""

    def context_fn(self, block: str) -> Callable[[], tuple[Any, Any]]:
        """The `context_fn` of `torch.utils.checkpoint.checkpoint(…, use_reentrant=False)` for the
        block. Raises `KeyError` for a block that is not to be checkpointed."""
        if block not in self.saved:
            raise KeyError(f"{block!r} is not to be checkpointed; these are: "
                           f"{', '.join(self.saved) or 'none'}")
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        return functools.partial(create_selective_checkpoint_contexts,
                                 [_overload(name) for name in self.saved[block]])

    def __str__(self) -> str:
        blocks = [f"{block}: holds {', '.join(ops) or 'its inputs alone'}"
                  for block, ops in self.saved.items()]
        return "\n".join([
            *blocks, *(f"lost: {each}" for each in self.not_expressed),
            f"recomputes up to {format_flops(self.recompute_flops)}, the plan "
            f"{format_flops(self.plan_recompute_flops)}"])


def selective_checkpointing(plan: Plan, blocks: Sequence[str] | None) -> SelectiveCheckpointing:
    """See `Plan.selective_checkpointing`."""
    if plan.backend != "eager":
        raise ValueError(f"the plan was made for {plan.backend}, whose ops are not those that run "
                         "as the model is written; make one with backend='eager'")
    if any(each.action == "offload" for each in plan.decisions):
        raise ValueError("the plan stores results on the host, which a policy of checkpointing "
                         'cannot say; make one without allow="offload"')
    members = _members(plan.decisions, blocks)
    saved: dict[str, tuple[str, ...]] = {}
    lost: dict[str, list[str]] = {}
    result_of = {key.name: key.result for region in plan.spec.regions
                 for key in region.forward}
    flops = 0
    inside: set[str] = set()
    for block, decisions in members.items():
        inside |= {each.op for each in decisions}
        if all(each.action == "keep" for each in decisions):
            continue
        of_kind: dict[str, list[Decision]] = {}
        for each in decisions:
            of_kind.setdefault(_kind(each.op), []).append(each)
        saved[block] = tuple(kind for kind, alike in of_kind.items()
                             if _is_held(kind, alike, result_of))
        flops += sum(each.flops for each in decisions if _kind(each.op) not in saved[block])
        for kind, alike in of_kind.items():
            if kind not in saved[block] and (kept := [each for each in alike if each.saved_bytes]):
                lost.setdefault(
                    f"{kind} is recomputed, of which the plan keeps {len(kept)} of {len(alike)} "
                    f"({format_bytes(sum(each.saved_bytes for each in kept))})", []).append(block)
    outside = [each for each in plan.decisions
               if each.action == "recompute" and each.op not in inside]
    words = [f"{', '.join(found)}: {what}" for what, found in lost.items()]
    if outside:
        modules = dict.fromkeys(each.module or "(model)" for each in outside)
        words.append(f"{len(outside)} ops outside of the blocks, which the plan recomputes, are "
                     f"kept: {', '.join(modules)}")
    if saved:
        words.append("the plan recomputes each op where it is read; a checkpointed block is "
                     "computed again at once, and more of it is held together: the plan's peak of "
                     f"{format_bytes(plan.peak_bytes)} is not promised")
    if plan.spec.low_peak:
        words.append("the plan's backward holds less than torch's own (the low-peak variant)")
    if plan.spec.chunks > 1:
        words.append(f"the plan runs wide parts of the step in up to {plan.spec.chunks} chunks")
    return SelectiveCheckpointing(saved, tuple(words), flops, plan.recompute_flops)


def _members(decisions: Iterable[Decision], patterns: Sequence[str] | None
             ) -> dict[str, list[Decision]]:
    """The ops of each block, by its name."""
    members: dict[str, list[Decision]] = {}
    for each in decisions:
        block = _block_of(each.module, patterns)
        if block is not None:
            members.setdefault(block, []).append(each)
    if not members:
        raise ValueError(
            "the plan has no numbered modules (layers.0, layers.1) to be checkpointed; name those "
            'that are: blocks=("encoder", "decoder")' if patterns is None else
            f"blocks={tuple(patterns)!r} names no module that the plan has an op of")
    return members


def _block_of(module: str, patterns: Sequence[str] | None) -> str | None:
    if patterns is None:
        found = _REPEATED.match(module)
        return None if found is None else found[0]
    parts = module.split(".")
    paths = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((path for path in paths
                 if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)), None)


def _kind(op: str) -> str:
    """The kind of an op: `aten.add.Tensor` for `layers.0/aten.add.Tensor#1`."""
    return op.rpartition("/")[2].partition("#")[0]


def _is_held(kind: str, alike: Sequence[Decision], result_of: Mapping[str, str]) -> bool:
    """True if the plan saves as much of each op's results as the plain step, and at least half of
    them."""
    return _overload(kind) is not None and all(
        each.action == "keep" and each.saved_bytes == each.plain_saved_bytes
        and 2 * each.saved_bytes >= max(1, _result_bytes(result_of[each.op])) for each in alike)


def _result_bytes(layout: str) -> int:
    """Bytes of results with a layout such as `(float32[3, 4]/[4, 1], bool[3, 4]/[4, 1])`."""
    import torch

    return sum(getattr(torch, dtype).itemsize * math.prod(map(int, re.findall(r"\d+", sizes)))
               for dtype, sizes in re.findall(r"(\w+)\[([\d, ]*)\]", layout))


def _overload(kind: str) -> Any:
    """The torch op of a name in the captured graph, if any."""
    import torch

    from planner._graph_capture.torch_compat import OpOverload

    found: Any = torch.ops
    for part in kind.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, OpOverload) else getattr(found, "default", None)
