"""Losses that are one number in a storage of many.

Some losses of ATen write the loss of each element into a tensor, and return that tensor, shrunk to
their mean or sum: its storage is as large as before for as long as the loss lives.  Torch's fake
kernels give them a storage of one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from planner._graph_capture.torch_compat import FakeTensor, schema_of

_aten = torch.ops.aten
SHRUNK = frozenset({_aten.mse_loss.default, _aten.smooth_l1_loss.default,
                     _aten.binary_cross_entropy.default, _aten.soft_margin_loss.default})


def in_its_storage(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
                   ) -> Any:
    """The result of an op; a fake one in a storage of the size that the real one has."""
    if func not in SHRUNK or not isinstance(result, FakeTensor):
        return result
    given = dict(zip((each.name for each in schema_of(func).arguments), args, strict=False))
    given.update(kwargs)
    if given.get("reduction") == 0:
        return result
    shape = torch.broadcast_shapes(given["self"].shape, given["target"].shape)
    return result.new_empty(shape).as_strided((), ())
