"""A model with a loss head that can run in chunks, and the results and memory of its steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from planner._graph_capture.memory.allocator import record_peak

ALLOW = ("recompute", "chunk")
VOCAB, WIDTH, BATCH, LENGTH = 700, 24, 3, 11

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

LOSSES: dict[str, Loss] = {
    "mean": lambda logits, labels, weight: F.cross_entropy(logits, labels),
    "weighted": lambda logits, labels, weight: F.cross_entropy(logits, labels, weight),
    "smooth": lambda logits, labels, weight: F.cross_entropy(logits, labels, label_smoothing=0.1),
    "sum": lambda logits, labels, weight: F.cross_entropy(logits, labels, reduction="sum") / 29,
    "each": lambda logits, labels, weight: F.cross_entropy(
        logits, labels, reduction="none").sum() / (labels != -100).sum(),
    "z-loss": lambda logits, labels, weight: F.cross_entropy(logits, labels)
    + 1e-3 * logits.logsumexp(-1).pow(2).mean(),
    "gather": lambda logits, labels, weight: -(
        logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
        * (labels != -100)).sum() / 20,
}


class Head(nn.Module):
    """Tokens to a loss, and the logits."""

    def __init__(self, loss: str = "mean", bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)
        self.register_buffer("weight", torch.rand(VOCAB))
        self.loss = LOSSES[loss]

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.drop(self.mix(self.embed(ids)).tanh()))
        return {"loss": self.loss(logits.view(-1, VOCAB), labels.view(-1), self.weight),
                "logits": logits}


class HeadBehindBlocks(Head):
    """With two equal modules that `regions="blocks"` compiles one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(VOCAB, (BATCH, LENGTH))
    labels = ids.clone()
    labels[:, ::4] = -100
    return {"ids": ids, "labels": labels}


def gradients(model: nn.Module, inputs: dict[str, torch.Tensor], scale: float = 1.0
              ) -> torch.Tensor:
    torch.manual_seed(2)
    model.zero_grad(set_to_none=True)
    (model(**inputs)["loss"] * scale).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def peak_of(model: nn.Module, inputs: dict[str, torch.Tensor], *, held: bool) -> int:
    def step() -> None:
        output = model(**inputs)
        loss = output["loss"]
        if not held:
            del output
        loss.backward()

    model.zero_grad(set_to_none=True)
    step()
    model.zero_grad(set_to_none=True)
    return record_peak(step, "cpu").peak_bytes
