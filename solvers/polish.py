"""Drop recomputations that a schedule can do without, under the budget.

A recomputation is dropped where the instance before it can live on instead without the peak
leaving the budget; what was recomputed only for its sake goes with it.  The dearest are tried
first, until none can go: the result is minimal, not minimum.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from solvers.problem import Problem, Schedule
from solvers.simulator import unroll


def drop_recomputes(problem: Problem, budget_bytes: int, schedule: Schedule) -> Schedule:
    """A schedule that costs no more than `schedule` and peaks within the larger of the budget and
    the peak of `schedule`, without the recomputations that it can do without."""
    lives = Lives(problem, schedule)
    limit = max(budget_bytes, lives.peak_bytes)
    dropped = True
    while dropped:
        dropped = False
        for position in sorted(lives.recomputations(),
                               key=lambda p: (-problem.ops[schedule[p]].cost, -p)):
            if lives.alive[position]:
                gone = lives.drop_with_causes(position)
                if lives.peak_bytes > limit:
                    for other in reversed(gone):
                        lives.restore(other)
                else:
                    dropped = True
    return lives.schedule


class Lives:
    """The instances of a schedule and memory at each of its positions, kept up to date while
    recomputations are dropped and restored.  Agrees with `solvers.simulator` at every step; a drop
    takes time in proportion to what it touches.
    """

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        timeline = unroll(problem, schedule)
        self._problem = problem
        self._runs = schedule
        self._segments = timeline.segments
        self._taken = list(timeline.inplace_of)
        self.alive = [True] * len(schedule)
        """Whether the run at each position is still there."""
        self._memory = np.array(timeline.memory_bytes, dtype=np.int64)
        self._absent = int(self._memory.max()) * 2 + 1  # pushes dropped positions below any peak
        self._births: list[list[int]] = [[] for _ in problem.storages]
        self._reads: list[list[int]] = [[] for _ in problem.storages]
        self._positions: list[list[int]] = [[] for _ in problem.ops]
        for position, index in enumerate(schedule):
            self._positions[index].append(position)
            for storage in problem.ops[index].inputs:
                self._reads[storage].append(position)
            for storage in problem.ops[index].outputs:
                self._births[storage].append(position)

    @property
    def schedule(self) -> Schedule:
        """The runs that are still there."""
        return tuple(op for op, alive in zip(self._runs, self.alive, strict=True) if alive)

    @property
    def peak_bytes(self) -> int:
        """The peak over the runs that are still there."""
        return int(self._memory.max())

    def recomputations(self) -> list[int]:
        """Positions of all runs that are still there but the first of each op."""
        return [p for positions in self._positions for p in positions[1:]]

    def drop_with_causes(self, position: int) -> list[int]:
        """Drop the recomputation at `position` and, one after another, those whose outputs no run
        reads any more; the positions dropped, in order."""
        gone, queue = [], [position]
        while queue:
            here = queue.pop()
            if not self.alive[here]:
                continue
            sources = [self._source(s, here) for s in self._problem.ops[self._runs[here]].inputs]
            self.drop(here)
            gone.append(here)
            queue.extend(source for source in sources if self._useless(source))
        return gone

    def drop(self, position: int) -> None:
        """Take the recomputation at `position` out."""
        self._change(position, present=False)

    def restore(self, position: int) -> None:
        """Put the recomputation at `position` back."""
        self._change(position, present=True)

    def _change(self, position: int, present: bool) -> None:
        index = self._runs[position]
        op = self._problem.ops[index]
        touched = (*op.inputs, *op.outputs)
        if not present:
            self._settle_takeover(position, absent=True)
        deaths = self._add_lives(touched, -1)
        self._add_replay_state(index, -1)
        edit = insort if present else _remove
        for storage in op.inputs:
            edit(self._reads[storage], position)
        for storage in op.outputs:
            edit(self._births[storage], position)
        edit(self._positions[index], position)
        self.alive[position] = present
        self._memory[position] += self._absent if present else -self._absent
        self._add_replay_state(index, +1)
        deaths |= self._add_lives(touched, +1)
        for death in deaths | {position}:
            if self.alive[death]:
                self._settle_takeover(death)

    def _add_lives(self, touched: tuple[int, ...], sign: int) -> set[int]:
        """Add or subtract the lives of storages; the positions at which they die."""
        deaths = set()
        for storage in touched:
            size = self._problem.storages[storage].size_bytes * sign
            for birth, death in self._lives(storage):
                self._memory[birth:death + 1] += size
                deaths.add(death)
        return deaths

    def _lives(self, storage: int) -> list[tuple[int, int]]:
        """First and last position of each instance of a storage."""
        births, reads = self._births[storage], self._reads[storage]
        if self._problem.storages[storage].kept_to_end:
            return [(births[0], len(self._runs) - 1), *((b, b) for b in births[1:])]
        lives = []
        for which, birth in enumerate(births):
            end = births[which + 1] if which + 1 < len(births) else len(self._runs)
            last = bisect_left(reads, end) - 1
            lives.append((birth, reads[last] if last >= 0 and reads[last] > birth else birth))
        return lives

    def _add_replay_state(self, index: int, sign: int) -> None:
        size = self._problem.ops[index].replay_state_bytes
        positions = self._positions[index]
        if size and len(positions) > 1:
            self._memory[positions[0]:positions[-1] + 1] += size * sign

    def _settle_takeover(self, position: int, absent: bool = False) -> None:
        """Bring what the run at `position` takes over up to date."""
        op = self._problem.ops[self._runs[position]]
        if not op.inplace:
            return
        storages = self._problem.storages
        if self._taken[position] is not None:
            self._memory[position] += storages[self._taken[position]].size_bytes
        self._taken[position] = None
        if absent:
            return
        for storage in op.inplace:
            birth = self._source(storage, position)
            if (not storages[storage].kept_to_end and self._dies(storage, position)
                    and self._segments[birth] == self._segments[position]):
                self._taken[position] = storage
                self._memory[position] -= storages[storage].size_bytes
                return

    def _source(self, storage: int, position: int) -> int:
        """Position of the run that makes the instance which a reader at `position` uses."""
        births = self._births[storage]
        if self._problem.storages[storage].kept_to_end:
            return births[0]
        return births[bisect_left(births, position) - 1]

    def _dies(self, storage: int, position: int) -> bool:
        """Whether no run reads this instance after `position`."""
        births, reads = self._births[storage], self._reads[storage]
        after = bisect_right(reads, position)
        if after == len(reads):
            return True
        reborn = bisect_right(births, position)
        return reborn < len(births) and births[reborn] < reads[after]

    def _useless(self, position: int) -> bool:
        """Whether the run at `position` is a recomputation that no run reads."""
        index = self._runs[position]
        if not self.alive[position] or self._positions[index][0] == position:
            return False
        return not any(
            birth == position and death > position
            for storage in self._problem.ops[index].outputs
            for birth, death in self._lives(storage)
        )


def _remove(positions: list[int], position: int) -> None:
    del positions[bisect_left(positions, position)]
