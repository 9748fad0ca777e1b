"""Private names of torch that the memory account needs, each with its reason; torch 2.11 to 2.13.

Nothing else in the memory account touches a private name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

# `FakeTensor` and `FakeTensorMode` (2.11-2.13, and since 1.13) are private by module path only:
# there is no public way to trace a model without allocating its memory.
__all__ = ["FakeTensor", "FakeTensorMode", "cpu_allocations", "fake_tensor", "no_active_modes",
           "storage_key", "tensor_clone"]

# The function that a `TorchFunctionMode` sees when `Parameter.__deepcopy__` clones the data.
tensor_clone = torch._C.TensorBase.clone


def fake_tensor(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`meta`, a tensor on the meta device, posing as one on `device`; shares its storage object.

    `FakeTensorMode.from_tensor` keeps the device of the tensor that it copies, and so cannot place
    a model that is on `meta` or on another device.
    """
    return FakeTensor(mode, meta, device)


def no_active_modes() -> AbstractContextManager[object]:
    """Real ops run for real inside, whatever fake, proxy or tracing mode is active outside.

    A mode can be left only by whoever entered it, except through `_disable_current_modes`
    (2.11-2.13), which torch uses for the same purpose.
    """
    return _disable_current_modes()


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage: equal for views of one another, while it is alive.

    `data_ptr` is 0 for every fake tensor and `UntypedStorage` objects are made anew on each access
    in older versions, so the address of the C++ storage is what is left.
    """
    return tensor.untyped_storage()._cdata


def cpu_allocations(fn: Callable[[], object]) -> list[int]:
    """Bytes of each allocation (positive) and release (negative) of the CPU's allocator while `fn`
    runs, in time order; on the calling thread and on those to which torch hands its thread state.

    `torch.profiler.profile` records the same events, but spends 30 ms per session on tables that
    nobody reads here, where this takes 1 ms; it gives access to them only through private names as
    well (`kineto_results`).  The functions below are those that it is made of (2.11-2.13).
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("cannot measure allocations while a profiler is running; stop it first")
    config = torch.autograd.ProfilerConfig(
        torch.autograd.ProfilerState.KINETO, False, True, False, False, False,
        torch._C._profiler._ExperimentalConfig())
    activities = {torch.autograd.ProfilerActivity.CPU}
    with _quiet_kineto():
        torch.autograd._prepare_profiler(config, activities)
        torch.autograd._enable_profiler(config, activities)
        try:
            fn()
        finally:
            result = torch.autograd._disable_profiler()
    events = [event for event in result.events()
              if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU]
    events.sort(key=lambda event: event.start_ns())  # a stable sort: equal times stay in order
    return [event.nbytes() for event in events]


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep kineto from writing a line to stderr at each start and stop, unless the user set its
    log level."""
    variable = "KINETO_LOG_LEVEL"
    given = os.environ.get(variable)
    if given is None:
        os.environ[variable] = "99"
    try:
        yield
    finally:
        if given is None:
            del os.environ[variable]
