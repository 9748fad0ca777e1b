"""The scheduling problem that every solver here solves.

The model of the world: a fixed sequence of ops, each of which reads storages, writes storages and
has a cost.  A *schedule* is the sequence of runs; its first runs come in the order of the ops, and
an op may run again later (rematerialization), which costs again and brings its outputs back.
Memory is the sum of live storages (see `solvers.simulator` for the exact rule); resident memory
that no schedule can change (parameters, inputs) is not part of a problem: subtract it from the
budget.

If a problem has a `Link`, a schedule may also keep a result on the host for a while
(`solvers.actions`); the only cost is waiting for copies (`solvers.simulator`).

Blind spots: the order of first runs is fixed, the cost of an op does not depend on when it runs,
and memory fragmentation does not exist.

Three words have one meaning each in this package.  A storage is *held* while it is alive.  It is
*retained* if a model decides to keep it past a run.  It is *kept* to the end if there is no choice.
The *gap* is the cost of a schedule above the lower bound, never a place in one.

Two kinds of problem share this type: a captured training step (several segments, in-place
candidates, outputs kept to the end), and published instances (one storage per op, every op
recomputable anywhere, see `solvers.instances`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from planner.solvers.actions import Order as Order
from planner.solvers.actions import Schedule as Schedule


@dataclass(frozen=True, slots=True)
class Storage:
    """A buffer that one op allocates; views of it are the same storage."""

    size_bytes: int
    producer: int
    """Index of the op whose run makes it."""
    kept_to_end: bool = False
    """True if alive from its first run to the end: a gradient, an output that the caller keeps
    alive."""
    offloadable: bool = False
    """True if it may be stored on the host and fetched back, if the problem has a link."""


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between device and host.  Each direction carries one copy at a time, in
    parallel with the ops and with the other direction."""

    bytes_per_cost: float
    """Bytes that one direction carries in one unit of cost: per second if costs are seconds."""
    start_cost: float = 0.0
    """Fixed cost of each copy."""

    def cost(self, size_bytes: int) -> float:
        """Return the cost of a copy of so many bytes."""
        return self.start_cost + size_bytes / self.bytes_per_cost


@dataclass(frozen=True, slots=True)
class Op:
    """One step of the computation, in the order of first runs."""

    name: str
    cost: float
    """Cost of one run, in any unit that adds up (seconds, FLOPs)."""
    inputs: tuple[int, ...]
    """Storages that must be alive when it runs, without repetition."""
    outputs: tuple[int, ...]
    """Storages that it makes; those without a later use live only while it runs."""
    workspace_bytes: int = 0
    """Bytes allocated while it runs, and only then."""
    recomputable: bool = True
    """True if it may run more than once."""
    inplace: tuple[int, ...] = ()
    """Inputs whose buffer its (only) output may take over if they die in this run; all have the
    output's size, in order of preference."""
    replay_state_bytes: int = 0
    """Bytes alive from its first to its last run so that a second run gives the same result (a
    random generator's state, copies of inputs that are mutated later); 0 if it runs once."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous stretch of ops that executes as one unit, such as the forward or the backward.

    A recomputation belongs to the segment of the next first run that follows it (after the last
    first run: to the last segment).
    """

    start: int
    """Index of its first op; it ends where the next segment starts."""
    replays: tuple[int, ...]
    """The segments whose ops may be recomputed within this one."""


