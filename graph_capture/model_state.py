"""State that a call of a model changes in addition to gradients: random state and buffers.

Blind spots: other state that the model's code changes (a counter of its own); generators of the
user's.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import torch
from torch import nn


def remembered_state(model: nn.Module) -> Callable[[], None]:
    """A function that restores the current random state and buffers."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    restore_random = remembered_random_state(model)

    def restore() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        restore_random()

    return restore


def remembered_random_state(model: nn.Module) -> Callable[[], None]:
    """A function that restores the current random state of Python, NumPy and torch."""
    python, numpy_state = random.getstate(), numpy.random.get_state()
    cpu = torch.get_rng_state().numpy().copy()  # not a tensor: that would count as the loop's
    gpus = [(device, torch.cuda.get_rng_state(device)) for device in
            {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}]

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch.from_numpy(cpu))
        for device, state in gpus:
            torch.cuda.set_rng_state(state, device)

    return restore
