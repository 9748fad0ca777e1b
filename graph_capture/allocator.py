"""What the device's allocator hands out: sizes and, for a run of real code, the peak."""

from __future__ import annotations

import torch

_CUDA_GRANULE_BYTES = 512
"""The caching allocator of CUDA rounds each request up to a multiple of this."""


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """Bytes that the allocator of `device` counts for a storage of `size_bytes`.

    The CPU's allocator is asked for the exact size; its alignment to 64 bytes is not counted.
    """
    if device.type == "cuda":
        return -(-size_bytes // _CUDA_GRANULE_BYTES) * _CUDA_GRANULE_BYTES
    return size_bytes
