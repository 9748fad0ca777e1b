"""Lower bound on the cost of a compiled step within a budget, under the cost model of fused
kernels.

Model of the world: each choice of saved results pays for its recomputation
(`graph_capture.inductor.fused_costs`), at least once, and for kernel writes and reads that happen
only because a result is saved.  Memory is checked at the end of forward and loss, at the peak of
the step without recomputation, and where the cheapest choice so far exceeds the budget.  This is
the time-cut model of the solvers (`solvers.cut_model`) with a price on each saved result; its
optimum is a bound for all choices whose step has, at these positions, the memory that the
scheduling problem counts.

Assumption: generated code may use less than that (results that never leave a kernel), by at most
the difference seen in traced steps; the caller adds this to the budget.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from planner._graph_capture.training_graph import Phase
from planner.search.saving import schedule_saving
from planner.solvers.actions import as_order
from planner.solvers.cut_model import CutModel
from planner.solvers.repetition import runs_of
from planner.solvers.schedule_from_cuts import Inner, next_cuts
from planner.solvers.simulator import unroll
from planner.step.variant import Variant

_NODES = 50
"""Search nodes per model; if they do not suffice, the bound is lower."""
_WORK = 5.0
"""Work (see `solvers.milp.Answer`) after which no further model is solved."""
_GAP = 1e-4
"""Models are solved to within this fraction of the step's time."""


def least_cost(
    variant: Variant, net_bytes: int, to_save: Mapping[int, float], seconds: float
) -> float:
    """Lower bound on the cost of any choice within `net_bytes`, in the unit of the problem and
    found in about `seconds`; infinite if no choice is feasible.  `to_save`: cost of saving each
    buffer."""
    problem, ops = variant.problem, variant.graph.ops
    end = next((i for i, op in enumerate(ops) if op.phase is Phase.BACKWARD), 0) - 1
    if end < 0:
        return problem.keep_all_cost
    fullest = unroll(problem, problem.keep_all_schedule).peak_position
    cuts, runs = tuple(sorted({end, max(fullest, end)})), runs_of(problem)
    inner: Inner = ()
    deadline, extra, work = time.monotonic() + seconds, 0.0, 0.0
    while work < _WORK:
        solution = CutModel(
            problem, net_bytes, cuts, inner=inner, runs=runs, retention_costs=to_save).solve(
                deadline - time.monotonic(), nodes=_NODES, gap=_GAP * problem.keep_all_cost)
        extra, work = max(extra, solution.extra_bound), work + solution.work
        if solution.retained is None or not solution.solved:
            break
        exceeding = as_order(schedule_saving(variant, solution.retained[0]))
        found = next_cuts(problem, net_bytes, exceeding, cuts, inner, first=end)
        if found is None:
            break
        cuts, inner = found
    return problem.keep_all_cost + extra
