"""`Tensor.tolist` value by value: the original reads memory, which no dispatch mode sees."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

_MOST_VALUES = 1_000
_original = torch.Tensor.tolist


def listed_by_items() -> AbstractContextManager[object]:
    """Inside, `tolist` asks for each value as `item` does."""
    return mock.patch.object(torch.Tensor, "tolist", _to_list)


def _to_list(tensor: torch.Tensor) -> Any:
    if tensor.numel() > _MOST_VALUES:
        return _original(tensor)
    return [_to_list(row) for row in tensor.unbind()] if tensor.dim() else tensor.item()
