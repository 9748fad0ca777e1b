"""A Lagrangian bound: each layer by itself, with a price on the bytes that it retains.

The model of the world: a forward part and a backward part, layers that repeat in the forward part
(`solvers.repetition`), and memory at the peak of the keep-all order, the *pivot*, shared by them.
With a price on each byte retained past the pivot the layers become independent.  In any schedule, a
layer's recomputations plus the price of its retained bytes cost at least the minimum of that layer
alone, solved with nothing else in memory except the bytes that are certainly there.  The sum over
the layers, minus the price of the whole headroom, is a bound for every legal schedule within the
budget, at any price.

A single layer is small enough to check memory everywhere in its backward; the model of the whole
(`solvers.cut_model`) can afford a few places only.  Layers that are alike are solved once, with the
largest headroom among them.

Blind spots: bytes that other layers retain during a layer's backward, and recomputations that serve
the next layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.solvers.cut_model import CutModel
from planner.solvers.frontiers import frontiers, region_after
from planner.solvers.problem import Op, Problem, Segment, Storage
from planner.solvers.repetition import Run
from planner.solvers.schedule_from_cuts import schedule_from_cuts
from planner.solvers.task import Task
from planner.solvers.violations import Inner, next_cuts
from planner.solvers.working_set import fixed_bytes, inplace_candidates

PRICES = 3
PRICE_STEP = 1.1
"""Ratio between neighbouring prices: the bound is concave in the price, and flat around the best
one."""
STEP = 0.05
"""The first price is the saving from this much more budget, as a fraction of the budget."""
MOST_CUTS = 6
"""Cuts in the backward of one layer."""
MOST_ROOMS = 12
"""Largest number of different headrooms among layers that are otherwise alike."""
NODES = 200
GAP = 2e-5
"""Layers are solved to within this fraction of the keep-all cost of the whole."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, cut out of a problem."""

    problem: Problem
    """Its forward ops, the pivot, the entry to its backward, and its backward.  Inputs from outside
    cost nothing and use no memory, except those that are alive throughout."""
    pivot: int
    """The op of the layer's problem that represents the pivot."""
    constant_bytes: int
    """Bytes alive throughout its backward: results of earlier ops that are kept to the end."""


def layers_of(problem: Problem, runs: Sequence[Run], pivot: int) -> list[Layer]:
    """Cut the ops that may be recomputed after the pivot where the stretches of each run meet and
    the least crosses from one to the next.  Returns nothing if nothing repeats."""
    region = region_after(problem, pivot)
    crossing = {f.position: f.size_bytes for f in frontiers(problem, region)}
    bounds: set[int] = set()
    for run in runs:
        if not crossing.keys() & range(run.start, run.stop):
            continue
        widths = [sum(crossing.get(op, 0) for op in range(run.start + shift, run.stop, run.period))
                  / len(range(run.start + shift, run.stop, run.period))
                  for shift in range(min(run.period, run.stop - run.start))]
        bounds.update(range(run.start + widths.index(min(widths)), run.stop, run.period))
    if not bounds:
        return []
    first, last = region.ops[0], region.ops[-1] + 1
    ends = [first, *sorted(b for b in bounds if first < b < last), last]
    chunks = (_cut_out(problem, list(range(start, stop)), pivot)
              for start, stop in pairwise(ends))
    return [piece for piece in chunks if piece is not None]


def _cut_out(problem: Problem, forward: list[int], pivot: int) -> Layer | None:
    ops, storages = problem.ops, problem.storages
    if problem.segment_of[forward[0]] != problem.segment_of[forward[-1]]:
        return None
    made = {s for op in forward for s in ops[op].outputs}
    readers = sorted({r for s in made for r in problem.consumers[s] if r > pivot})
    if not readers:
        return None
    backward = list(range(readers[0], readers[-1] + 1))
    if any(ops[op].recomputable for op in backward):
        return None
    arriving = sorted({s for op in backward for s in ops[op].inputs
                       if pivot < storages[s].producer < backward[0]
                       and not storages[s].kept_to_end
                       and not ops[storages[s].producer].recomputable})
    chosen: list[Op] = []
    inside: list[Storage] = []
    name: dict[int, int] = {}  # of a storage in the layer's problem

    def add(op: Op, outputs: Sequence[int]) -> None:
        for storage in outputs:
            name[storage] = len(inside)
            inside.append(Storage(storages[storage].size_bytes, len(chosen),
                                  storages[storage].kept_to_end))
        chosen.append(Op(
            "", op.cost, tuple(name[s] for s in op.inputs if s in name),
            tuple(name[s] for s in outputs), op.workspace_bytes, op.recomputable,
            tuple(name[s] for s in op.inplace if s in name), op.replay_state_bytes))

    stub = Op("", 0.0, (), (), recomputable=False)
    for op in forward:
        add(ops[op], ops[op].outputs)
    at = len(chosen)
    add(stub, ())
    add(stub, arriving)
    for op in backward:
        add(ops[op], ops[op].outputs)
    # An op may run again, or take over a buffer, here if it may in the problem.
    start = at + (problem.segment_of[pivot] == problem.segment_of[forward[0]])
    constant = sum(storage.size_bytes for s, storage in enumerate(storages)
                   if storage.kept_to_end and storage.producer < backward[0] and s not in made)
    segments = (Segment(0, (0,)), Segment(start, (0,)))
    return Layer(Problem(tuple(chosen), tuple(inside), segments), at, constant)


