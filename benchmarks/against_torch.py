"""The planner against torch's own `activation_memory_budget`, at the memory that torch reaches.

    python -m benchmarks.against_torch --model gpt2,bert,unet --time-limit 30

For each budget of `torch._functorch.config.activation_memory_budget` (a ratio, from 1.0: save all
that the min-cut would, to 0.0: recompute everything) torch partitions the joint graph by
`min_cut_rematerialization_partition`; the graphs run op by op, boxed, without decompositions, as
the planner's do.  The peak of that step is measured and given to the planner as its budget.  Both
then count what they compute again with the same FLOP formulas.

The model returns nothing but its loss: the logits of a Hugging Face model would otherwise be held
to the end of the step, and torch would compute with the zeros that are their gradient.

Gradients are compared with those of `torch.compile(model, backend="eager")` in a second step after
the same seed.  torch does not replay random numbers here, so that with dropout its gradients are
wrong as soon as it recomputes one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload

from apply.runtime import boxed_callable
from benchmarks.measure import MEGABYTE, gradients, peak_bytes, relative_error
from benchmarks.models import WORKLOADS, Workload
from graph_capture.flops import op_flops
from graph_capture.torch_compat import aot_backend, compile_module, compile_settings
from planner.api import capture
from planner.errors import InfeasibleBudget
from planner.planning import Effort, PreparedStep, plan_within

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


@dataclass
class TorchPartition:
    """torch's partitioner as a backend, with a count of what its graphs compute."""

    ratio: float
    recompute_flops: int = 0
    """FLOPs of forward and backward beyond those of the joint graph."""
    seen: int = field(default=0)
    """Number of partitioned graphs."""

    def compiled(self, model: nn.Module) -> Callable[..., Any]:
        """The model under this partition."""
        return compile_module(model, aot_backend(self._partition, _compile, _compile))

    def _partition(self, joint: fx.GraphModule, joint_inputs: object, **options: Any
                   ) -> tuple[fx.GraphModule, fx.GraphModule]:
        plain = graph_flops(_without_duplicates(joint))
        with functorch_config.patch(activation_memory_budget=self.ratio):
            forward, backward = min_cut_rematerialization_partition(
                joint, joint_inputs, compiler="inductor", **options)
        self.recompute_flops += graph_flops(forward.graph) + graph_flops(backward.graph) - plain
        self.seen += 1
        return forward, backward


class Compiled(nn.Module):
    """A module whose call is a compiled function of `model`; parameters are the model's."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with compile_settings():
            return self._call(*args, **kwargs)


def graph_flops(graph: fx.Graph) -> int:
    """FLOPs of all ops of a graph, by the shapes that tracing left in it."""
    total = 0
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            args = fx.map_arg(node.args, lambda source: source.meta.get("val"))
            kwargs = fx.map_arg(dict(node.kwargs), lambda source: source.meta.get("val"))
            total += op_flops(node.target, args, kwargs, node.meta.get("val"))
    return total


def _without_duplicates(joint: fx.GraphModule) -> fx.Graph:
    graph = fx_graph_cse(joint.graph)
    graph.eliminate_dead_code()
    return graph


def _compile(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
    return boxed_callable(graph)


@dataclass(frozen=True, slots=True)
class Row:
    """torch's partition at one ratio, and the plan at its peak."""

    ratio: float
    torch_peak_bytes: int
    """Above resident memory, as all peaks here."""
    torch_recompute_flops: int
    torch_gradient_error: float
    peak_bytes: int | None
    """Measured; `None`: no plan at this budget."""
    recompute_flops: int
    gradient_error: float
    overhead: float
    bound: float
    status: str

    @property
    def won(self) -> bool:
        """Whether the plan recomputes no more FLOPs within the same memory."""
        return (self.peak_bytes is not None and self.peak_bytes <= self.torch_peak_bytes
                and self.recompute_flops <= self.torch_recompute_flops)


HEADER = (f"| {'torch':>5} | {'peak MB':>8} | {'MFLOP':>8} | {'grad error':>10} | {'ours: MB':>8} | "
          f"{'MFLOP':>8} | {'grad error':>10} | {'time %':>6} | {'bound %':>7} | {'status':<8} | "
          "fewer |\n"
          f"|{'-' * 6}:|{'-' * 9}:|{'-' * 9}:|{'-' * 11}:|{'-' * 9}:|{'-' * 9}:|{'-' * 11}:|"
          f"{'-' * 7}:|{'-' * 8}:|{'-' * 10}|-------|")


