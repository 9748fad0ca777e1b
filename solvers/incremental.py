"""A schedule under edit: memory, peak and cost kept up to date as single runs come and go.

The model of the world is that of `solvers.simulator`, which evaluates the final schedule; this file
only keeps its result current at a small cost.  A run is known by its *key*: keys ascend along the
schedule, with steps so wide that a run is put between two others without touching them.  Memory per
position is one numpy array; each life of a storage is a range of it.  An edit changes a handful of
ranges, found by bisection among the births and reads of the storages concerned.  One edit costs 10
to 30 microseconds at 1,000 to 3,000 runs.

Blind spot: first runs are never moved or removed, so the order of first runs cannot change.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

from planner.solvers.actions import as_order
from planner.solvers.problem import Order, Problem
from planner.solvers.simulator import unroll

_GAP = 1 << 256  # between neighbours: 256 insertions at one place before keys are assigned again


class EditableTimeline:
    """A legal schedule that changes by inserting and removing recomputations.

    Edits since the last `commit` can be undone by `rollback`.
    """

    def __init__(self, problem: Problem, schedule: Sequence[int]) -> None:
        """Raise `solvers.simulator.IllegalSchedule` as the simulator does."""
        timeline = unroll(problem, schedule)
        self.problem = problem
        self._sizes = [storage.size_bytes for storage in problem.storages]
        self._kept = [storage.kept_to_end for storage in problem.storages]
        self._kept_bytes = sum(s.size_bytes for s in problem.storages if s.kept_to_end)
        # Reads of a storage kept to the end change nothing, so they are not followed.
        self._inputs = [tuple(s for s in op.inputs if not self._kept[s]) for op in problem.ops]
        self._output_bytes = [sum(self._sizes[s] for s in op.outputs) for op in problem.ops]
        self._costs = [op.cost for op in problem.ops]
        self._journal: list[tuple[bool, int, int]] = []  # inserted or removed, op, key

        runs = as_order(timeline.schedule)
        self.ops: list[int] = list(runs)
        """The op at each position."""
        self.keys: list[int] = [(position + 1) * _GAP for position in range(len(runs))]
        """The key at each position, ascending."""
        self.runs_of: list[list[int]] = [[] for _ in problem.ops]
        """The keys of each op's runs, ascending; the first one is its first run."""
        self.op_at: dict[int, int] = {}
        """The op of each key."""
        self.births: list[list[int]] = [[] for _ in problem.storages]
        self.reads: list[list[int]] = [[] for _ in problem.storages]
        self._taken: dict[int, int] = {}  # bytes of the buffer that the run at a key takes over
        for key, op in zip(self.keys, runs, strict=True):
            self.runs_of[op].append(key)
            self.op_at[key] = op
            for storage in self._inputs[op]:
                self.reads[storage].append(key)
            for storage in problem.ops[op].outputs:
                self.births[storage].append(key)
        self.first_keys: list[int] = [keys[0] for keys in self.runs_of]
        """The key of each op's first run, ascending."""
        for position, taken in enumerate(timeline.inplace_of):
            if taken is not None:
                self._taken[self.keys[position]] = self._sizes[taken]
        self._memory = np.empty(2 * len(runs) + 64, dtype=np.int64)
        self._memory[:len(runs)] = timeline.memory_bytes
        self.cost: float = timeline.cost
        """Cost of all runs; rounding may differ from the simulator's sum in the last digits."""
        self._committed_cost = self.cost

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def memory_bytes(self) -> np.ndarray:
        """Memory at each position, int64; a view that the next edit changes."""
        return self._memory[:len(self.keys)]

    @property
    def peak_bytes(self) -> int:
        """The largest memory over all positions."""
        return int(self.memory_bytes.max())

    @property
    def schedule(self) -> Order:
        """The current schedule."""
        return tuple(self.ops)

    def position(self, key: int) -> int:
        """Return the position of the run with that key, or of the first run after it."""
        return bisect_left(self.keys, key)

    def segment(self, key: int) -> int:
        """Return the segment in which a run with that key executes."""
        return self.problem.segment_before(bisect_left(self.first_keys, key))

    def may_insert(self, op: int, before: int) -> bool:
        """Return whether `op` may be recomputed just before the run with key `before`."""
        return (self.runs_of[op][0] < before
                and self.problem.may_replay(op, bisect_left(self.first_keys, before)))

    def life(self, storage: int, key: int) -> tuple[int, int] | None:
        """Return birth and death (keys) of the instance that a reader at `key` uses.  Returns
        `None` for a storage that is kept to the end, or does not exist yet."""
        births = self.births[storage]
        if self._kept[storage] or key <= births[0]:
            return None
        index = bisect_left(births, key) - 1
        return births[index], self._death(storage, index)

    def insert(self, op: int, before: int) -> int:
        """Recompute `op` just before the run with key `before`; return the new run's key.

        The caller makes sure that this is allowed (`may_insert`).
        """
        position = bisect_left(self.keys, before)
        if self.keys[position] - self.keys[position - 1] < 2:
            self._deal_keys()
        key = (self.keys[position - 1] + self.keys[position]) // 2
        self._insert(op, key, position)
        self._journal.append((True, op, key))
        return key

    def remove(self, key: int) -> None:
        """Drop the recomputation with that key; readers use the instance before it."""
        op = self.op_at[key]
        if self.runs_of[op][0] == key:
            raise ValueError(f"the first run of op {op} cannot be removed, only its recomputations")
        self._remove(op, key)
        self._journal.append((False, op, key))

    def remove_with_causes(self, key: int) -> None:
        """Drop the recomputation with that key, and then those that nothing reads any more."""
        queue = [key]
        while queue:
            here = queue.pop()
            op = self.op_at.get(here)
            if op is None or (here != key and (
                    self.first_keys[op] == here or not self._useless(op, here))):
                continue
            sources = [life[0] for s in self.problem.ops[op].inputs
                       if (life := self.life(s, here)) is not None]
            self.remove(here)
            queue.extend(reversed(sources))

    def _useless(self, op: int, key: int) -> bool:
        """Return whether nothing reads the outputs of the run of `op` with that key."""
        for storage in self.problem.ops[op].outputs:
            if self._kept[storage]:
                continue
            index = bisect_left(self.births[storage], key)
            if self._death(storage, index) > key:
                return False
        return True

    def commit(self) -> None:
        """Make the edits since the last commit final."""
        self._journal.clear()
        self._committed_cost = self.cost

    def rollback(self) -> None:
        """Undo the edits since the last commit."""
        while self._journal:
            inserted, op, key = self._journal.pop()
            if inserted:
                self._remove(op, key)
            else:
                self._insert(op, key, bisect_left(self.keys, key))
        self.cost = self._committed_cost  # without the rounding of edit and undo

    # The edits themselves.  `_memory` always holds the exact memory of each position.

    def _death(self, storage: int, index: int) -> int:
        """Key at which the storage's instance with that index dies; not for one kept to the end."""
        births, reads = self.births[storage], self.reads[storage]
        if index + 1 < len(births):
            last = bisect_left(reads, births[index + 1]) - 1
        else:
            last = len(reads) - 1
        birth = births[index]
        return reads[last] if last >= 0 and reads[last] > birth else birth

    def _across(self, position: int) -> int:
        """Bytes alive between the run at `position` and the one before it."""
        if position == len(self.keys):
            return self._kept_bytes
        op, key = self.ops[position], self.keys[position]
        described = self.problem.ops[op]
        held = (int(self._memory[position]) - described.workspace_bytes - self._output_bytes[op]
                + self._taken.get(key, 0))
        runs = self.runs_of[op]
        if described.replay_state_bytes and len(runs) > 1 and runs[0] == key:
            held -= described.replay_state_bytes
        return held

    def _insert(self, op: int, key: int, position: int) -> None:
        memory, keys, sizes = self._memory, self.keys, self._sizes
        described = self.problem.ops[op]
        here = self._across(position) + described.workspace_bytes
        count = len(keys)
        if count == len(memory):
            self._memory = memory = np.concatenate([memory, np.empty_like(memory)])
        memory[position + 1:count + 1] = memory[position:count]
        keys.insert(position, key)
        self.ops.insert(position, op)
        self.op_at[key] = op
        memory[position] = here

        stale = [key]  # runs that may take over another buffer than before
        for storage in self._inputs[op]:
            births, reads = self.births[storage], self.reads[storage]
            index = bisect_left(births, key) - 1
            death = self._death(storage, index)
            insort(reads, key)
            if key > death:
                memory[bisect_right(keys, death):position + 1] += sizes[storage]
                stale.append(death)
        for storage in described.outputs:
            births = self.births[storage]
            index = bisect_left(births, key)
            if self._kept[storage]:
                memory[position] += sizes[storage]
                births.insert(index, key)
                continue
            death = self._death(storage, index - 1)
            births.insert(index, key)
            if death > key:
                shortened = self._death(storage, index - 1)
                memory[bisect_right(keys, shortened):position] -= sizes[storage]
                stale += (shortened, death)
            else:
                memory[position] += sizes[storage]
        runs = self.runs_of[op]
        if described.replay_state_bytes and key > runs[-1]:
            start = bisect_right(keys, runs[-1]) if len(runs) > 1 else bisect_left(keys, runs[0])
            memory[start:position + 1] += described.replay_state_bytes
        insort(runs, key)
        self.cost += self._costs[op]
        self._refresh(stale)

    def _remove(self, op: int, key: int) -> None:
        memory, keys, sizes = self._memory, self.keys, self._sizes
        described = self.problem.ops[op]
        position = bisect_left(keys, key)
        stale: list[int] = []
        runs = self.runs_of[op]
        runs.remove(key)
        if described.replay_state_bytes and key > runs[-1]:
            start = bisect_right(keys, runs[-1]) if len(runs) > 1 else bisect_left(keys, runs[0])
            memory[start:position + 1] -= described.replay_state_bytes
        for storage in described.outputs:
            births = self.births[storage]
            index = bisect_left(births, key)
            if self._kept[storage]:
                del births[index]
                continue
            death = self._death(storage, index)
            shortened = self._death(storage, index - 1)
            del births[index]
            if death > key:
                memory[bisect_right(keys, shortened):position] += sizes[storage]
                stale += (shortened, death)
        for storage in self._inputs[op]:
            births, reads = self.births[storage], self.reads[storage]
            index = bisect_left(births, key) - 1
            dies_here = self._death(storage, index) == key
            del reads[bisect_left(reads, key)]
            if dies_here:
                death = self._death(storage, index)
                memory[bisect_right(keys, death):position] -= sizes[storage]
                stale.append(death)
        self._taken.pop(key, None)
        del self.op_at[key], keys[position], self.ops[position]
        count = len(keys)
        memory[position:count] = memory[position + 1:count + 1]
        self.cost -= self._costs[op]
        self._refresh(stale)

    def _refresh(self, stale: Sequence[int]) -> None:
        """Decide again which buffer the runs at these keys take over."""
        for key in stale:
            candidates = self.problem.ops[self.op_at[key]].inplace
            if not candidates:
                continue
            taken = 0
            for storage in candidates:
                lived = self.life(storage, key)
                if lived and lived[1] == key and self.segment(lived[0]) == self.segment(key):
                    taken = self._sizes[storage]
                    break
            change = taken - self._taken.get(key, 0)
            if change:
                self._memory[bisect_left(self.keys, key)] -= change
                self._taken[key] = taken

    def _deal_keys(self) -> None:
        """Space all keys evenly, including those of removed runs that `rollback` may need."""
        known = sorted({*self.keys, *(key for _, _, key in self._journal)})
        fresh = {key: (rank + 1) * _GAP for rank, key in enumerate(known)}
        self.keys = [fresh[key] for key in self.keys]
        self.op_at = {fresh[key]: op for key, op in self.op_at.items()}
        self._taken = {fresh[key]: taken for key, taken in self._taken.items()}
        for lists in (self.runs_of, self.births, self.reads):
            lists[:] = [[fresh[key] for key in keys] for keys in lists]
        self.first_keys = [fresh[key] for key in self.first_keys]
        self._journal = [(inserted, op, fresh[key]) for inserted, op, key in self._journal]


def drop_recomputes(problem: Problem, budget_bytes: int, schedule: Order) -> Order:
    """Return a schedule without dispensable recomputations.  It costs no more than `schedule` and
    peaks within the larger of the budget and the peak of `schedule`.

    A recomputation is dropped if the instance before it can live on instead; those that only served
    it go as well.  The most expensive are tried first: the result is minimal, not minimum.
    """
    if len(schedule) == len(problem):
        return schedule
    timeline = EditableTimeline(problem, schedule)
    limit = max(budget_bytes, timeline.peak_bytes)
    dropped = True
    while dropped:
        dropped = False
        again = sorted((-problem.ops[timeline.op_at[key]].cost, -key)
                       for runs in timeline.runs_of for key in runs[1:])
        for _, negative in again:
            if -negative in timeline.op_at:
                timeline.remove_with_causes(-negative)
                if timeline.peak_bytes <= limit:
                    timeline.commit()
                    dropped = True
                else:
                    timeline.rollback()
    return timeline.schedule
