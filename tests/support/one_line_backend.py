"""Models compiled with the backend `checkpoint_planner`, named as an installed package names it."""

import torch
from torch import nn

from planner.torch_compile_backend import checkpoint_planner


def register() -> None:
    """Put the entry point of an installed package into torch's registry."""
    from torch._dynamo.backends import registry

    if "checkpoint_planner" not in torch._dynamo.list_backends(exclude_tags=None):
        registry.register_backend(checkpoint_planner)


QUICKLY = {"inductor": False, "time_limit": 1.5}
"""Options for quick planning."""


def compiled(model, dynamic=None, **options):
    return torch.compile(model, backend="checkpoint_planner", dynamic=dynamic,
                         options={**QUICKLY, **options})


class BreakingLayer(nn.Module):
    """Dynamo breaks its graph within, and runs the same parts for each layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.second(x))
