"""Random ops that give the same numbers again.

The first run notes the state of the device's default generator; a replay runs under that state
and then puts back the one it found, so that the random numbers are those of the original step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


@fx.has_side_effect
def run_random(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`op(*args, **kwargs)`, and never dead code: even where only replays of it are read, the
    generator must move on as in the original step."""
    return op(*args, **kwargs)


def generator_state(device_type: str, device_index: int | None) -> torch.Tensor:
    """The state of the device's default generator, as a tensor in host memory."""
    if device_type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device_type).get_rng_state(_index(device_type, device_index))


def replay_random(
    state: torch.Tensor, device_type: str, device_index: int | None,
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:
    """`op(*args, **kwargs)` under `state`; the generator is left as it was found."""
    current = generator_state(device_type, device_index)
    _set_state(state, device_type, device_index)
    try:
        return op(*args, **kwargs)
    finally:
        _set_state(current, device_type, device_index)


def _set_state(state: torch.Tensor, device_type: str, device_index: int | None) -> None:
    if device_type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device_type).set_rng_state(
            state, _index(device_type, device_index))


def _index(device_type: str, device_index: int | None) -> int:
    if device_index is not None:
        return device_index
    return int(torch.get_device_module(device_type).current_device())
