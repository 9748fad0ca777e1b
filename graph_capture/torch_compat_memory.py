"""Private names of torch that the memory account needs, each with its reason; torch 2.11 to 2.13.

Nothing else in the memory account touches a private name.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# `FakeTensor` and `FakeTensorMode` (2.11-2.13, and since 1.13) are private by module path only:
# there is no public way to trace a model without allocating its memory.
__all__ = ["FakeTensor", "FakeTensorMode", "fake_tensor", "storage_key", "tensor_clone"]

# The function that a `TorchFunctionMode` sees when `Parameter.__deepcopy__` clones the data.
tensor_clone = torch._C.TensorBase.clone


def fake_tensor(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`meta`, a tensor on the meta device, posing as one on `device`; shares its storage object.

    `FakeTensorMode.from_tensor` keeps the device of the tensor that it copies, and so cannot place
    a model that is on `meta` or on another device.
    """
    return FakeTensor(mode, meta, device)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage: equal for views of one another, while it is alive.

    `data_ptr` is 0 for every fake tensor and `UntypedStorage` objects are made anew on each access
    in older versions, so the address of the C++ storage is what is left.
    """
    return tensor.untyped_storage()._cdata
