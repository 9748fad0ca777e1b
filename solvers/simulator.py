"""The one memory model: the cost of a schedule and its memory at each run.

Every solver, every plan and every test evaluates a schedule by this file.

The rule.  A run of an op makes a new *instance* of each of its outputs.  A reader uses the latest
instance (of a storage kept to the end: the first one, which is alive anyway).  An instance lives
from the run that makes it to its last read, at least during the run that makes it; the first
instance of a storage kept to the end lives to the end.  Memory at a run is the sum of the instances
alive there, plus the op's workspace, plus the replay state of every op between its first and its
last run.  If the op names an in-place candidate whose instance dies in this very run and was made
in the same segment, the output takes over its buffer and the two count once.

`Store` and `Release` read the latest instance, as an op does, so that it lives until its copy has
ended; `Fetch` makes a new instance.  Waiting for copies is part of the cost.  Ops run one after the
other on one stream; each direction of the link is a stream of its own, on which copies follow each
other in the order of their actions.  A copy to the host begins when the ops before its `Store` have
ended and the link is free; `Release` stops the ops until it has ended.  A copy back begins when the
ops before its `Fetch` have ended (whose memory it may use) and the link is free; an op that reads
it waits for its end.  A storage is stored once and then stays on the host to the end of the step.
This is the setting of vDNN (Rhu et al., MICRO 2016), Capuchin (Peng et al., ASPLOS 2020), POFO
(Beaumont et al., NeurIPS 2021) and POET (Patil et al., ICML 2022), except for the explicit
`Release`: memory depends on the order of actions only, and only the duration depends on time.

Blind spots: the memory of the host has no limit; copies and ops do not slow each other down; all
ops are queued in time, so that the device never waits for the program that feeds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, assert_never

from planner.solvers.actions import Action, Fetch, Release, Schedule, Store, Transfer, known_actions
from planner.solvers.errors import IllegalSchedule as IllegalSchedule
from planner.solvers.problem import Link, Problem


class Simulation(NamedTuple):
    """Peak and cost of a schedule."""

    peak_bytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class Instance:
    """One life of a storage."""

    storage: int
    birth: int
    """Position of the run that makes it."""
    death: int
    """Last position at which it is alive."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule, unrolled in time; positions count actions from 0."""

    schedule: Schedule
    memory_bytes: tuple[int, ...]
    """Memory at each position."""
    cost: float
    instances: tuple[Instance, ...]
    """Every life of every storage, by birth."""
    inplace_of: tuple[int | None, ...]
    """For each position, the storage whose buffer the output takes over there."""
    segments: tuple[int, ...]
    """For each position, the segment in which the action executes."""
    waiting_cost: float = 0.0
    """Part of the cost: the time that ops wait for copies from and to the host."""

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Position and op of each run."""
        return [(position, action) for position, action in enumerate(self.schedule)
                if isinstance(action, int)]

    @property
    def first_runs(self) -> dict[int, int]:
        """Position of the first run of each op."""
        return {index: position for position, index in reversed(self.runs)}

    @property
    def last_runs(self) -> dict[int, int]:
        """Position of the last run of each op."""
        return {index: position for position, index in self.runs}

    def op_at(self, position: int) -> int:
        """The op that runs at a position, or next after it."""
        return next((action for action in self.schedule[position:] if isinstance(action, int)),
                    self.runs[-1][1])

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Storages that are stored on the host, in order."""
        return tuple(action.storage for action in self.schedule if isinstance(action, Store))

    @property
    def peak_bytes(self) -> int:
        """The largest memory over all positions."""
        return max(self.memory_bytes)

    @property
    def peak_position(self) -> int:
        """The first position at which memory is at its peak."""
        return self.memory_bytes.index(self.peak_bytes)


def is_legal(problem: Problem, schedule: Schedule) -> bool:
    """True if a schedule breaks no rule."""
    try:
        simulate(problem, schedule)
    except IllegalSchedule:
        return False
    return True


def simulate(problem: Problem, schedule: Sequence[Action | int]) -> Simulation:
    """Return peak bytes and cost of `schedule`; raise `IllegalSchedule` if it breaks a rule."""
    timeline = unroll(problem, schedule)
    return Simulation(timeline.peak_bytes, timeline.cost)