class BlockBound:
    """The bound of a problem under one budget, price by price.  Mutable."""

    def __init__(self, task: Task, runs: Sequence[Run], pivot: int) -> None:
        problem = task.problem
        self._task = task
        self._headroom = _shared_room(problem, task.budget_bytes, pivot)
        layers = layers_of(problem, runs, pivot)
        alike: defaultdict[Problem, list[int]] = defaultdict(list)
        for layer in layers:
            alike[layer.problem].append(task.budget_bytes - layer.constant_bytes)
        self._pivots = {layer.problem: layer.pivot for layer in layers}
        self._rooms = {layer: _with_most_room(rooms) for layer, rooms in alike.items()}
        self._cuts: dict[tuple[Problem, int], tuple[tuple[int, ...], Inner]] = {}
        self.work = 0.0
        """See `solvers.milp.MilpResult`."""

    def best(self, first_price: float) -> float:
        """Return a lower bound on the recomputation cost of every legal schedule within the budget.
        `first_price` (cost per byte) starts the search for the best price."""
        if not self._rooms:
            return 0.0
        best, price = 0.0, first_price
        for _ in range(PRICES):
            bound, retained = self._at(price)
            best = max(best, bound)
            if self._task.seconds_left <= 0:
                break
            price *= PRICE_STEP if retained > self._headroom else 1 / PRICE_STEP
        return best

    def _at(self, price: float) -> tuple[float, int]:
        """Return the bound at a price, and the bytes that all layers then retain."""
        bound, total = -price * self._headroom, 0
        for layer, rooms in self._rooms.items():
            for headroom, count in rooms.items():
                least, retained = self._alone(layer, headroom, price)
                bound += count * least
                total += count * retained
        return bound, total

    def _alone(self, layer: Problem, headroom: int, price: float) -> tuple[float, int]:
        """Return the minimum cost of one layer at a price, and the bytes that it then retains."""
        cuts, inner = self._cuts.get((layer, headroom), ((self._pivots[layer],), ()))
        least, retained = 0.0, 0
        while True:
            # Before the entry to the backward some of the bytes counted in the headroom do not
            # exist yet.
            rooms = (self._task.budget_bytes, *([headroom] * (len(cuts) - 1)))
            model = CutModel(layer, headroom, cuts, inner=inner, price=price, headroom_bytes=rooms)
            solution = model.solve(self._task.seconds_left, seed=self._task.seed, nodes=NODES,
                                   gap=GAP * self._task.problem.keep_all_cost)
            self.work += solution.work
            least = max(least, solution.extra_bound)
            if solution.retained is None:
                return least, retained
            retained = sum(layer.storages[s].size_bytes for s in solution.retained[0])
            self._cuts[layer, headroom] = cuts, inner
            further = next_cuts(
                layer,
                headroom,
                schedule_from_cuts(layer, cuts, solution.retained, early=True),
                cuts,
                inner,
                first=cuts[0] + 1,
            )
            if further is None or len(cuts) >= MOST_CUTS or not solution.solved:
                return least, retained
            cuts, inner = further


def _shared_room(problem: Problem, budget_bytes: int, pivot: int) -> int:
    """Upper bound on the bytes that the layers retain together past the pivot.  The inputs and
    outputs of the pivot itself are not counted, though the layers pay for them."""
    ops, storages = problem.ops, problem.storages
    op = ops[pivot]
    covered = region_after(problem, pivot).ops
    layers = range(covered[0], covered[-1] + 1) if covered else range(0)
    own = sum(storages[s].size_bytes for s in {*op.inputs, *op.outputs}
              if storages[s].producer in layers)
    # An input of a layer that the output takes over is in `own`: it is not retained then.
    taken = max((storages[s].size_bytes for s in inplace_candidates(problem, pivot)
                 if storages[s].producer not in layers and (
                     ops[storages[s].producer].recomputable or problem.consumers[s][-1] <= pivot)),
                default=0)
    return budget_bytes - fixed_bytes(problem, pivot) + own + taken


def _with_most_room(rooms: Collection[int]) -> dict[int, int]:
    """Count the layers by headroom; if there are many values, neighbours share the largest of
    theirs."""
    ordered = sorted(rooms)
    size = -(-len(ordered) // MOST_ROOMS)
    counts: defaultdict[int, int] = defaultdict(int)
    for start in range(0, len(ordered), size):
        group = ordered[start:start + size]
        counts[group[-1]] += len(group)
    return dict(counts)
