"""Inputs described in text: `NAME:DTYPE[SHAPE]`, e.g. `pixel_values:float32[8,3,224,224]`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.cli.failures import TargetError, UsageError

if TYPE_CHECKING:
    import torch

_MOST_BYTES = 2**62
"""More than any machine has; beyond this torch cannot count the elements."""

_VARIANT = re.compile(r"([A-Za-z_]\w*):(\w+)\[([\d,\s]*)\]")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of an input, and for integers the range of its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    below: int = 2
    """Integers are drawn from 0 to below this."""

    def make(self, device: str) -> torch.Tensor:
        """Create the tensor: on `meta` without values, elsewhere with random ones from a fixed
        seed.

        The process's random state is not changed.
        """
        import torch

        size_bytes = math.prod(self.shape) * self.dtype.itemsize
        if size_bytes > _MOST_BYTES:
            raise UsageError(f"{self.name} of shape {list(self.shape)} would have {size_bytes:,} "
                             "bytes; give smaller sizes")
        if device == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        source = torch.Generator().manual_seed(0)
        try:
            if self.dtype.is_floating_point or self.dtype.is_complex:
                values = torch.randn(self.shape, generator=source)
            else:
                values = torch.randint(0, self.below, self.shape, generator=source)
            return values.to(device=device, dtype=self.dtype)
        except RuntimeError as error:  # mostly out of memory
            raise TargetError(f"{self.name} of shape {list(self.shape)} cannot be made on "
                              f"{device}: {error}") from None


def parse_inputs(texts: Iterable[str]) -> dict[str, TensorSpec]:
    """Specs by name; raises `UsageError` for a malformed text."""
    return {spec.name: spec for spec in map(_parse, texts)}


def _parse(text: str) -> TensorSpec:
    import torch

    match = _VARIANT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--input must be NAME:DTYPE[SHAPE], such as input_ids:int64[8,512], "
                         f"got {text!r}")
    name, dtype_name, sizes = match.groups()
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input {text!r}: {dtype_name!r} is no dtype; write float32, bfloat16, "
                         "int64 or bool, for example")
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    return TensorSpec(name, dtype, shape)