def unroll(problem: Problem, schedule: Sequence[Action | int]) -> Timeline:
    """Return the whole life of every storage under `schedule`; raise `IllegalSchedule`.

    O(runs + reads).
    """
    ops, storages = problem.ops, problem.storages
    runs = known_actions(schedule)
    where = _segments_of_runs(problem, runs)
    births: list[int] = []  # parallel lists, one entry per instance
    deaths: list[int] = []
    owner: list[int] = []
    current = [-1] * len(storages)  # the instance that a reader would use
    leaving: dict[int, int] = {}  # storage to the instance that is being copied to the host
    first_run = [-1] * len(ops)
    last_run = [-1] * len(ops)
    reads: list[list[int]] = [[] for _ in runs]  # instances read at each position

    for position, index in enumerate(runs):
        match index:
            case int():
                op = ops[index]
                for storage in op.inputs:
                    instance = current[storage]  # first runs come in order: it exists
                    deaths[instance] = position
                    reads[position].append(instance)
                if first_run[index] < 0:
                    first_run[index] = position
                last_run[index] = position
                for storage in op.outputs:
                    births.append(position)
                    deaths.append(position)
                    owner.append(storage)
                    if current[storage] < 0 or not storages[storage].kept_to_end:
                        current[storage] = len(births) - 1
            case Store(storage):
                leaving[storage] = current[storage]
                deaths[current[storage]] = position
            case Release(storage):
                deaths[leaving[storage]] = max(deaths[leaving[storage]], position)
            case Fetch(storage):
                births.append(position)
                deaths.append(position)
                owner.append(storage)
                current[storage] = len(births) - 1
            case _:
                assert_never(index)

    end = len(runs) - 1
    kept_seen: set[int] = set()
    for instance, storage in enumerate(owner):
        if storages[storage].kept_to_end and storage not in kept_seen:
            kept_seen.add(storage)
            deaths[instance] = end

    delta = [0] * (len(runs) + 1)
    for birth, death, storage in zip(births, deaths, owner, strict=True):
        delta[birth] += storages[storage].size_bytes
        delta[death + 1] -= storages[storage].size_bytes
    for index, op in enumerate(ops):
        if op.replay_state_bytes and last_run[index] > first_run[index]:
            delta[first_run[index]] += op.replay_state_bytes
            delta[last_run[index] + 1] -= op.replay_state_bytes
    memory = list(accumulate(delta[:-1]))

    taken: list[int | None] = [None] * len(runs)
    for position, index in enumerate(runs):
        if not isinstance(index, int):
            continue
        op = ops[index]
        memory[position] += op.workspace_bytes
        if op.inplace:
            read_here = dict(zip(op.inputs, reads[position], strict=True))
            for storage in op.inplace:
                instance = read_here[storage]
                if (deaths[instance] == position and not (storages[storage].kept_to_end)
                        and where[births[instance]] == where[position]):
                    taken[position] = storage
                    memory[position] -= storages[storage].size_bytes
                    break

    instances = tuple(Instance(s, b, d) for s, b, d in zip(owner, births, deaths, strict=True))
    cost = float(sum(ops[index].cost for index in runs if isinstance(index, int)))
    waiting = 0.0 if problem.link is None else waiting_cost(problem, problem.link, runs)
    return Timeline(runs, tuple(memory), cost + waiting, instances, tuple(taken), where, waiting)


def _segments_of_runs(problem: Problem, runs: Schedule) -> tuple[int, ...]:
    """Return the segment of each action.  Raise `IllegalSchedule` unless first runs come in order,
    every op runs, and each recomputation and transfer is allowed at its place."""
    ops = problem.ops
    expected = 0
    is_first = [False] * len(runs)
    for position, index in enumerate(runs):
        if not isinstance(index, int):
            continue
        if not 0 <= index < len(ops):
            raise IllegalSchedule(f"run {position} names op {index}; "
                                  f"the problem has ops 0 to {len(ops) - 1}")
        if index == expected:
            is_first[position] = True
            expected += 1
        elif index > expected:
            raise IllegalSchedule(f"run {position} is op {index} ({ops[index].name}) before op "
                                  f"{expected} ({ops[expected].name}) has run: "
                                  "first runs must come in order")
    if expected < len(ops):
        raise IllegalSchedule(f"op {expected} ({ops[expected].name}) never runs")

    where = [0] * len(runs)
    following = len(ops)
    for position in range(len(runs) - 1, -1, -1):
        index = runs[position]
        if not isinstance(index, int):
            if not (0 <= index.storage < len(problem.storages)
                    and problem.may_transfer(index.storage, following)):
                raise IllegalSchedule(f"position {position} holds {index}, in a segment that must "
                                      "not move it, or of a storage that is not offloadable")
            where[position] = problem.segment_before(following)
            continue
        if is_first[position]:
            following = index
            where[position] = problem.segment_of[index]
            continue
        if not ops[index].recomputable:
            raise IllegalSchedule(f"run {position} recomputes op {index} ({ops[index].name}), "
                                  "which may run only once")
        if not problem.may_replay(index, following):
            raise IllegalSchedule(f"run {position} recomputes op {index} ({ops[index].name}) "
                                  "in a segment that must not recompute it")
        where[position] = problem.segment_before(following)
    check_order((segment, action) for segment, action in zip(where, runs, strict=True)
                if not isinstance(action, int))
    return tuple(where)


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
