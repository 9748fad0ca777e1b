"""Steps whose results may be stored on the host, on a machine where a substitute acts as the host.
"""

from __future__ import annotations

import random

from planner.solvers import Fetch, Link, Problem, Release, Schedule, Store
from planner.solvers.actions import as_order
from planner.solvers.offload import longest_gaps
from planner.solvers.simulator import unroll
from planner.step.prepared import PreparedStep


def with_link(step: PreparedStep, bytes_per_second: float) -> PreparedStep:
    """Return the step with a link to the host, which planning itself refuses for a CPU."""
    return step.with_link(Link(bytes_per_second))


def random_transfers(problem: Problem, schedule: Schedule, seed: int, share: float = 0.5
                     ) -> Schedule:
    """Return the runs of `schedule`, with about `share` of the offloadable storages stored,
    released and fetched at any legal time in their longest gaps."""
    rng = random.Random(seed)
    order = as_order(schedule)
    timeline = unroll(problem, order)
    before: list[list[Store | Release | Fetch]] = [[] for _ in order]
    for gap in longest_gaps(problem, order, timeline.segments):
        if rng.random() >= share:
            continue
        release = rng.randint(gap.leaves + 1, min(gap.release_by, gap.returns))
        store = rng.randint(gap.made + 1, release)
        fetch = rng.randint(max(gap.fetch_from, release), gap.returns)
        before[store].append(Store(gap.storage))
        before[release].append(Release(gap.storage))
        before[fetch].append(Fetch(gap.storage))
    # Storages stored and released before the same run keep that order: the sort is stable.
    return tuple(action for position, index in enumerate(order)
                 for action in (*before[position], index))
