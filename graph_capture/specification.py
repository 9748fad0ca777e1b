"""The rules that every `TrainingGraph` obeys, and the checker that enforces them.

1. Ops are in the order of execution: forwards by region, the loss, backwards by region in reverse.
2. Names are unique; every captured op has a digest, every pseudo-op is pinned.
3. An op reads only buffers that an earlier op made, each listed once; a buffer is made by exactly
   the op that it names, which lists it.
4. No size, cost or count is negative; seconds are finite.
5. An in-place candidate is an input of the size of the op's only output.
6. Gradients are kept to the end and made in the backward; activations are not made there.
7. The ranges of a region hold exactly its forward and its backward ops.
"""

from __future__ import annotations

import math

from planner._graph_capture.training_graph import BufferKind, Phase, TrainingGraph, TrainingOp

_ORDER = {Phase.FORWARD: 0, Phase.LOSS: 1, Phase.BACKWARD: 2}


class MalformedGraph(AssertionError):
    """A graph that breaks its specification: a defect of the capture, not of the model."""


def check(graph: TrainingGraph) -> None:
    """Raise `MalformedGraph` with the first rule that `graph` breaks."""
    _check_order(graph)
    _check_names(graph)
    _check_buffers(graph)
    for op in graph.ops:
        _check_op(graph, op)
    _check_regions(graph)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise MalformedGraph(message)


def _check_order(graph: TrainingGraph) -> None:
    phases = [_ORDER[op.phase] for op in graph.ops]
    _require(phases == sorted(phases), "phases must come in the order forward, loss, backward")


def _check_names(graph: TrainingGraph) -> None:
    seen: set[str] = set()
    for op in graph.ops:
        _require(op.name not in seen, f"two ops are named {op.name}")
        seen.add(op.name)
        _require(bool(op.digest or op.pinned), f"{op.name} has neither a digest nor is it pinned")


def _check_buffers(graph: TrainingGraph) -> None:
    for index, buffer in enumerate(graph.buffers):
        _require(0 <= buffer.producer < len(graph.ops), f"buffer {index} has no producer")
        maker = graph.ops[buffer.producer]
        _require(index in maker.outputs, f"{maker.name} does not list buffer {index}")
        _require(buffer.size_bytes >= 0, f"buffer {index} has a negative size")
        if buffer.kind is BufferKind.GRADIENT:
            _require(buffer.kept_to_end and maker.phase is Phase.BACKWARD,
                     f"gradient {buffer.label} is not kept, or not made in the backward")
        if buffer.kind is BufferKind.ACTIVATION:
            _require(maker.phase is not Phase.BACKWARD or buffer.kept_to_end,
                     f"{maker.name} makes an activation in the backward")


def _check_op(graph: TrainingGraph, op: TrainingOp) -> None:
    index = graph.index_of[op.name]
    _require(len(set(op.inputs)) == len(op.inputs), f"{op.name} lists an input twice")
    for buffer in op.inputs:
        _require(graph.buffers[buffer].producer < index,
                 f"{op.name} reads buffer {buffer} before it is made")
    for buffer in op.outputs:
        _require(graph.buffers[buffer].producer == index,
                 f"{op.name} lists buffer {buffer}, which another op makes")
    for amount in (op.flops, op.bytes_moved, op.workspace_bytes, op.replay_state_bytes):
        _require(amount >= 0, f"{op.name} has a negative cost")
    _require(op.seconds >= 0 and math.isfinite(op.seconds), f"{op.name} has no finite duration")
    for buffer in op.inplace:
        _require(buffer in op.inputs and len(op.outputs) == 1 and graph.buffers[buffer].size_bytes
                 == graph.buffers[op.outputs[0]].size_bytes,
                 f"{op.name} cannot write its result over buffer {buffer}")


def _check_regions(graph: TrainingGraph) -> None:
    for number, region in enumerate(graph.regions):
        for phase, indices in ((Phase.FORWARD, region.forward), (Phase.BACKWARD, region.backward)):
            mine = [index for index, op in enumerate(graph.ops)
                    if op.region == number and op.phase is phase]
            _require(mine == list(indices),
                     f"the {phase.value} range of region {number} does not hold exactly its ops")
