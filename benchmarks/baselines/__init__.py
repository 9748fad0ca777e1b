"""Published methods, written from their papers, for comparison: algorithms for `solvers.solve`.

Both papers search a class of schedules (stated in each module) that may miss the optimum, so what
their programs prove holds within the class only; it goes to `progress`, and the bound proposed is
the cost of running every op once.  Where they find nothing, they propose just that schedule.
"""

from benchmarks.baselines.checkmate import checkmate as checkmate
from benchmarks.baselines.moccasin import moccasin as moccasin
