"""Local search over schedules: simulated annealing on single recomputations.

The idea of annealing on sequences is that of FastSA (Yonetsu et al., NeurIPS 2023); here the order
of first runs stays, and the recomputations move: one is put before a read, dropped, or moved, alone
or with the chain of recomputations that it needs.  The energy is the cost plus a price on the
excess over the budget, alternately the excess of all runs together and that of the peak; the price
follows how often the walk is within the budget.  `solvers.incremental` makes a move cost tens of
microseconds, so a minute sees millions.

Blind spot: it gives no bound.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from planner.solvers.incremental import EditableTimeline
from planner.solvers.problem import Order, Problem
from planner.solvers.simulator import simulate

_MOST_ROUNDS, _MOVES_OF_ROUND = 4, 12_000
"""A search cools down so often, each time from its best; fewer moves are too few to cool down."""
_AIMED = 0.25  # share of the moves of a search for a smaller peak
_AIMS = 12  # storages that an aimed move looks at
_FIRST_STEP, _SMALLEST_STEP, _LARGEST_STEP = 0.1, 0.004, 0.3
"""Part of what lies between a peak and the floor by which the next target is lower."""
_COOLING = 3_000  # moves from the highest temperature to the lowest, for one target
_MOVE_WORK, _MOVE_WORK_PER_OP = 3e-5, 2e-8
_BATCH = 128  # moves between two looks at the clock, the temperature and the price


def improve(problem: Problem, budget_bytes: int, schedule: Sequence[int], *, moves: int,
            time_limit: float = math.inf, seed: int = 0) -> Order:
    """Return a schedule within `budget_bytes` that costs no more than `schedule`, which must fit
    itself, after so many moves or `time_limit` seconds.

    Raises `ValueError` if `schedule` is over the budget, and `IllegalSchedule` if it is illegal.
    """
    start = tuple(schedule)
    before = simulate(problem, start)
    if before.peak_bytes > budget_bytes:
        raise ValueError(f"the schedule to improve peaks at {before.peak_bytes} bytes, over the "
                         f"budget of {budget_bytes}")
    found = _anneal(problem, budget_bytes, start, moves, time_limit, seed)
    if found is not None:
        after = simulate(problem, found)
        if after.peak_bytes <= budget_bytes and after.cost < before.cost:
            return found
    return start


def descend(problem: Problem, schedule: Order, floor_bytes: int, seed: int
            ) -> Iterator[tuple[Order, int]]:
    """Anneal for an ever smaller peak, down to `floor_bytes`: after each batch of moves the
    schedule with the smallest peak so far, and the number of moves in the batch.

    The walk is not begun anew when it meets its target: the target moves on.
    """
    best, peak = schedule, simulate(problem, schedule).peak_bytes
    walk = _Walk(problem, peak, schedule, seed, aims_at_peak=True)
    share, cooled = _FIRST_STEP, 0
    while walk.candidates and peak > floor_bytes:
        walk.aim_at(peak - max(1, int(share * (peak - floor_bytes))))
        while walk.best is None and cooled < _COOLING:
            walk.batch(walk.mean_cost * 0.6 * 0.02 ** (cooled / _COOLING))
            cooled += _BATCH
            if walk.best is None:
                yield best, _BATCH
        # Also before the first move: the walk may stand below its next target already.
        if walk.best is not None:
            best, peak = walk.best, simulate(problem, walk.best).peak_bytes
            share, cooled = min(1.2 * share, _LARGEST_STEP), max(0, cooled - _COOLING // 4)
            yield best, _BATCH
        else:
            share, cooled = max(share / 2, _SMALLEST_STEP), 0
            walk.start_from(best)


def move_work(problem: Problem) -> float:
    """Work of one move (see `solvers.milp.MilpResult`)."""
    return _MOVE_WORK + _MOVE_WORK_PER_OP * len(problem)


def _anneal(problem: Problem, budget: int, schedule: Order, moves: int, time_limit: float,
            seed: int) -> Order | None:
    """Return the best schedule within the budget that the walk met."""
    walk = _Walk(problem, budget, schedule, seed)
    if not walk.candidates:
        return walk.best
    deadline = time.monotonic() + time_limit
    rounds = max(1, min(_MOST_ROUNDS, moves // _MOVES_OF_ROUND))
    current = 0
    for done in range(0, moves, _BATCH):
        if time.monotonic() >= deadline:
            break
        number, within = divmod(done / moves * rounds, 1.0)
        if int(number) != current:
            current = int(number)
            walk.start_from(walk.best)
        # Each round cools from a lower start than the one before.
        walk.batch(walk.mean_cost * 0.6 * 0.6 ** current * 0.02 ** within)
    return walk.best


class _Walk:
    """A timeline, its energy, and the moves on it."""

    def __init__(self, problem: Problem, budget: int, schedule: Order, seed: int,
                 aims_at_peak: bool = False) -> None:
        self.problem = problem
        self.budget = budget
        self.aims_at_peak = aims_at_peak
        self.chance = random.Random(seed)
        self.timeline = EditableTimeline(problem, schedule)
        self.candidates = [
            index for index, storage in enumerate(problem.storages)
            if problem.ops[storage.producer].recomputable and problem.consumers[index]
            and not storage.kept_to_end]
        self.mean_cost = problem.keep_all_cost / len(problem) or 1.0
        mean_size = sum(s.size_bytes for s in problem.storages) / max(len(problem.storages), 1)
        self.price = 2.0 * self.mean_cost / max(mean_size, 1.0)
        self.peak_only = False
        self.excess = self._excess()
        self.best: Order | None = None
        self.best_cost = math.inf
        self.chain = 0  # recomputations that the current move may still add
        self._note()

    def _excess(self) -> float:
        if self.peak_only:
            return max(0.0, float(self.timeline.peak_bytes - self.budget))
        return float(np.maximum(self.timeline.memory_bytes - self.budget, 0).sum())

    def _note(self) -> None:
        if self.excess == 0 and self.timeline.cost < self.best_cost * (1 - 1e-12):
            self.best, self.best_cost = self.timeline.schedule, self.timeline.cost

    def aim_at(self, budget: int) -> None:
        """Look for what is within another budget, from where the walk stands."""
        self.budget, self.best, self.best_cost = budget, None, math.inf
        self.excess = self._excess()
        self._note()

    def start_from(self, schedule: Order | None) -> None:
        """Go to a schedule, if there is one, and look at the excess the other way."""
        if schedule is not None:
            self.timeline = EditableTimeline(self.problem, schedule)
        self.peak_only = not self.peak_only
        self.excess = self._excess()

    def batch(self, temperature: float) -> None:
        timeline, chance = self.timeline, self.chance
        energy = timeline.cost + self.price * self.excess
        within = 0
        for _ in range(_BATCH):
            if not self._move():
                timeline.rollback()
                continue
            excess = self._excess()
            fresh = timeline.cost + self.price * excess
            if fresh <= energy or chance.random() < math.exp((energy - fresh) / temperature):
                energy, self.excess = fresh, excess
                timeline.commit()
                self._note()
            else:
                timeline.rollback()
            within += self.excess == 0
        if within < 0.3 * _BATCH:
            self.price *= 1.05
        else:
            self.price /= 1.05

    def _move(self) -> bool:
        draw = self.chance.random()
        if draw < 0.35:
            if self.aims_at_peak and draw < _AIMED:
                return self._insert_across_peak()
            return self._insert(self.chance.choice(self.candidates))
        key = self._random_recomputation()
        if key is None:
            return self._insert(self.chance.choice(self.candidates))
        outputs = self.problem.ops[self.timeline.op_at[key]].outputs
        self.timeline.remove_with_causes(key)
        if draw > 0.65:
            where = self.chance.random()
            if outputs and where < 0.4:
                self._insert(self.chance.choice(outputs))
            elif outputs and where < 0.7:
                self._insert(self._neighbour(self.chance.choice(outputs)))
            else:
                self._insert(self.chance.choice(self.candidates))
        return True

    def _neighbour(self, storage: int) -> int:
        """Return a storage that the given one is made from, or that is made from it."""
        ops, chance = self.problem.ops, self.chance
        readers = self.problem.consumers[storage]
        sources = ops[self.problem.storages[storage].producer].inputs
        results = ops[chance.choice(readers)].outputs if readers else ()
        choices = (*sources, *results)
        return chance.choice(choices) if choices else storage

    def _random_recomputation(self) -> int | None:
        timeline = self.timeline
        count = len(timeline)
        if count == len(self.problem):
            return None
        for _ in range(64):
            position = int(self.chance.random() * count)
            key = timeline.keys[position]
            if timeline.first_keys[timeline.ops[position]] != key:
                return key
        return None

    def _insert_across_peak(self) -> bool:
        """Recompute, after a moment over the budget, a storage that is alive across it and not read
        there."""
        timeline, chance = self.timeline, self.chance
        over = np.flatnonzero(timeline.memory_bytes > self.budget)
        if not len(over):
            return False
        moment = timeline.keys[int(over[int(chance.random() * len(over))])]
        for _ in range(_AIMS):
            storage = chance.choice(self.candidates)
            lived = timeline.life(storage, moment)
            if lived is None or lived[1] <= moment:
                continue
            reads = timeline.reads[storage]
            index = bisect_left(reads, moment)
            if reads[index] == moment:
                continue
            self.chain = 1 if chance.random() < 0.5 else chance.choice((2, 3, 4, 6, 8, 12))
            return self._insert_op(self.problem.storages[storage].producer, reads[index])
        return False

    def _insert(self, storage: int) -> bool:
        """Recompute a storage somewhere between a read of it and the read before that."""
        if self.problem.storages[storage].kept_to_end:
            return False
        timeline, chance = self.timeline, self.chance
        reads, births = timeline.reads[storage], timeline.births[storage]
        if not reads or not self.problem.ops[
                self.problem.storages[storage].producer].recomputable:
            return False
        index = int(chance.random() * len(reads))
        read = reads[index]
        birth = births[bisect_left(births, read) - 1]
        previous = reads[index - 1] if index and reads[index - 1] > birth else birth
        low, high = timeline.position(previous) + 2, timeline.position(read)
        if low > high:
            return False
        position = high if chance.random() < 0.5 else chance.randint(low, high)
        self.chain = 1 if chance.random() < 0.5 else chance.choice((2, 3, 4, 6, 8, 12))
        return self._insert_op(self.problem.storages[storage].producer, timeline.keys[position])

    def _insert_op(self, op: int, before: int) -> bool:
        """Recompute `op` there, and perhaps its inputs, `self.chain` ops at most."""
        timeline = self.timeline
        if not timeline.may_insert(op, before):
            return False
        self.chain -= 1
        lives = [(s, timeline.life(s, before)) for s in self.problem.ops[op].inputs]
        key = timeline.insert(op, before)
        for storage, lived in lives:
            if self.chain > 0 and lived and lived[1] < key and self.chance.random() < 0.7:
                low, high = timeline.position(lived[1]), timeline.position(key)
                if high - low > 1:
                    self._insert_op(self.problem.storages[storage].producer, key)
        return True