def line(row: Row) -> str:
    """A row of the table."""
    ours = "none" if row.peak_bytes is None else f"{row.peak_bytes / MEGABYTE:.2f}"
    return (f"| {row.ratio:>5.2g} | {row.torch_peak_bytes / MEGABYTE:>8.2f} | "
            f"{row.torch_recompute_flops / 1e6:>8.1f} | {row.torch_gradient_error:>10.1e} | "
            f"{ours:>8} | {row.recompute_flops / 1e6:>8.1f} | {row.gradient_error:>10.1e} | "
            f"{100 * row.overhead:>6.2f} | {100 * row.bound:>7.2f} | {row.status:<8} | "
            f"{'yes' if row.won else 'NO':<5} |")


def compare(workload: Workload, prepared: PreparedStep, ratio: float, expected: torch.Tensor,
            time_limit: float) -> Row:
    """torch at one ratio, and a plan at the peak measured there."""
    partition = TorchPartition(ratio)
    theirs = Compiled(workload.model, partition.compiled(workload.model))
    peak = peak_bytes(workload, theirs)
    if partition.seen != 1:
        raise RuntimeError(f"expected one graph, torch partitioned {partition.seen}")
    error = relative_error(gradients(workload, theirs), expected)
    try:
        plan = plan_within(prepared, prepared.resident_bytes + peak, Effort(time_limit=time_limit))
    except InfeasibleBudget:
        return Row(ratio, peak, partition.recompute_flops, error, None, 0, 0.0, 0.0, 0.0, "none")
    ours = plan.apply(workload.model)
    return Row(ratio, peak, partition.recompute_flops, error,
               peak_bytes(workload, ours), plan.recompute_flops,
               relative_error(gradients(workload, ours), expected),
               plan.overhead, plan.overhead_bound, plan.status)


def minimum_bytes(prepared: PreparedStep, time_limit: float) -> int:
    """The smallest peak that the planner meets, above resident memory."""
    try:
        plan = plan_within(prepared, prepared.resident_bytes, Effort(time_limit=time_limit))
    except InfeasibleBudget as refusal:
        return refusal.minimum_bytes - prepared.resident_bytes
    return plan.peak_bytes - prepared.resident_bytes


def run(workload: Workload, ratios: Sequence[float], time_limit: float) -> bool:
    """Print the table of one model; whether the planner wins every row and the minimum."""
    workload = returning_loss_only(workload)
    with compile_settings():
        reference = Compiled(workload.model, compile_module(workload.model, "eager"))
        expected = gradients(workload, reference)
    plain_peak = peak_bytes(workload, workload.model)
    prepared = capture(workload.model, workload.inputs, loss_fn=workload.loss_fn)
    print(f"\n{workload.name}: {len(prepared.graph.ops)} ops, "
          f"{prepared.graph.step_flops / 1e6:.0f} MFLOP, plain eager step {plain_peak / MEGABYTE:.2f} "
          f"MB, nothing recomputed "
          f"{(prepared.keep_all_peak_bytes - prepared.resident_bytes) / MEGABYTE:.2f} MB\n{HEADER}",
          flush=True)
    rows = []
    for ratio in ratios:
        rows.append(compare(workload, prepared, ratio, expected, time_limit))
        print(line(rows[-1]), flush=True)
    lowest = min(row.torch_peak_bytes for row in rows)
    minimum = minimum_bytes(prepared, time_limit)
    print(f"smallest peak: torch {lowest / MEGABYTE:.2f} MB, ours {minimum / MEGABYTE:.2f} MB "
          f"({minimum / lowest:.2f} of it)")
    return all(row.won for row in rows) and minimum < lowest


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where torch wins anywhere."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_torch",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gpt2,bert,unet", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each plan")
    parser.add_argument("--dropout", type=float, help="instead of the models' own, where they have any")
    arguments = parser.parse_args(argv)
    names = arguments.model.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"expected models of {', '.join(WORKLOADS)}; got {', '.join(unknown)}")
    torch.set_num_threads(2)
    won = True
    for name in names:
        options = {} if arguments.dropout is None else {"dropout": arguments.dropout}
        won &= run(WORKLOADS[name](**options), [float(r) for r in arguments.ratios.split(",")],
                   arguments.time_limit)
    return 0 if won else 1


if __name__ == "__main__":
    sys.exit(main())
