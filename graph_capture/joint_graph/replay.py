"""Conditions under which an op may run again with the same result, and the state this needs.

An op of a functional graph is a function of its inputs, except for:

- randomness: a replay runs under the generator's state of the first run (torch's own memory budget
  mode does not do that, and gets gradients wrong under dropout);
- inputs that the step mutates after the forward (BatchNorm's running statistics): a replay reads an
  earlier copy, if that is small;
- side effects, uninitialised results, collectives: never replayed.

A random op has two companions, ops of torch's dispatcher.  The *draw* runs like the op, and returns
in addition the previous state of the device's default generator.  The *replay* runs under such a
state, and restores the current one afterwards.  They are ops, not calls around ops, so that a
compiler sees each as one kernel.  The draw is tagged as random: nothing merges two draws, drops
one, or swaps it with another random op.  The replay is a function of its operands, and may stand
wherever those are available.  Both accept the op's arguments and more keyword arguments: the
generator's device and, for the replay, the state.  Numbers are assigned in the order of an
operand's strides, which therefore must be those of the traced graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from planner._graph_capture.torch_compat import HigherOrderOperator, OpOverload, schema_of
from planner._graph_capture.torch_compat.dispatch import define_op

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

_WITH_DROPOUT = frozenset({
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
})
"""Ops that torch tags as random, but that are deterministic where their `dropout_p` is 0."""


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
    schema = schema_of(target)
    if schema.name not in _WITH_DROPOUT:
        return True
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given |= zip(tuple(given), args, strict=False)
    return {**given, **kwargs}["dropout_p"] != 0


CPU_GENERATOR_STATE_BYTES = 5056
"""Size of `torch.get_rng_state()`."""
_ACCELERATOR_STATE_BYTES = 16
"""Size of an accelerator's state: seed and offset, in host memory."""

_STATE, _DEVICE = "generator_state", "generator_device"


_RUNS: dict[OpOverload, tuple[OpOverload, bool]] = {}
"""For each companion, the random op behind it, and whether it is a replay."""


def draw(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
         ) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """The call that draws like `op(*args, **kwargs)` on `device`; it returns the op's results and
    the generator's state, a tensor in host memory."""
    return _companions(op)[0], tuple(args), {**kwargs, _DEVICE: str(device)}


def replay(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device,
           state: Any) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """The call of `op(*args, **kwargs)` under a state of the generator of `device`, whose current
    state is restored."""
    return _companions(op)[1], tuple(args), {**kwargs, _STATE: state, _DEVICE: str(device)}


def is_companion(op: object) -> bool:
    """True if an op draws or replays for a random op."""
    return op in _RUNS


def original_call(op: OpOverload, kwargs: Mapping[str, Any]
                  ) -> tuple[OpOverload, Mapping[str, Any], int]:
    """The random op behind a companion, its keyword arguments, and the bytes that the companion
    allocates in addition to its results; any other op unchanged."""
    if op not in _RUNS:
        return op, kwargs, 0
    original, is_replay = _RUNS[op]
    # The current state of the generator is saved.
    beyond = state_bytes(torch.device(kwargs[_DEVICE])) if is_replay else 0
    return original, {k: v for k, v in kwargs.items() if k not in (_STATE, _DEVICE)}, beyond


def state_bytes(device: torch.device) -> int:
    """Bytes of a generator's state in the memory of its device."""
    return CPU_GENERATOR_STATE_BYTES if device.type == "cpu" else 0


def new_state(device: torch.device) -> torch.Tensor:
    """An uninitialised tensor like a state of the device's generator."""
    size = CPU_GENERATOR_STATE_BYTES if device.type == "cpu" else _ACCELERATOR_STATE_BYTES
    return torch.empty(size, dtype=torch.uint8, device="cpu")


@cache
def _companions(op: OpOverload) -> tuple[OpOverload, OpOverload]:
    """The draw and the replay of an op; defined once per process."""
    schema = schema_of(op)
    name = f"{schema.name.replace('::', '_')}_{schema.overload_name or 'default'}"
    takes, _, gives = str(schema).partition("(")[2].rpartition(" -> ")
    takes = takes.removesuffix(")")
    if not any(argument.kwarg_only for argument in schema.arguments):
        takes = f"{takes}, *" if takes else "*"
    results = gives.removeprefix("(").removesuffix(")")
    tags = torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe
    drawing = define_op(
        f"draw_{name}", f"({takes}, str {_DEVICE}) -> ({results}, Tensor)", partial(_draw, op),
        partial(_draw_fake, op), (*tags, torch.Tag.nondeterministic_seeded))
    replaying = define_op(
        f"replay_{name}", f"({takes}, Tensor {_STATE}, str {_DEVICE}) -> {gives}",
        partial(_replay, op), partial(_replay_fake, op), tags)
    _RUNS.update({drawing: (op, False), replaying: (op, True)})
    return drawing, replaying


def _draw(op: OpOverload, *args: Any, generator_device: str, **kwargs: Any) -> tuple[Any, ...]:
    state = _state_of(torch.device(generator_device))
    return _with_state(op(*args, **kwargs), state)


def _draw_fake(op: OpOverload, *args: Any, generator_device: str, **kwargs: Any
               ) -> tuple[Any, ...]:
    return _with_state(op(*args, **kwargs), new_state(torch.device(generator_device)))


def _with_state(results: Any, state: torch.Tensor) -> tuple[Any, ...]:
    return (*results, state) if isinstance(results, tuple) else (results, state)


def _replay(op: OpOverload, *args: Any, generator_state: torch.Tensor, generator_device: str,
            **kwargs: Any) -> Any:
    device = torch.device(generator_device)
    current = _state_of(device)
    _set_state(generator_state, device)
    try:
        return op(*args, **kwargs)
    finally:
        _set_state(current, device)


def _replay_fake(op: OpOverload, *args: Any, generator_state: torch.Tensor, generator_device: str,
                 **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _state_of(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device.type).get_rng_state(device)


def _set_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)
