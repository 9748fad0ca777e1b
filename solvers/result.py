"""The result of a solver: a schedule, its cost, and the proven bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.solvers.actions import Schedule

Status = Literal["optimal", "feasible"]


@dataclass(frozen=True, slots=True)
class Result:
    """A schedule within its budget, evaluated by `solvers.simulate`."""

    schedule: Schedule
    """The actions; also a sequence of node numbers, since a run is the number of its op."""
    peak_bytes: int
    """Peak of the schedule, never above the budget."""
    cost: float
    """Cost of all runs, in the unit of the problem."""
    keep_all_cost: float
    """Cost of running every op once."""
    lower_bound: float
    """No legal schedule within the budget costs less, in the unit of `cost`."""
    status: Status
    """"optimal" if cost and bound meet and the same input and seed give this very schedule again,
    at any load of the machine; "feasible" otherwise.  A schedule found only as the time ran out is
    "feasible" even if cost and bound meet."""
    seconds: float
    """Wall time of the solver."""
    solver: str
    """Name of the requested solver."""
    interrupted: bool = False
    """True if the user ended the search (`KeyboardInterrupt`); the schedule is the best until then.
    """

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
        """Difference that is not proven: `overhead - overhead_bound`, in units of the keep-all
        cost."""
        return _fraction(self.cost - self.lower_bound, self.keep_all_cost)

    def __str__(self) -> str:
        return (f"{self.solver}: {self.status}, overhead {self.overhead:.3%} "
                f"(bound {self.overhead_bound:.3%}), peak {self.peak_bytes} bytes, "
                f"{self.seconds:.1f} s")


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
