"""The planner against torch's own `activation_memory_budget`, at the memory that torch reaches.

    python -m benchmarks.against_torch --model gpt2,bert,unet --time-limit 30

For each budget of `torch._functorch.config.activation_memory_budget` (a ratio, from 1.0: save all
that the min-cut would, to 0.0: recompute everything) torch partitions the joint graph by
`min_cut_rematerialization_partition`; the graphs run op by op, boxed, without decompositions, as
the planner's do.  The peak of that step is measured and given to the planner as its budget, once to
find the least FLOPs (torch's own objective) and once the least estimated time (the planner's own).
Both sides count what they compute again with the same formulas.

The model returns nothing but its loss: the logits of a Hugging Face model would otherwise be held
to the end of the step, and torch would compute with the zeros that are their gradient.

Where torch recomputes a batch normalization that tracks running statistics, its backward fails
("modified by an inplace operation"); the U-Net is therefore compared without that tracking, which
costs either side nothing.

Gradients are compared with those of `torch.compile(model, backend="eager")` in a second step after
the same seed.  torch does not replay random numbers here, so that with dropout its gradients are
wrong as soon as it recomputes one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload

from apply.plan_backend import boxed_callable
from benchmarks.arguments import add_numbers, benchmark_parser, parse
from benchmarks.measure import (
    MEGABYTE,
    gradients,
    peak_bytes,
    plan_or_smallest,
    relative_error,
)
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table
from graph_capture.op_costs.costs import OpCosts
from graph_capture.torch_compat import aot_backend, compile_module, compile_settings
from planner.search.planning import Effort, plan_within
from planner.step.prepared import PreparedStep

RATIOS = tuple(tenths / 10 for tenths in range(10, -1, -1))
"""Values of `activation_memory_budget`."""


class LossOnly(nn.Module):
    """A model that returns its loss and drops its other outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.model(**inputs).loss


def returning_loss_only(workload: Workload) -> Workload:
    """The workload with a scalar output, where the model makes the loss."""
    if workload.loss_fn is not None:
        return workload
    return replace(workload, model=LossOnly(workload.model))


def without_running_statistics(workload: Workload) -> bool:
    """Let batch normalizations normalize with the batch and track nothing; whether there are any.
    """
    found = False
    for module in workload.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
            found = True
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """What a graph computes."""

    flops: int
    seconds: float
    """Estimated, by the planner's table of the CPU."""

    def __sub__(self, other: Work) -> Work:
        return Work(self.flops - other.flops, self.seconds - other.seconds)

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.seconds + other.seconds)


class TorchPartition:
    """torch's partitioner as a backend, with a count of what its graphs compute again."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._recomputed: list[Work] = []

    @property
    def recomputed(self) -> Work:
        """Work of forward and backward beyond that of the joint graph."""
        if len(self._recomputed) != 1:
            raise RuntimeError(f"expected one graph, torch partitioned {len(self._recomputed)}")
        return self._recomputed[0]

    def compiled(self, model: nn.Module) -> Callable[..., Any]:
        """The model under this partition."""
        return compile_module(model, aot_backend(self._partition, _compile, _compile))

    def _partition(self, joint: fx.GraphModule, joint_inputs: object, **options: Any
                   ) -> tuple[fx.GraphModule, fx.GraphModule]:
        plain = graph_work(_without_duplicates(joint))
        with functorch_config.patch(activation_memory_budget=self._ratio):
            forward, backward = min_cut_rematerialization_partition(
                joint, joint_inputs, compiler="inductor", **options)
        self._recomputed.append(graph_work(forward.graph) + graph_work(backward.graph) - plain)
        return forward, backward


class Compiled(nn.Module):
    """A module whose call is a compiled function of `model`; parameters are the model's."""

    def __init__(self, model: nn.Module, call: Callable[..., Any],
                 settings: Callable[[], AbstractContextManager[None]] = compile_settings) -> None:
        super().__init__()
        self.model = model
        self._call, self._settings = call, settings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._settings():
            return self._call(*args, **kwargs)


def graph_work(graph: fx.Graph) -> Work:
    """Work of all ops of a graph, by the shapes that tracing left in it."""
    costs = OpCosts(torch.device("cpu"), probe=False)
    flops, seconds = 0, 0.0
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        cost = costs(node)
        flops += cost.flops
        seconds += cost.seconds
    return Work(flops, seconds)


def _without_duplicates(joint: fx.GraphModule) -> fx.Graph:
    graph = fx_graph_cse(joint.graph)
    graph.eliminate_dead_code()
    return graph


