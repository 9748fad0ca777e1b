"""A stream of batches of random shapes under `planner.within`: plans made, seconds spent planning,
and the worst peak beside the budget.

    python -m benchmarks.stream --batches 200

Batch and sequence length vary from step to step; the budget is a part of the plain peak of the
largest shape that can come.  Seconds are the processor's, which other work on the machine hardly
changes.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import warnings

import torch
from torch import nn

import planner
from graph_capture.memory.allocator import record_stages
from planner.attached.forward import PlanningForward

_VOCABULARY = 256


class _Model(nn.Module):
    """An embedding, blocks of two layers, and a loss."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width)) for _ in range(blocks))
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _train(model: nn.Module, shapes: list[tuple[int, int]]) -> tuple[list[int], list[float]]:
    """Peaks above parameters and inputs, and CPU seconds, of each step."""
    optimizer = torch.optim.AdamW(model.parameters())
    seconds: list[float] = []

    def step(shape: tuple[int, int]) -> None:
        started = time.process_time()
        model(torch.randint(_VOCABULARY, shape)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - started)

    records = record_stages([lambda shape=shape: step(shape) for shape in shapes])
    return [record.peak_bytes for record in records], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--largest", type=int, nargs=2, default=(16, 48), metavar=("BATCH", "SEQ"))
    parser.add_argument("--share", type=float, default=0.75, help="of the largest plain peak")
    options = parser.parse_args()
    draw = random.Random(0)
    batch, seq = options.largest
    shapes = [(draw.randint(2, batch), draw.randint(2, seq)) for _ in range(options.batches)]
    plain, _ = _train(_Model(), [(batch, seq)] * 2)
    model = _Model()
    resident = sum(p.nbytes for p in model.parameters())
    budget = int(options.share * (resident + max(plain)))
    planner.within(model, budget, time_limit=2)

    planning = 0.0
    make, renew = PlanningForward._new_graph, PlanningForward._bring_up_to_date

    def timed(function):
        def run(*args):
            nonlocal planning
            started = time.process_time()
            try:
                return function(*args)
            finally:
                planning += time.process_time() - started
        return run

    PlanningForward._new_graph, PlanningForward._bring_up_to_date = timed(make), timed(renew)
    warnings.simplefilter("ignore")
    peaks, seconds = _train(model, shapes)
    gc.collect()
    standing = vars(model)["forward"]
    print(f"batches {len(shapes)}, distinct shapes {len(set(shapes))}")
    print(f"graphs planned {len(standing.graphs)}, steps under a plan {standing.steps.planned}")
    print(f"CPU seconds in all {sum(seconds):.0f}, planning {planning:.0f}, "
          f"in the last half {sum(seconds[len(seconds) // 2:]):.0f}")
    print(f"worst peak {(resident + max(peaks)) / budget:.3f} of the budget, which is "
          f"{options.share:.2f} of the plain peak of the largest shape")


if __name__ == "__main__":
    main()
