"""Conditions under which an op may run again with the same result, and the state this needs.

An op of a functional graph is a function of its inputs, except for:

- randomness: a replay runs under the generator's state of the first run (torch's own memory budget
  mode does not do that, and gets gradients wrong under dropout);
- inputs that the step mutates after the forward (BatchNorm's running statistics): a replay reads an
  earlier copy, if that is small;
- side effects, uninitialised results, collectives: never replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner._graph_capture.joint_graph.random_ops import state_bytes
from planner._graph_capture.torch_compat import HigherOrderOperator, OpOverload, schema_of

_aten = torch.ops.aten

COPY_LIMIT_BYTES = 1 << 20
"""Mutated inputs up to this size are copied for replays; ops that read larger ones are pinned."""

RUNS_ONCE = "checkpoint_planner_runs_once"
"""Key in the metadata of a node that is never replayed."""

UNINITIALISED = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided", "aten::empty_permuted",
})

_SEEDS = frozenset({
    "prims::inductor_seed", "prims::inductor_seeds", "prims::inductor_rand_eager_offset",
    "prims::inductor_rand_eager_offsets",
})
"""Seeds of Inductor's own random ops, which are functions of them: a few bytes."""

_DROPOUT_ARGUMENT = {
    "aten::_scaled_dot_product_flash_attention": "dropout_p",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "dropout_p",
    "aten::_scaled_dot_product_efficient_attention": "dropout_p",
    "aten::_scaled_dot_product_cudnn_attention": "dropout_p",
    "aten::_scaled_dot_product_fused_attention_overrideable": "dropout_p",
    "aten::_flash_attention_forward": "dropout_p",
    "aten::_efficient_attention_forward": "dropout_p",
}
"""Ops that torch tags as random, but that are deterministic where this argument is 0."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Requirements of a second run of an op."""

    pinned: str = ""
    """The reason not to run it again; empty if it may."""
    random: bool = False
    """True if a replay runs under the generator's state of the first run."""
    copied_inputs: tuple[fx.Node, ...] = ()
    """Inputs that the step mutates: a replay reads copies of them."""

    def state_bytes(self, device: torch.device) -> int:
        """Bytes on `device` that stay allocated from the first run to the last."""
        held = sum(n.meta["val"].numel() * n.meta["val"].element_size()
                   for n in self.copied_inputs)
        return held + (state_bytes(device) if self.random else 0)

    def workspace_bytes(self, device: torch.device) -> int:
        """Bytes that a replay allocates in addition to the op's own workspace, to save the
        generator's state."""
        return state_bytes(device) if self.random else 0


def replay_of(node: fx.Node, sees_mutated: Callable[[fx.Node], bool]) -> Replay:
    """The requirements of a replay of `node`; `sees_mutated`: true if an operand is, or views, an
    input that the step mutates."""
    target = node.target
    if node.meta.get(RUNS_ONCE):
        return Replay(pinned="runs in chunks, forward and backward together")
    if isinstance(target, HigherOrderOperator):
        return Replay(pinned=f"higher-order op {target.name()}")
    if not isinstance(target, OpOverload):
        return Replay(pinned=f"not a torch op: {target}")
    name = schema_of(target).name
    if schema_of(target).is_mutable:
        return Replay(pinned="writes into its inputs")
    if name.startswith(("_c10d_functional::", "c10d_functional::", "c10d::")):
        return Replay(pinned="collective communication")
    if name in UNINITIALISED:
        return Replay(pinned="its result is uninitialised memory")
    if name in _SEEDS:
        return Replay(pinned="seeds are drawn once")
    copies = tuple(source for source in node.all_input_nodes if sees_mutated(source))
    size = sum(s.meta["val"].numel() * s.meta["val"].element_size() for s in copies)
    if size > COPY_LIMIT_BYTES:
        return Replay(pinned=f"reads {size} bytes of state that the step mutates")
    return Replay(random=is_random(node), copied_inputs=copies)


def is_random(node: fx.Node) -> bool:
    """True if the op draws from a random generator."""
    return isinstance(node.target, OpOverload) and draws(node.target, node.args, node.kwargs)


def draws(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if this call of an op draws from a random generator."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    argument = _DROPOUT_ARGUMENT.get(schema_of(target).name)
    return argument is None or _argument(target, args, kwargs, argument) != 0


def _argument(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
              ) -> object:
    if name in kwargs:
        return kwargs[name]
    for position, argument in enumerate(schema_of(target).arguments):
        if argument.name == name:
            return args[position] if position < len(args) else argument.default_value
    return None
