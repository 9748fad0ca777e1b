"""A model and its inputs in any batch, for searches of the largest one."""

import torch
from torch import nn


class Net(nn.Module):
    """Layers with a skip; refuses batches for which `refuses` returns true."""

    def __init__(self, width=32, layers=4, refuses=lambda batch: False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.refuses = refuses

    def forward(self, x):
        if self.refuses(x.shape[0]):
            raise ValueError(f"no batches of {x.shape[0]}")
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).exp()
        return x


def mean_square(output):
    return output.square().mean()


def make_inputs(batch):
    return torch.empty(batch, 32, device="meta")
