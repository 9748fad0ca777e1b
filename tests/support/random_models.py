"""Models drawn at random: short programs of tensor code with skips, views, in-place writes,
dropout, normalisation and attention, in no known architecture."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import Case

WIDTH = 8
Op = Callable[["RandomModel", str, Tensor, Tensor], Tensor]


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, ::2].mul_(0.5)
    y[:, 1] = x[:, 0].tanh()
    return y.relu_()


def _attention(x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (x, y, x))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _halves(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * right.sigmoid(), right], -1)


def _count(model: RandomModel, name: str, x: Tensor) -> Tensor:
    """Read a buffer, and change it afterwards."""
    steps = model.get_buffer(name)
    y = x + steps
    steps.add_(1.0)
    return y


OPS: dict[str, Op] = {
    "linear": lambda m, n, x, y: m.get_submodule(n)(x),
    "layer norm": lambda m, n, x, y: m.get_submodule(n)(x),
    # For an input that is not contiguous, torch traces other strides than it then makes.
    "batch norm": lambda m, n, x, y: m.get_submodule(n)(
        x.transpose(1, 2).contiguous()).transpose(1, 2),
    "convolution": lambda m, n, x, y: m.get_submodule(n)(x.transpose(1, 2)).transpose(1, 2),
    "count": lambda m, n, x, y: _count(m, n, x),
    "add": lambda m, n, x, y: x + y,
    "gate": lambda m, n, x, y: x * y.sigmoid(),
    "dropout": lambda m, n, x, y: F.dropout(x, 0.3),
    "noise": lambda m, n, x, y: x + 0.1 * torch.randn_like(x),
    "gelu": lambda m, n, x, y: F.gelu(x),
    "softmax": lambda m, n, x, y: x.softmax(-1),
    "in place": lambda m, n, x, y: _in_place(x),
    "attention": lambda m, n, x, y: _attention(x, y),
    "halves": lambda m, n, x, y: _halves(x),
    "flip": lambda m, n, x, y: x.flip(1) * y,
    "sort": lambda m, n, x, y: x.sort(-1).values + y,
    "topk": lambda m, n, x, y: x.topk(2, -1).values.sum(-1, keepdim=True) * y,
    "norm": lambda m, n, x, y: x / (1 + y.norm(dim=-1, keepdim=True)),
    "mean": lambda m, n, x, y: x - y.mean(1, keepdim=True),
    "detour": lambda m, n, x, y: x + y.double().exp().clamp(max=3).to(x.dtype),
    "detach": lambda m, n, x, y: x * y.detach().abs(),
    "where": lambda m, n, x, y: torch.where(x > 0, x, y * 0.1),
    "matmul": lambda m, n, x, y: (x @ y.transpose(1, 2)).tanh() @ x,
}
OF_TWO = frozenset({"add", "gate", "attention", "flip", "sort", "topk", "norm", "mean", "detour",
                    "detach", "where", "matmul"})
"""Ops that read both their operands."""
MADE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
}


class RandomModel(nn.Module):
    """`length` ops, each on one or two earlier results; unread results are summed.

    (AOTAutograd drops random ops whose results nobody reads, and with them their random numbers.)
    """

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.program: list[tuple[str, str, int, int]] = []
        self.entry = nn.Linear(WIDTH, WIDTH)
        for index in range(length):
            op = rng.choice(list(OPS))
            name = f"{op.replace(' ', '_')}_{index}"
            if op in MADE:
                self.add_module(name, MADE[op]().requires_grad_(rng.random() < 0.8))
            elif op == "count":
                self.register_buffer(name, torch.ones(WIDTH))
            recent = max(0, index - 3)
            self.program.append((op, name, rng.randint(recent, index), rng.randint(0, index)))

    def forward(self, x: Tensor) -> Tensor:
        made = [self.entry(x)]
        for op, name, first, second in self.program:
            made.append(OPS[op](self, name, made[first], made[second]))
        read = {first for _, _, first, _ in self.program} | {
            second for op, _, _, second in self.program if op in OF_TWO}
        unread = [x for position, x in enumerate(made) if position not in read]
        return torch.stack(unread).sum(0)


def random_case(seed: int, length: int = 14) -> Case:
    torch.manual_seed(seed)
    return Case(RandomModel(seed, length), (torch.randn(3, 6, WIDTH),),
                lambda out: out.square().mean())
