"""One training step of a fake copy, divided into regions by Dynamo and AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner._graph_capture.dynamo.record import Recording, record_step
from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.memory.tracker import Workspace
from planner._graph_capture.plain_step.loss import LossFn, objective
from planner._graph_capture.rank import Wrapper
from planner._graph_capture.torch_compat import aot_backend


def record_training_step(
    fake_copy: FakeCopy, loss_fn: LossFn | None, workspace: Workspace, blocks: Sequence[str], *,
    compiled: bool, wrapper: Wrapper | None = None, holds_output: bool = True,
    captures_rest: bool = False,
) -> tuple[Recording, object]:
    """One captured step of the fake copy, and what its forward returned; `compiled`: as Inductor
    would partition it, with the graphs kept for it.  `wrapper`: what data parallelism does
    meanwhile. `holds_output`: the caller holds the output until the backward ends.
    `captures_rest`: what stands around blocks is captured too.

    `compiled`: capture the joint graph as Inductor would partition it, and keep the graphs for
    Inductor.  `wrapper`: data parallelism during the step.  `holds_output`: the caller keeps the
    output alive until the backward ends.

    Some models change in their first call (transformers installs hooks), which breaks the graph
    once.  So a step of several regions, or of none, is captured again.
    """
    wrapper = wrapper or Wrapper()
    first = _record_once(fake_copy, loss_fn, workspace, blocks, compiled, wrapper, holds_output,
                         captures_rest)
    if (blocks and first[0].is_repeatable) or len(first[0].calls) == 1:
        first[0].check_repeatable()
        return first
    again = _record_once(fake_copy, loss_fn, workspace, blocks, compiled, wrapper, holds_output,
                         captures_rest)
    is_better = again[0].calls and (
        not first[0].calls or not first[0].is_repeatable
        or len(again[0].calls) < len(first[0].calls))
    chosen = again if is_better else first
    chosen[0].check_repeatable()
    return chosen


def _record_once(fake_copy: FakeCopy, loss_fn: LossFn | None, workspace: Workspace,
                 blocks: Sequence[str], compiled: bool, wrapper: Wrapper, holds_output: bool,
                 captures_rest: bool) -> tuple[Recording, object]:
    outputs: list[object] = []

    def run(model: Callable[..., Any], before_backward: Callable[[], object]) -> object:
        with fake_copy.forward_context():
            output = fake_copy.call(model)
            if holds_output or not outputs:  # Keep that of the run that captures graphs.
                outputs.append(output)
            goal = objective(output, loss_fn)
        del output
        before_backward()
        goal.backward()
        return goal, wrapper.finish()

    return record_step(fake_copy, run, workspace, blocks, _recorder if compiled else aot_backend,
                       wrapper, keep_graphs=compiled, captures_rest=captures_rest), outputs[0]


def _recorder(partition: Callable[..., Any], forward: Callable[..., Any],
              backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that passes `partition` the joint graph as Inductor would partition it."""
    from planner._graph_capture.torch_compat.inductor import inductor_backend

    return inductor_backend(
        partition, "recorder", compile_graph=lambda graph, inputs, is_backward: (
            backward if is_backward else forward)(graph, inputs))
