"""What a call of a model changes beside gradients: random state and buffers.

Blind spots: what else the model's code changes (a counter of its own); generators of the user's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def remembered_state(model: nn.Module) -> Callable[[], None]:
    """A function that puts random state and buffers back to what they are now."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    cpu = torch.get_rng_state()
    gpus = [(device, torch.cuda.get_rng_state(device)) for device in
            {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}]

    def restore() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.set_rng_state(cpu)
        for device, state in gpus:
            torch.cuda.set_rng_state(state, device)

    return restore
