"""Forward, loss and backward under a plan, as allocated and released blocks.

Model of the world: that of the simulator (`solvers.simulator`); its timeline is converted to the
record of a traced plain step, so that the breakdown of the whole loop handles both.

The planned graphs return all gradients of a region at the end of its backward.  A parameter with an
earlier gradient therefore has both in full before they are summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from planner._graph_capture.memory.trace import Block, MemoryTrace, MicroBatch, OpRun
from planner._graph_capture.training_graph import (
    LOSS_BACKWARD,
    Buffer,
    Category,
    Phase,
    TrainingGraph,
    TrainingOp,
)
from planner.solvers.simulator import Timeline


def planned_micro_batch(graph: TrainingGraph, timeline: Timeline, parameters: Collection[str],
                        with_gradient: frozenset[str] = frozenset()) -> MicroBatch:
    """The micro-batch of the schedule that `timeline` unrolls.

    `parameters`: names of the model's parameters; `with_gradient`: those with an earlier gradient.
    """
    return _Planned(graph, timeline, frozenset(parameters), with_gradient).run()


class _Planned:
    def __init__(self, graph: TrainingGraph, timeline: Timeline, parameters: frozenset[str],
                 with_gradient: frozenset[str]) -> None:
        self.graph, self.timeline = graph, timeline
        self.parameters, self.with_gradient = parameters, with_gradient
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.runs: list[OpRun] = []
        self.alive: dict[int, int] = {}  # instance to block
        self.kept: dict[int, Buffer] = {}  # block to the buffer that is kept to the end
        self.replay_state: dict[int, int] = {}  # op to block
        self.born: defaultdict[int, list[int]] = defaultdict(list)
        self.gone: defaultdict[int, list[int]] = defaultdict(list)

    def run(self) -> MicroBatch:
        graph, schedule = self.graph, self.timeline.schedule
        first_of, last_of = self.timeline.first_runs, self.timeline.last_runs
        self._place_instances(first_of)
        loss_begins = 1 + max((first_of[i] for i, op in enumerate(graph.ops)
                               if op.phase is Phase.FORWARD), default=-1)
        backward_begins = 1 + max(
            (first_of[i] for i, op in enumerate(graph.ops)
             if op.phase is not Phase.BACKWARD and op.name != LOSS_BACKWARD), default=-1)
        before = []  # number of events before each action, and at the end
        for position, index in enumerate(schedule):
            before.append(len(self.events))
            if isinstance(index, int):
                self._run_op(position, index, first_of[index] == position, last_of[index])
            else:
                self._move(position, graph.ops[graph.buffers[index.storage].producer])
        before.append(len(self.events))
        kinds = {block: buffer.kind for block, buffer in self.kept.items()}
        gradients = {block: buffer.label for block, buffer in self.kept.items()
                     if buffer.kind is Category.GRADIENTS and buffer.label in self.parameters}
        return MicroBatch(
            trace=MemoryTrace(tuple(self.blocks), tuple(self.events), tuple(self.runs)),
            loss_begins=before[loss_begins], backward_begins=before[backward_begins],
            gradients=gradients,
            output_blocks=frozenset(b for b, kind in kinds.items()
                                    if kind is Category.ACTIVATIONS),
            loss_blocks=frozenset(b for b, kind in kinds.items()
                                  if kind is Category.TEMPORARIES),
            left_blocks=frozenset(b for b, kind in kinds.items()
                                  if kind is Category.GRADIENTS and b not in gradients))

    def _place_instances(self, first_of: dict[int, int]) -> None:
        """Record the birth and death of each instance of a buffer."""
        last = len(self.timeline.schedule) - 1
        seen: set[int] = set()
        for number, instance in enumerate(self.timeline.instances):
            buffer = self.graph.buffers[instance.storage]
            self.born[instance.birth].append(number)
            death: int | None = instance.death
            if buffer.kept_to_end and instance.storage not in seen and instance.death == last:
                seen.add(instance.storage)
                death = self._summed(buffer, instance.birth, first_of)
            if death is not None:
                self.gone[death].append(number)

    def _summed(self, buffer: Buffer, birth: int, first_of: dict[int, int]) -> int | None:
        """Position at which a kept gradient is added to an earlier one and released; `None` if it
        is not."""
        if buffer.kind is not Category.GRADIENTS or buffer.label not in self.with_gradient:
            return None
        region = self.graph.ops[buffer.producer].region
        if region < 0:  # from uncaptured code: autograd sums it at once
            return birth
        backward = self.graph.regions[region].backward
        return first_of[backward.stop - 1]

    def _run_op(self, position: int, index: int, first: bool, last: int) -> None:
        op = self.graph.ops[index]
        begun = len(self.events)
        if op.replay_state_bytes and first and last > position:
            self.replay_state[index] = self._make(op, op.replay_state_bytes, Category.ACTIVATIONS)
        taken = self.timeline.inplace_of[position]
        leaving = self.gone[position]
        for number in list(leaving):
            if self.timeline.instances[number].storage == taken and number in self.alive:
                self._release(number)  # the output reuses its buffer
                leaving.remove(number)
        for number in self.born[position]:
            buffer = self.graph.buffers[self.timeline.instances[number].storage]
            block = self._make(op, buffer.size_bytes, buffer.kind, buffer.label)
            self.alive[number] = block
            if buffer.kept_to_end:
                self.kept[block] = buffer
        if op.workspace_bytes:
            self.events.append(~self._make(op, op.workspace_bytes, Category.TEMPORARIES))
        self.runs.append(OpRun(begun, _name(op), op.module))
        for number in leaving:
            self._release(number)
        if index in self.replay_state and last == position:
            self.events.append(~self.replay_state.pop(index))

    def _move(self, position: int, maker: TrainingOp) -> None:
        """Record a transfer of a result of `maker`."""
        for number in self.born[position]:
            size_bytes = self.graph.buffers[self.timeline.instances[number].storage].size_bytes
            self.alive[number] = self._make(maker, size_bytes, Category.ACTIVATIONS)
        for number in self.gone[position]:
            self._release(number)

    def _make(self, op: TrainingOp, size_bytes: int, category: Category, label: str = "") -> int:
        self.blocks.append(Block(size_bytes, category, _name(op), op.module, label))
        self.events.append(len(self.blocks) - 1)
        return len(self.blocks) - 1

    def _release(self, number: int) -> None:
        block = self.alive.pop(number)
        self.events.append(~block)
        self.kept.pop(block, None)


def _name(op: TrainingOp) -> str:
    """The op's name without its overload, as the tracer of plain steps writes it."""
    return op.target.rpartition(".")[0] if op.target.count(".") > 1 else op.target
