"""Data-parallel settings of `planner.plan` and related functions.

`ddp` is `torch.nn.parallel.DistributedDataParallel`; `zero1` the same with
`torch.distributed.optim.ZeroRedundancyOptimizer`; `fsdp2` is `torch.distributed.fsdp.fully_shard`.
In the terms of Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models" (SC 2020), `fully_shard` is stage 3, here `zero3`, and stage 2 where it keeps the parameters
from forward to backward, here `zero2`.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

KINDS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
_REPLICATED = ("ddp", "zero1")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names of dtypes, and torch's names."""


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Data parallelism of a training run over `ranks` ranks.

    Raises `ValueError` or `TypeError` for settings that do not belong together.
    """

    kind: Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
    ranks: int
    gradient_as_bucket_view: bool = False
    """`ddp`, `zero1`: gradients are views of the buckets instead of separate copies."""
    bucket_cap_mb: float | None = None
    """`ddp`, `zero1`: size of a bucket in MiB, as in DDP; `None`: 1 for the first, then 25."""
    units: tuple[str | tuple[str, ...], ...] | None = None
    """Other kinds: names of the modules that are wrapped one by one before the whole model; a tuple
    of names is one unit, as in `fully_shard([norm, head])`.  A wildcard matches one part of a name.
    `None`: the elements of the outermost `ModuleList`s."""
    reshard_after_forward: bool | None = None
    """`fsdp2`: as for `fully_shard`; `None`: all units but the root reshard."""
    kept_units: tuple[str, ...] = ()
    """`fsdp2`: units that were wrapped with `reshard_after_forward=False`, unlike the others; of a
    unit of several modules the name of any."""
    param_dtype: str | None = None
    """`fsdp2`: `"bf16"` or `"fp16"`, as in `MixedPrecisionPolicy(param_dtype=…)`: the dtype of
    gathered parameters, of the computation, and of gradients before they are reduced."""
    reduce_dtype: str | None = None
    """`fsdp2`: dtype of reduced gradients, if different: `"fp32"`, `"bf16"`, `"fp16"`."""
    offloads: bool = False
    """`fsdp2`: shards, their gradients and the optimizer's state are in host memory
    (`CPUOffloadPolicy`), which does not count."""
    requires_gradient_sync: bool = True
    """Not `ddp`, `zero1`: each micro-batch of an accumulated step reduces its gradients.  If
    `False`, only the last one does, as with `set_requires_gradient_sync(False)` before the others
    (accelerate, Trainer), and a rank keeps whole gradients until then."""

    @property
    def is_replicated(self) -> bool:
        """True if each rank has the whole model."""
        return self.kind in _REPLICATED

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of data parallelism {self.kind!r}; known: "
                             f"{', '.join(KINDS)}")
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, numbers.Integral):
            raise TypeError(f"ranks must be a whole number, got {self.ranks!r}")
        replicated = self.is_replicated
        if self.ranks < (2 if replicated else 1):
            raise ValueError(f"ranks must be at least 2, got {self.ranks}; one rank is what "
                             "planner.plan plans")
        if not replicated and (self.gradient_as_bucket_view or self.bucket_cap_mb is not None):
            raise ValueError(f"{self.kind} has no buckets; gradient_as_bucket_view and "
                             "bucket_cap_mb are settings of ddp and zero1")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be above 0, got {self.bucket_cap_mb}")
        if replicated and self.units is not None:
            raise ValueError(f"{self.kind} wraps the whole model; units are a setting of zero2, "
                             "zero3 and fsdp2")
        for name in ("units", "kept_units"):
            if isinstance(given := getattr(self, name), str):
                raise TypeError(f"{name} must be a tuple of names, got {given!r}; for one write "
                                f"{name}=({given!r},)")
        if replicated and not self.requires_gradient_sync:
            raise ValueError(f"requires_gradient_sync is a setting of zero2, zero3 and fsdp2; "
                             f"gradients of {self.kind} are whole in every micro-batch")
        if self.kind != "fsdp2" and (self.reshard_after_forward is not None or self.kept_units):
            raise ValueError("reshard_after_forward and kept_units are settings of fsdp2; zero3 "
                             "reshards, zero2 does not")
        if self.kind != "fsdp2" and (self.param_dtype or self.reduce_dtype or self.offloads):
            raise ValueError("param_dtype, reduce_dtype and offloads are settings of fsdp2")
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, *DTYPES):
                raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, got "
                                 f"{getattr(self, name)!r}")


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype of a short name, or of torch's own; `None` for `None`."""
    if name is None:
        return None
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES.get(name, name))
    return dtype


def check_parallel(parallel: object) -> DataParallel:
    """Return `parallel`; raises `TypeError` if it is not a `DataParallel`."""
    if not isinstance(parallel, DataParallel):
        raise TypeError("parallel must be a planner.DataParallel, such as "
                        f"DataParallel('ddp', ranks=8), got {type(parallel).__name__}")
    return parallel
