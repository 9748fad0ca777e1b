"""torch's optimizers on tensors that replace the user's."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from unittest import mock

import torch
from torch.optim import optimizer
from torch.optim.optimizer import _get_capturable_supported_devices

_CHECK = "_get_capturable_supported_devices"
_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


@contextlib.contextmanager
def optimizers_as_on(device: torch.device) -> Iterator[None]:
    """Inside, optimizers set to `capturable` accept any tensors as if on `device`."""
    supported = _get_capturable_supported_devices()
    with contextlib.ExitStack() as stack:
        if device.type in supported:
            for name in [name for name in sys.modules if name.startswith("torch.optim.")]:
                if hasattr(sys.modules[name], _CHECK):
                    stack.enter_context(mock.patch.object(
                        sys.modules[name], _CHECK,
                        lambda supports_xla=True: [*supported, "cpu", "meta"]))
        yield


@contextlib.contextmanager
def without_hooks_of_all_optimizers() -> Iterator[None]:
    """Inside, hooks that are registered for every optimizer are not called."""
    with contextlib.ExitStack() as stack:
        for name in _HOOKS:
            if hasattr(optimizer, name):
                stack.enter_context(mock.patch.object(optimizer, name, OrderedDict()))
        yield