@dataclass(frozen=True)
class Problem:
    """Ops in the fixed order of first runs, the storages they exchange, and the segments."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    segments: tuple[Segment, ...] = field(default=(Segment(0, (0,)),))
    name: str = ""
    link: Link | None = None
    """`None`: no result can be stored on the host."""

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def keep_all_schedule(self) -> Order:
        """Every op once, without recomputation."""
        return tuple(range(len(self.ops)))

    @cached_property
    def keep_all_cost(self) -> float:
        """Cost of running every op once."""
        return float(sum(op.cost for op in self.ops))

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The ops that read each storage, ascending."""
        readers: list[list[int]] = [[] for _ in self.storages]
        for index, op in enumerate(self.ops):
            for storage in op.inputs:
                readers[storage].append(index)
        return tuple(tuple(indices) for indices in readers)

    @cached_property
    def sources(self) -> tuple[tuple[int, int], ...]:
        """Storages that cannot be recomputed, but from which others can be; each with the last
        first run that reads one of those."""
        last_use = [max(readers, default=-1) for readers in self.consumers]
        for op in reversed(self.ops):
            if op.recomputable and op.outputs:
                last = max(last_use[storage] for storage in op.outputs)
                for storage in op.inputs:
                    last_use[storage] = max(last_use[storage], last)
        return tuple(
            (number, last_use[number]) for number, storage in enumerate(self.storages)
            if not storage.kept_to_end and not self.ops[storage.producer].recomputable
            and last_use[number] > max(self.consumers[number], default=-1))

    @cached_property
    def segment_of(self) -> tuple[int, ...]:
        """The segment index of each op."""
        homes: list[int] = []
        bounds = [segment.start for segment in self.segments[1:]] + [len(self.ops)]
        for index, end in enumerate(bounds):
            homes.extend([index] * (end - len(homes)))
        return tuple(homes)

    def segment_before(self, next_first_run: int) -> int:
        """The segment of what runs just before the first run of `next_first_run`."""
        return self.segment_of[min(next_first_run, len(self.ops) - 1)]

    def may_replay(self, op: int, next_first_run: int) -> bool:
        """Return whether `op` may be recomputed just before the first run of `next_first_run`
        (`len(problem)`: after the last first run)."""
        if not self.ops[op].recomputable or op >= next_first_run:
            return False
        return self.segment_of[op] in self.segments[self.segment_before(next_first_run)].replays

    def may_transfer(self, storage: int, next_first_run: int) -> bool:
        """Return whether `storage` may be stored or fetched just before the first run of
        `next_first_run`: in its own segment, and in segments that may replay it."""
        made = self.storages[storage]
        if self.link is None or not made.offloadable or made.producer >= next_first_run:
            return False
        here = self.segment_before(next_first_run)
        return self.segment_of[made.producer] in (here, *self.segments[here].replays)

    def fixed_bytes(self, op: int) -> int:
        """Bytes alive at the first run of an op in every schedule: its inputs, outputs and
        workspace, and results of earlier ops that are kept to the end; nothing taken over in
        place."""
        held = {number for number, storage in enumerate(self.storages)
                if storage.kept_to_end and storage.producer < op}
        held.update(self.ops[op].inputs, self.ops[op].outputs)
        return sum(self.storages[s].size_bytes for s in held) + self.ops[op].workspace_bytes

    def inplace_candidates(self, op: int) -> tuple[int, ...]:
        """Inputs whose buffer the output of an op may take over at its first run under some
        schedule: not kept to the end, and with an instance made in the same segment."""
        here = self.segment_of[op]
        return tuple(
            s for s in self.ops[op].inplace
            if not self.storages[s].kept_to_end
            and (self.segment_of[self.storages[s].producer] == here
                 or self.may_replay(self.storages[s].producer, op)))


def _check(problem: Problem) -> None:
    """Raise `ValueError` if a problem is not well formed."""
    ops, storages = problem.ops, problem.storages
    if not ops:
        raise ValueError("a problem needs at least one op, got none")
    starts: Sequence[int] = [segment.start for segment in problem.segments]
    if not starts or starts[0] != 0 or any(b < a for a, b in pairwise(starts)):
        raise ValueError(f"segments must start at 0 and ascend, got starts {list(starts)}")
    for number, made in enumerate(storages):
        if made.size_bytes < 0:
            raise ValueError(f"storage {number} has a negative size: {made.size_bytes}")
        if not 0 <= made.producer < len(ops) or number not in ops[made.producer].outputs:
            raise ValueError(f"storage {number} names op {made.producer} as its producer, "
                             "which does not list it among its outputs")
        if made.kept_to_end and made.offloadable:
            raise ValueError(f"storage {number} is kept to the end and cannot be offloadable too")
    link = problem.link
    if link is not None and not (0 < link.bytes_per_cost < float("inf")
                                 and 0 <= link.start_cost < float("inf")):
        raise ValueError("a link needs a finite rate > 0 and a finite start >= 0, got "
                         f"{link.bytes_per_cost} and {link.start_cost}")
    for index, op in enumerate(ops):
        if not (op.cost >= 0) or op.cost == float("inf"):
            raise ValueError(f"op {index} ({op.name}) must have a finite cost >= 0, got {op.cost}")
        if op.workspace_bytes < 0 or op.replay_state_bytes < 0:
            raise ValueError(f"op {index} ({op.name}) has a negative workspace or replay state")
        if len(set(op.inputs)) != len(op.inputs):
            raise ValueError(f"op {index} ({op.name}) lists an input twice")
        for storage in op.inputs:
            if not 0 <= storage < len(storages) or storages[storage].producer >= index:
                raise ValueError(f"op {index} ({op.name}) reads storage {storage}, "
                                 "which no earlier op makes: ops must be in a topological order")
        for storage in op.outputs:
            if not 0 <= storage < len(storages) or storages[storage].producer != index:
                raise ValueError(f"op {index} ({op.name}) lists output {storage}, made elsewhere")
        for storage in op.inplace:
            if storage not in op.inputs or len(op.outputs) != 1 or (
                    storages[storage].size_bytes != storages[op.outputs[0]].size_bytes):
                raise ValueError(f"op {index} ({op.name}) may take over only an input of the size "
                                 f"of its single output, got storage {storage}")
