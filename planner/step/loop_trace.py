"""The whole training loop composed from its parts: every block that it allocates, in order.

Model of the world: parameters and buffers are loaded and the optimizer is created; then come
iterations, each of one or more micro-batches (forward, loss, backward) and an optimizer step. If
that step evaluates the model itself, by a closure, the micro-batches are within it, after a reset
of the gradients, and the last gradients stay until the next one. Two iterations represent all: in
the first the optimizer allocates its state and the parameters get their gradients; from the second
on everything repeats.  Two micro-batches represent any larger number: the first after a reset of
the gradients, and one that adds to them.

Parts are traced or planned separately (`graph_capture.plain_step.micro_batch`,
`graph_capture.optimizer.step`, `planner.step.planned_micro_batch`); this module decides what
outlives a part, and until when.

Blind spots: memory of the loop outside these parts (metrics, an average of the weights); a copy of
the next batch that is made ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from planner._graph_capture.memory.trace import Block, MemoryTrace, MicroBatch, OpRun
from planner._graph_capture.optimizer.step import OptimizerTrace
from planner._graph_capture.training_graph import Category

MicroBatches = Callable[[frozenset[str]], MicroBatch]
"""Function from the names of parameters that have a gradient before to the micro-batch."""


class StepPhase(StrEnum):
    """The parts of a training loop, in their order."""

    LOADING = "loading"
    """Parameters and buffers are moved to the device, the optimizer is created."""
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer step"
    """Includes unscaling and clipping of the gradients."""
    NEXT_ITERATION = "next iteration"
    """Memory that remains when the next batch is loaded."""


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """Settings of the user's training loop."""

    accumulation: int = 1
    """Micro-batches per optimizer step."""
    set_to_none: bool = True
    """As in `optimizer.zero_grad`: gradients are released between steps, or stay as zeros."""
    zero_grad: Literal["after_step", "before_backward"] = "after_step"
    """Point at which gradients are reset.  If just before the backward, those of the last step are
    alive during the forward; a reset before the forward is the same as after the step."""
    hold_output: Literal["backward", "step", "loop"] = "step"
    """Lifetime of the model's output and of the loss.  `backward`: to the end of the backward.
    `step`: they are local variables of a function that makes a whole step, rebound in each
    micro-batch. `loop`: they, and the batch, live until the next iteration rebinds them: a loop
    outside a function."""


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous part of the loop in one phase."""

    phase: StepPhase
    iteration: int
    """0 for loading, 1 for the first step, 2 for any later one."""
    start: int
    """Number of events before it."""
    stop: int
    """Number of events at its end."""


@dataclass(frozen=True, slots=True)
class LoopTrace:
    """Loading and two iterations, event by event."""

    trace: MemoryTrace
    spans: tuple[Span, ...]
    """In order; each begins at the end of the one before."""


def compose(resident: Sequence[Block], micro_batches: MicroBatches,
            optimizer: OptimizerTrace | None, loop: TrainingLoop) -> LoopTrace:
    """Compose the trace of the loop.

    `resident`: the blocks of parameters, buffers and inputs.  Without an optimizer its step is
    missing, and `model.zero_grad` resets the gradients.
    """
    return _Composer(resident, micro_batches, optimizer, loop).run()


class _Composer:
    def __init__(self, resident: Sequence[Block], micro_batches: MicroBatches,
                 optimizer: OptimizerTrace | None, loop: TrainingLoop) -> None:
        self.resident, self.micro_batches, self.loop = resident, micro_batches, loop
        self.optimizer = optimizer or OptimizerTrace("", MemoryTrace((), ()), 0, 0, 0, frozenset())
        self.resets_all = optimizer is None
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.runs: list[OpRun] = []
        self.spans: list[Span] = []
        self.of_optimizer: dict[int, int] = {}  # its blocks to ours
        self.batch: list[int] = []
        self.gradients: dict[str, list[int]] = {}  # parameter to blocks
        self.stale: list[int] = []  # gradients that are reset before the next backward
        self.output: list[int] = []
        self.loss: list[int] = []
        self.left: list[int] = []

    def run(self) -> LoopTrace:
        optimizer = self.optimizer
        self._begin(StepPhase.LOADING, 0)
        self._load()
        steps = ((optimizer.first_begins, optimizer.second_begins),
                 (optimizer.steady_begins, len(optimizer.trace.events)))
        for iteration, (start, stop) in enumerate(steps, start=1):
            evaluations = optimizer.evaluations_from(start, stop)
            if evaluations:
                self._step_by_closure(iteration, (start, *evaluations, stop))
            else:
                self._micro_batches(iteration)
                self._begin(StepPhase.OPTIMIZER_STEP, iteration)
                self._play_optimizer(start, stop)
                self._reset_gradients()
            self._release(self.left)
            if self.loop.hold_output != "loop":
                self._release(self.output)
                self._release(self.loss)
            self._begin(StepPhase.NEXT_ITERATION, iteration)
            self._next_batch()
        self._begin(StepPhase.NEXT_ITERATION, 2)
        return LoopTrace(MemoryTrace(tuple(self.blocks), tuple(self.events), tuple(self.runs)),
                         tuple(self.spans[:-1]))

    def _load(self) -> None:
        for block in self.resident:
            if block.category is not Category.INPUTS:
                self._make(block)
        self._play_optimizer(0, self.optimizer.first_begins)

    def _step_by_closure(self, iteration: int, events: Sequence[int]) -> None:
        """Play an optimizer step that evaluates the model after all but the first and last of
        `events`.

        The step returns the loss of the first evaluation, and releases the others.
        """
        returned: list[int] = []
        start, *evaluations, stop = events
        for event in evaluations:
            self._begin(StepPhase.OPTIMIZER_STEP, iteration)
            if iteration == 2 and event == evaluations[0]:
                self._grow()
            self._play_optimizer(start, event)
            start = event
            self._reset_gradients()
            self._micro_batches(iteration)
            self._release(self.output)
            if event == evaluations[0]:
                returned, self.loss = self.loss, []
            else:
                self._release(self.loss)
        self._begin(StepPhase.OPTIMIZER_STEP, iteration)
        self._play_optimizer(start, stop)
        self._release(returned)

    def _play_optimizer(self, start: int, stop: int) -> None:
        self._play(self.optimizer.trace, start, stop, self.of_optimizer)

    def _grow(self) -> None:
        """Advance the optimizer's state from the first step to the last one, which represents all
        later ones."""
        trace = self.optimizer.trace
        before, after = (dict.fromkeys(trace.alive_after(event)) for event in (
            self.optimizer.second_begins, self.optimizer.steady_begins))
        self._release([self.of_optimizer[block] for block in before if block not in after])
        for block in after:
            if block not in before:
                self.of_optimizer[block] = self._make(trace.blocks[block])

    def _micro_batches(self, iteration: int) -> None:
        for _ in range(min(self.loop.accumulation, 2)):
            self._micro_batch(iteration)

    def _micro_batch(self, iteration: int) -> None:
        self._begin(StepPhase.FORWARD, iteration)
        if not self.batch:
            self._make_batch()
        self._release(self.left)
        step = self.micro_batches(frozenset(self.gradients))
        ours: dict[int, int] = {}
        self._play(step.trace, 0, step.loss_begins, ours)
        self._release(self.output)  # the name is bound to the new one
        self._begin(StepPhase.LOSS, iteration)
        self._play(step.trace, step.loss_begins, step.backward_begins, ours)
        self._release(self.loss)
        self._begin(StepPhase.BACKWARD, iteration)
        self._release(self.stale)
        self._play(step.trace, step.backward_begins, len(step.trace.events), ours)
        for block, name in step.gradients.items():
            self.gradients.setdefault(name, []).append(ours[block])
        self.output = [ours[block] for block in sorted(step.output_blocks)]
        self.loss = [ours[block] for block in sorted(step.loss_blocks)]
        self.left = [ours[block] for block in sorted(step.left_blocks)]
        if self.loop.hold_output == "backward":
            self._release(self.output)
            self._release(self.loss)

    def _reset_gradients(self) -> None:
        if not self.loop.set_to_none:
            return
        reset = [name for name in self.gradients
                 if self.resets_all or name in self.optimizer.parameters]
        gone = [block for name in reset for block in self.gradients.pop(name)]
        if self.loop.zero_grad == "before_backward":
            self.stale = gone
        else:
            self._release(gone)

    def _make_batch(self) -> None:
        self.batch = [self._make(block) for block in self.resident
                      if block.category is Category.INPUTS]

    def _next_batch(self) -> None:
        """Outside a function, the last batch is alive until the next one is made."""
        if self.loop.hold_output == "loop":
            last = self.batch
            self._make_batch()
            self._release(last)

    def _begin(self, phase: StepPhase, iteration: int) -> None:
        here = len(self.events)
        if self.spans:
            self.spans[-1] = replace(self.spans[-1], stop=here)
        self.spans.append(Span(phase, iteration, here, here))

    def _make(self, block: Block) -> int:
        self.blocks.append(block)
        self.events.append(len(self.blocks) - 1)
        return len(self.blocks) - 1

    def _release(self, blocks: list[int]) -> None:
        """Release the blocks and clear the list."""
        self.events.extend(~block for block in blocks)
        blocks.clear()

    def _play(self, trace: MemoryTrace, start: int, stop: int, ours: dict[int, int]) -> None:
        """Append the events of a part from `start` to `stop`; `ours`: maps its blocks to those of
        the loop."""
        following = (run for run in trace.runs if start <= run.event < stop)
        run = next(following, None)
        for position in range(start, stop):
            while run is not None and run.event == position:
                self.runs.append(run._replace(event=len(self.events)))
                run = next(following, None)
            event = trace.events[position]
            if event >= 0:
                ours[event] = self._make(trace.blocks[event])
            else:
                self.events.append(~ours[~event])
