"""How much deeper a model can be in the memory of a plain step: with a plan, and with one that may
run parts in pieces.

    python -m benchmarks.deeper --model mlp,gpt2,resnet --times 2,4,6,8,10 --rounds 5

What counts is what a step takes beside what is resident: parameters, buffers, inputs, and the
gradients that micro-steps add to, which grow with the depth whatever is done.  The budget of the
deep model is its own resident memory and as much beside it as the plain step of the shallow one
takes.  Times are those of micro-steps in turns in one process, as medians of the ratio to the plain
step of the same deep model, which takes the memory that the last column but one says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.arguments import add_names, add_numbers, benchmark_parser, parse
from benchmarks.measure import MEGABYTE, time_in_turns
from benchmarks.models import Workload, gpt2, resnet
from benchmarks.table import Table
from graph_capture.memory.allocator import record_peak
from graph_capture.plain_step.loss import objective
from planner.errors import InfeasibleBudget
from planner.search.effort import Effort
from planner.search.planning import plan_within

MICRO_STEPS = 2
"""More than one: gradients are there before the step."""


class ResidualMlp(nn.Module):
    """Blocks of LayerNorm, Linear, GELU, Linear and Dropout, four times as wide inside, each added
    to its input: what stands between the attentions of a transformer, or in an MLP-Mixer."""

    def __init__(self, blocks: int, width: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width), nn.Dropout(0.1)) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (rows, classes)."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def residual_mlp(blocks: int, *, rows: int = 4096, width: int = 256) -> Workload:
    """The model, and a batch for it."""
    torch.manual_seed(0)
    wanted = torch.arange(rows) % 10
    return Workload("mlp", ResidualMlp(blocks, width, 10).train(), (torch.randn(rows, width),),
                    lambda logits: F.cross_entropy(logits, wanted))


MODELS: Mapping[str, tuple[Callable[[int], Workload], int]] = MappingProxyType({
    "mlp": (residual_mlp, 4),
    "gpt2": (lambda layers: gpt2(layers=layers, batch=4, sequence=256), 4),
    "resnet": (lambda times: resnet(times=times), 1)})
"""By name: the model of a depth, and the depth of the shallow one."""
ALLOWED: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "recompute": ("recompute",), "chunk": ("recompute", "chunk")})


def micro_step(workload: Workload, model: nn.Module) -> None:
    """Forward and backward; gradients add up, and the output is held to the end."""
    output = workload.call(model)
    objective(output, workload.loss_fn).backward()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser("deeper", __doc__, models=tuple(MODELS), known=tuple(MODELS),
                              rounds=5, threads=1, time_limit=60.0)
    add_numbers(parser, "--times", (2, 4, 6, 8, 10), "how many times as deep")
    add_names(parser, "--allow", tuple(ALLOWED))
    options = parse(parser, arguments)
    table = Table("model:6", "times:d", "allow:9", "net MB:.2f", "predicted:.2f", "measured:.2f",
                  "extra:.2%", "bound:.2%", "plain MB:.2f", "time:>19")
    for name in options.model:
        make, shallow = MODELS[name]
        step = make(shallow).prepare(accumulation=MICRO_STEPS)
        net_bytes = step.baseline_peak_bytes - step.budget.resident_bytes
        for times in map(int, options.times):
            workload = make(shallow * times)
            for allow in options.allow:
                row(table, workload, times, allow, net_bytes, options)
    return 0


def row(table: Table, workload: Workload, times: int, allow: str, net_bytes: int,
        options: object) -> None:
    """Plan, apply and measure one deep model, and print it."""
    step = workload.prepare(accumulation=MICRO_STEPS, allow=ALLOWED[allow])
    resident_bytes = step.budget.resident_bytes
    plain = (step.baseline_peak_bytes - resident_bytes) / MEGABYTE
    try:
        plan = plan_within(step, resident_bytes + net_bytes, Effort(time_limit=options.time_limit))
    except InfeasibleBudget as refusal:
        least = (refusal.minimum_bytes - resident_bytes) / MEGABYTE
        print(f"{workload.name} {times} times as deep ({allow}): at least {least:.2f} MB")
        return
    models = (workload.model, plan.apply(workload.model))
    ratio = ""
    if options.rounds:
        ratio = time_in_turns([partial(micro_step, workload, model) for model in models],
                              options.rounds).ratio(1, 0)
    else:
        micro_step(workload, models[1])
    measured = record_peak(lambda: micro_step(workload, models[1]), "cpu").peak_bytes
    table.row(workload.name, times, allow, net_bytes / MEGABYTE,
              (plan.peak_bytes - resident_bytes) / MEGABYTE, measured / MEGABYTE,
              plan.overhead, plan.overhead_bound, plain, ratio)


if __name__ == "__main__":
    sys.exit(main())
