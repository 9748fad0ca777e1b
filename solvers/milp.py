"""The only access to the MILP engine of OR-Tools, SCIP, always single-threaded and seeded.

It closes the gap of the time-cut models faster than HiGHS; on published instances the two are about
equal.
"""

from __future__ import annotations

import datetime
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from ortools.math_opt.python import mathopt


@dataclass(frozen=True, slots=True)
class MilpResult:
    """Result of a minimisation over binary and continuous variables."""

    values: Mapping[mathopt.Variable, float] | None
    """The best solution found."""
    bound: float
    """No solution has a smaller value; infinite where the model is infeasible."""
    solved: bool
    """True if solved to the end, or proven infeasible."""
    work: float = 0.0
    """Counted work, in seconds of a reference machine: a part for every model, and the steps of the
    simplex method times the rows.  Unlike time, it is the same whenever the same model is solved
    again."""


_SECONDS_PER_MODEL = 4e-3
"""Of a model with hardly any rows."""
_ROW_STEPS_PER_SECOND = 1e6
_DENSE_ROWS = 850
"""A step of a larger model takes time like the square root of its rows, which are sparse."""
_ROWS_PER_SECOND = 5e4
"""Rows that are written and presolved in a second."""
_NODE_ROWS_PER_SECOND = 6.7e4
"""Nodes times rows that the search after the root processes in a second."""


@contextmanager
def _interrupted_behind() -> Iterator[None]:
    """Ctrl-C is handled behind the block.  OR-Tools builds its result in Python code called from C,
    where an exception is lost."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    seen: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen:
            before(*seen[-1])


def optimise(model: mathopt.Model, seconds: float, *, seed: int = 0, gap: float = 0.0,
             nodes: int | None = None, work: float = math.inf, cutting_planes: bool = True,
             hint: Mapping[mathopt.Variable, float] | None = None) -> MilpResult:
    """Minimise within a time limit, to within an absolute gap; objectives must not be negative.

    `nodes` and `work` (seconds of a reference machine, about) limit the search after the root
    instead: if they end the search, the result does not depend on the speed of the machine.
    Without `cutting_planes` the root is not strengthened, which saves much time on models that are
    tight already (those of candidates).
    """
    if seconds <= 0:
        return MilpResult(None, 0.0, False)
    if work < math.inf:
        most = int(work * _NODE_ROWS_PER_SECOND / max(1, model.get_num_linear_constraints()))
        nodes = max(1, most if nodes is None else min(nodes, most))
    params = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=seconds), random_seed=seed,
        relative_gap_tolerance=0.0, absolute_gap_tolerance=gap, node_limit=nodes)
    params.threads = 1
    params.gscip.bool_params["misc/catchctrlc"] = False  # Python raises it behind this model
    params.presolve = mathopt.Emphasis.LOW  # more of it cost more time than it saved
    if not cutting_planes:
        params.gscip.int_params["separating/maxroundsroot"] = 0
    hints = [] if hint is None else [mathopt.SolutionHint(variable_values=dict(hint))]
    with _interrupted_behind():
        result = mathopt.solve(model, mathopt.SolverType.GSCIP, params=params,
                               model_params=mathopt.ModelSolveParameters(solution_hints=hints))
    rows, reason = model.get_num_linear_constraints(), result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE,
                  mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return MilpResult(None, float("inf"), True, _SECONDS_PER_MODEL + rows / _ROWS_PER_SECOND)
    work = _SECONDS_PER_MODEL + rows / _ROWS_PER_SECOND + (
        min(rows, math.sqrt(_DENSE_ROWS * rows)) * result.solve_stats.simplex_iterations
        / _ROW_STEPS_PER_SECOND)
    bound = max(0.0, result.termination.objective_bounds.dual_bound)
    solved = reason is mathopt.TerminationReason.OPTIMAL
    values = result.variable_values() if result.has_primal_feasible_solution() else None
    return MilpResult(values, bound, solved, work)
