"""Copies between device and host in parallel with the ops: their legal order, and the cost of
waiting for them.

The model of the world: ops run one after the other on one stream; each direction of the link is a
stream of its own, on which copies follow each other in the order of their actions.  A copy to the
host begins when the ops before its `Store` have ended and the link is free; `Release` stops the ops
until it has ended.  A copy back begins when the ops before its `Fetch` have ended (whose memory it
may use) and the link is free; an op that reads it waits for its end.  A storage is stored once and
then stays on the host to the end of the step.  This is the setting of vDNN (Rhu et al., MICRO
2016), Capuchin (Peng et al., ASPLOS 2020), POFO (Beaumont et al., NeurIPS 2021) and POET (Patil et
al., ICML 2022), except for the explicit `Release`: memory depends on the order of actions only, and
only the duration depends on time.

Blind spots: the memory of the host has no limit; copies and ops do not slow each other down; all
ops are queued in time, so that the device never waits for the program that feeds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from planner.solvers.actions import Fetch, Release, Schedule, Store, Transfer
from planner.solvers.errors import IllegalSchedule
from planner.solvers.problem import Link, Problem


def check_order(transfers: Iterable[tuple[int, Transfer]]) -> None:
    """Raise `IllegalSchedule` unless each storage is stored once, released in the segment in which
    it is stored, and fetched after that.  `transfers`: with the segments that contain them."""
    stored: dict[int, int] = {}
    released: set[int] = set()
    for segment, action in transfers:
        match action:
            case Store(storage):
                if storage in stored:
                    raise IllegalSchedule(f"storage {storage} is stored twice; the host has it")
                stored[storage] = segment
            case Release(storage):
                if stored.get(storage) != segment or storage in released:
                    raise IllegalSchedule(f"storage {storage} is released without a copy to the "
                                          "host that began in this segment")
                released.add(storage)
            case Fetch(storage):
                if storage not in released:
                    raise IllegalSchedule(f"storage {storage} is fetched before it was stored and "
                                          "released")
            case _:
                assert_never(action)
    if len(released) < len(stored):
        missing = min(stored.keys() - released)
        raise IllegalSchedule(f"storage {missing} is stored and never released")


def waiting_cost(problem: Problem, link: Link, schedule: Schedule) -> float:
    """Return the time that ops wait for copies, in the unit of cost; `schedule` is legal."""
    now = outward_free = inward_free = waited = 0.0
    ends: dict[int, float] = {}  # storage to the end of its copy to the host
    arrivals: dict[int, float] = {}  # storage to the end of its copy back, if that is its latest
    for action in schedule:
        match action:
            case int():
                op = problem.ops[action]
                ready = max((arrivals.get(s, now) for s in op.inputs), default=now)
                for storage in op.outputs:
                    arrivals.pop(storage, None)
                waited += max(0.0, ready - now)
                now = max(now, ready) + op.cost
            case Store(storage):
                outward_free = max(now, outward_free) + link.cost(
                    problem.storages[storage].size_bytes)
                ends[storage] = outward_free
            case Release(storage):
                waited += max(0.0, ends[storage] - now)
                now = max(now, ends[storage])
            case Fetch(storage):
                inward_free = max(now, inward_free) + link.cost(
                    problem.storages[storage].size_bytes)
                arrivals[storage] = inward_free
            case _:
                assert_never(action)
    return waited
