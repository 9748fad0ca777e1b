"""Propose known remedies that lower the peak of a training loop, each with the resulting peak.

If a remedy changes only the loop or the optimizer, the changed loop is composed and evaluated like
the present one, and the figure is exact.  If it changes the model's own step, the figure is an
estimate from the blocks concerned.

Blind spots: remedies are evaluated one at a time; estimates assume that activations and temporaries
grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner._graph_capture.memory.trace import Block, Category
from planner.step.loop_trace import LoopTrace, MicroBatches, StepPhase, TrainingLoop, compose
from planner.training_loop.breakdown import Floor, breakdown_of
from planner.training_loop.report import Proposal

if TYPE_CHECKING:
    from planner._graph_capture.optimizer.step import OptimizerSettings, OptimizerTrace
    from planner._graph_capture.plain_step.loop import PlainLoop

_WORTH = 0.99
"""A remedy is proposed if it lowers the peak below this fraction of the present one."""
_SHARE = 0.2
"""Share of the peak below which a tensor is not considered."""
_CHUNKS = 8
_CROSS_ENTROPY = frozenset({
    "aten._log_softmax", "aten._log_softmax_backward_data", "aten.nll_loss_forward",
    "aten.nll_loss_backward", "aten.nll_loss2d_forward", "aten.nll_loss2d_backward"})
_GROWS_WITH_BATCH = frozenset({Category.INPUTS, Category.ACTIVATIONS, Category.TEMPORARIES})


@dataclass(frozen=True)
class PresentLoop:
    """A training loop and its parts."""

    trace: LoopTrace
    loop: TrainingLoop
    plain: PlainLoop
    micro_batches: MicroBatches
    optimizer: Any
    """As given by the user; `None` for none."""
    traced: OptimizerTrace | None
    settings: OptimizerSettings
    floor: Floor
    planned: bool


def propose(present: PresentLoop) -> tuple[Proposal, ...]:
    """The remedies that lower the peak by more than a hundredth, the most effective first."""
    peak = breakdown_of(present.trace).peak_bytes
    found = [proposal for remedy in (_loop_remedies, _optimizer_remedies, _step_remedies)
             for proposal in remedy(present) if proposal.peak_bytes < _WORTH * peak]
    return tuple(sorted(found, key=lambda proposal: proposal.peak_bytes))


def _loop_remedies(present: PresentLoop) -> Iterator[Proposal]:
    loop = present.loop

    def with_loop(change: str, **changes: Any) -> Proposal:
        changed = compose(present.plain.resident(), present.micro_batches, present.traced,
                          replace(loop, **changes))
        return Proposal(change, breakdown_of(changed).peak_bytes, exact=True)

    if not loop.set_to_none:
        yield with_loop("release gradients between steps: zero_grad(set_to_none=True)",
                        set_to_none=True)
    if loop.zero_grad == "before_backward":
        yield with_loop("reset gradients before the forward instead of just before the backward",
                        zero_grad="after_step")
    if loop.hold_output == "loop":
        yield with_loop("let go of output, loss and batch at the end of each step: make the step "
                        "a function, or del the names", hold_output="step")
    if loop.hold_output != "backward":
        yield with_loop("let go of output and loss as the backward ends: del the names",
                        hold_output="backward")
    if loop.load_state_dict:
        yield with_loop("load the state dict on another device, or with assign=True",
                        load_state_dict=False)


def _optimizer_remedies(present: PresentLoop) -> Iterator[Proposal]:
    if present.optimizer is None or present.traced is None:
        return
    breakdown = breakdown_of(present.trace)
    peak = breakdown.peak_bytes
    in_step = breakdown.fullest.phase is StepPhase.OPTIMIZER_STEP
    variants: list[tuple[str, Any, Any, str]] = []
    if in_step:
        variants += [
            ("fused=True in the optimizer", present.optimizer, "fused", ""),
            ("foreach=False in the optimizer", present.optimizer, "for-loop", "slower on a GPU")]
    if breakdown.fullest.memory.optimizer > _SHARE * peak:
        variants.append(("Adafactor instead, whose state is a row and a column of each matrix",
                         "adafactor", None, "training takes another course"))
    for change, optimizer, implementation, caveat in variants:
        try:
            traced = present.plain.optimizer(
                optimizer, replace(present.settings, implementation=implementation))
        except Exception:  # an optimizer without that variant
            continue
        changed = compose(present.plain.resident(), present.micro_batches, traced, present.loop)
        yield Proposal(change, breakdown_of(changed).peak_bytes, exact=True, caveat=caveat)


def _step_remedies(present: PresentLoop) -> Iterator[Proposal]:
    trace = present.trace.trace
    breakdown = breakdown_of(present.trace)
    fullest = breakdown.fullest
    if fullest.phase not in (StepPhase.FORWARD, StepPhase.LOSS, StepPhase.BACKWARD):
        return
    if not present.planned:
        yield Proposal(
            "recompute activations: planner.plan(model, inputs, budget=...)",
            present.floor.size_bytes, exact=False,
            caveat="at the least; the plan says what it costs in time")
    in_loss = sum(trace.blocks[number].size_bytes for number in trace.alive_after(fullest.event)
                  if trace.blocks[number].op in _CROSS_ENTROPY)
    if in_loss > _SHARE * fullest.peak_bytes:
        yield Proposal(
            f"run the cross-entropy in {_CHUNKS} chunks, each with its backward: "
            'planner.plan(..., allow="chunk")',
            _peak_if(present.trace, lambda block: (
                block.size_bytes // _CHUNKS if block.op in _CROSS_ENTROPY else block.size_bytes)),
            exact=False)
    growing = sum(fullest.memory[category.value] for category in _GROWS_WITH_BATCH)
    adds_up = not present.plain.micro_batch().sparse_gradients
    if adds_up and growing > _SHARE * fullest.peak_bytes:
        halved = replace(present.loop, accumulation=2 * present.loop.accumulation)
        changed = compose(present.plain.resident(), present.micro_batches, present.traced, halved)
        yield Proposal(
            f"half of the micro-batch, with accumulation={halved.accumulation}",
            _peak_if(changed, lambda block: (
                block.size_bytes // 2 if block.category in _GROWS_WITH_BATCH
                else block.size_bytes)), exact=False)


def _peak_if(loop: LoopTrace, size_of: Callable[[Block], int]) -> int:
    """Peak of the loop if its blocks had other sizes; the optimizer's step keeps its own."""
    sizes = [size_of(block) for block in loop.trace.blocks]
    for span in loop.spans:
        if span.phase is StepPhase.OPTIMIZER_STEP:
            for event in loop.trace.events[span.start:span.stop]:
                if event >= 0:
                    sizes[event] = loop.trace.blocks[event].size_bytes
    level = peak = 0
    for event in loop.trace.events:
        level += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, level)
    return peak
