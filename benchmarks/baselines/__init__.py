"""Published methods, written from their papers, for comparison.

Each takes `(problem, budget_bytes, *, time_limit, seed, progress=None, warm_start=None)` and
returns a schedule, or None, and a lower bound on the total cost of every legal schedule.  Both
papers search a class of schedules (stated in each module) that may miss the optimum, so what their
programs prove holds within the class only; it goes to `progress`, and the bound that is returned is
the cost of running every op once.
"""

from benchmarks.baselines.checkmate import checkmate as checkmate
from benchmarks.baselines.moccasin import moccasin as moccasin