def _compile(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
    return boxed_callable(graph)


@dataclass(frozen=True, slots=True)
class Measured:
    """A step that recomputes, and ran."""

    peak_bytes: int
    """Above resident memory, as all peaks here."""
    recompute_flops: int
    overhead: float
    """Estimated extra time, as a fraction of the step."""
    gradient_error: float
    status: str = ""
    """Of a plan."""

    @property
    def figures(self) -> tuple[float, float, float]:
        """As the table shows them."""
        return self.peak_bytes / MEGABYTE, self.recompute_flops / 1e6, 100 * self.overhead


@dataclass(frozen=True, slots=True)
class Row:
    """torch's partition at one ratio, and two plans at its peak."""

    ratio: float
    torch: Measured
    least_flops: Measured
    least_time: Measured

    @property
    def won(self) -> bool:
        """Whether, within the same memory, one plan recomputes no more FLOPs and the other takes
        no more estimated time."""
        return (max(self.least_flops.peak_bytes, self.least_time.peak_bytes)
                <= self.torch.peak_bytes
                and self.least_flops.recompute_flops <= self.torch.recompute_flops
                and self.least_time.overhead <= self.torch.overhead)

    @property
    def cells(self) -> tuple[object, ...]:
        """What the table shows."""
        flops, time = self.least_flops, self.least_time
        return (self.ratio, *self.torch.figures, self.torch.gradient_error, *flops.figures,
                flops.status, *time.figures, time.status,
                max(flops.gradient_error, time.gradient_error), "yes" if self.won else "NO")


def for_least_flops(prepared: PreparedStep) -> PreparedStep:
    """The same step, planned for the least FLOPs; time only decides between equals."""
    problem, graph = prepared.base.problem, prepared.base.graph
    per_second = graph.step_flops / graph.step_seconds
    base = replace(prepared.base, problem=replace(problem, ops=tuple(
        replace(op, cost=captured.flops / per_second + captured.seconds / 1000)
        for op, captured in zip(problem.ops, graph.ops, strict=True))))
    return replace(prepared, forms=(base, *prepared.forms[1:]))


def plan_at(workload: Workload, prepared: PreparedStep, peak: int, expected: torch.Tensor,
            time_limit: float) -> Measured:
    """The plan under a budget of `peak` above resident memory, applied and measured."""
    plan = plan_within(prepared, prepared.resident_bytes + peak, Effort(time_limit=time_limit))
    model = plan.apply(workload.model)
    return Measured(peak_bytes(workload, model), plan.recompute_flops, plan.overhead,
                    relative_error(gradients(workload, model), expected), plan.status)


def compare(workload: Workload, prepared: PreparedStep, ratio: float, expected: torch.Tensor,
            time_limit: float, known: Row | None) -> Row:
    """torch at one ratio, and plans at the peak measured there.

    `known`: the row before, whose plans serve again where torch reaches the same peak.
    """
    partition = TorchPartition(ratio)
    theirs = Compiled(workload.model, partition.compiled(workload.model))
    peak = peak_bytes(workload, theirs)
    if known is not None and known.torch.peak_bytes == peak:
        least_flops, least_time = known.least_flops, known.least_time
    else:
        least_flops, least_time = (
            plan_at(workload, step, peak, expected, time_limit)
            for step in (for_least_flops(prepared), prepared))
    recomputed = partition.recomputed
    return Row(ratio, Measured(
        peak, recomputed.flops, recomputed.seconds / prepared.base.graph.step_seconds,
        relative_error(gradients(workload, theirs), expected)), least_flops, least_time)


def run(workload: Workload, ratios: Sequence[float], time_limit: float) -> bool:
    """Print the table of one model; whether the planner wins every row and the minimum."""
    workload = returning_loss_only(workload)
    if without_running_statistics(workload):
        print(f"\n{workload.name}: compared without running statistics")
    with compile_settings():
        reference = Compiled(workload.model, compile_module(workload.model, "eager"))
        expected = gradients(workload, reference)
    plain_peak = peak_bytes(workload, workload.model)
    prepared = workload.prepare()
    print(f"\n{workload.name}: {len(prepared.base.graph.ops)} ops, "
          f"{prepared.base.graph.step_flops / 1e6:.0f} MFLOP, "
          f"plain eager step {plain_peak / MEGABYTE:.2f} MB, nothing recomputed "
          f"{(prepared.keep_all_peak_bytes - prepared.resident_bytes) / MEGABYTE:.2f} MB; torch, "
          "then plans for the least FLOPs and the least time", flush=True)
    plan = ("peak MB:8.2f", "MFLOP:8.1f", "time %:6.2f", "status:8")
    table = Table("ratio:.2g", *plan[:3], "grad:7.1e", *plan, *plan, "grad:7.1e", "better")
    rows: list[Row] = []
    for ratio in ratios:
        rows.append(compare(workload, prepared, ratio, expected, time_limit,
                            rows[-1] if rows else None))
        table.row(*rows[-1].cells)
    lowest = min(row.torch.peak_bytes for row in rows)
    smallest = plan_or_smallest(prepared, prepared.resident_bytes, time_limit)
    minimum = smallest.peak_bytes - prepared.resident_bytes
    print(f"smallest peak: torch {lowest / MEGABYTE:.2f} MB, ours {minimum / MEGABYTE:.2f} MB "
          f"({minimum / lowest:.2f} of it)")
    return all(row.won for row in rows) and minimum < lowest


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where torch wins anywhere."""
    parser = benchmark_parser("against_torch", __doc__, models=("gpt2", "bert", "unet"),
                              threads=2, time_limit=30.0)
    add_numbers(parser, "--ratios", RATIOS, "values of activation_memory_budget")
    parser.add_argument("--dropout", type=float,
                        help="probability in GPT-2, BERT and T5; by default the published one")
    arguments = parse(parser, argv)
    won = True
    for name in arguments.model:
        options = {} if arguments.dropout is None else {"dropout": arguments.dropout}
        won &= run(WORKLOADS[name](**options), arguments.ratios, arguments.time_limit)
    return 0 if won else 1


if __name__ == "__main__":
    sys.exit(main())
