"""What a solver returns: a schedule, what it costs, and what is proven about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.solvers.actions import Schedule

Status = Literal["optimal", "feasible"]


@dataclass(frozen=True, slots=True)
class Result:
    """A schedule within its budget, judged by `solvers.simulate`."""

    schedule: Schedule
    """Also a sequence of node numbers: a run is the number of its op."""
    peak_bytes: int
    """Peak of the schedule, never above the budget."""
    cost: float
    """Cost of all runs, in the unit of the problem."""
    keep_all_cost: float
    """Cost of running every op once."""
    lower_bound: float
    """No legal schedule within the budget costs less, in the unit of `cost`."""
    status: Status
    """"optimal" where cost and bound meet and the same input and seed give this very schedule
    again, whatever the load of the machine; "feasible" otherwise.  Where a schedule was found only
    as the time ran out, it is "feasible" even if cost and bound meet."""
    seconds: float
    """Wall time of the solver."""
    solver: str
    """Name of the solver that was asked for."""
    interrupted: bool = False
    """Whether the user ended the search (`KeyboardInterrupt`); the schedule is the best by then."""

    @property
    def overhead(self) -> float:
        """Cost of the recomputations, as a fraction of the keep-all cost."""
        return _fraction(self.cost - self.keep_all_cost, self.keep_all_cost)

    @property
    def overhead_bound(self) -> float:
        """Proven lower bound on `overhead`."""
        return _fraction(self.lower_bound - self.keep_all_cost, self.keep_all_cost)

    @property
    def gap(self) -> float:
        """What is not proven: `overhead - overhead_bound`, in units of the keep-all cost."""
        return _fraction(self.cost - self.lower_bound, self.keep_all_cost)

    def __str__(self) -> str:
        return (f"{self.solver}: {self.status}, overhead {self.overhead:.3%} "
                f"(bound {self.overhead_bound:.3%}), peak {self.peak_bytes} bytes, "
                f"{self.seconds:.1f} s")


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
