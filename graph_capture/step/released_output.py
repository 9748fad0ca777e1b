"""A step whose caller releases the model's output before the backward.

The model of the world: a step is assembled as if the output lived to its end.  A caller that keeps
the loss alone (`loss = model(**batch).loss`) keeps the rest of the output only until the loss is
computed; tensors that the loss's own backward needs live until then.  Where the model's backward
needs a part of the output, it saves or recomputes that like any activation.

Blind spot: within the loss, the output is assumed to be alive from beginning to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner._graph_capture.plain_step.loss import Until
from planner._graph_capture.training_graph import (
    LOSS_BACKWARD,
    Phase,
    Region,
    TrainingGraph,
    pseudo_op,
)

OUTPUT_RELEASED = "loss/output released#0"
"""Name of the pseudo-op after which the output is no longer alive."""


def with_output_released(graph: TrainingGraph, lives: Sequence[Until]) -> TrainingGraph:
    """The step in which the output is released; `lives`: lifetime of each tensor of it."""
    read = {buffer for op in graph.ops if op.phase is Phase.BACKWARD for buffer in op.inputs}
    until = {each: max((lives[tensor] for tensor in each.tensors), key=[*Until].index,
                       default=Until.END)
             for each in graph.outputs if graph.buffers[each.buffer].kept_to_end}
    until = {each: end if end is not Until.MODEL_BACKWARD else (
                Until.LOSS_BACKWARD if each.buffer in read else Until.END)
             for each, end in until.items()}
    released = [each for each, end in until.items() if end is not Until.END]
    if not released:
        return graph
    start = graph.index_of[LOSS_BACKWARD]
    going = tuple(each.buffer for each in released)
    ops = [*graph.ops[:start], pseudo_op(OUTPUT_RELEASED, Phase.LOSS, -1, going, ()),
           *graph.ops[start:]]
    # The backward of the loss ends at the last op before the model's own backward.
    last = min(region.backward.start for region in graph.regions)
    needed = [each.buffer for each in released if until[each] is Until.LOSS_BACKWARD]
    ops[last] = replace(ops[last], inputs=tuple(dict.fromkeys((*ops[last].inputs, *needed))))
    return replace(
        graph, ops=tuple(ops),
        buffers=tuple(replace(
            buffer, producer=buffer.producer + (buffer.producer >= start),
            kept_to_end=buffer.kept_to_end and index not in going)
                      for index, buffer in enumerate(graph.buffers)),
        regions=tuple(_moved(region, tuple(sorted(
            place for each in released if each.region == number for place in each.places)))
                      for number, region in enumerate(graph.regions)))


def _moved(region: Region, released: tuple[int, ...]) -> Region:
    backward = range(region.backward.start + 1, region.backward.stop + 1)
    return replace(region, backward=backward, released=released)
