"""From a training graph to the problem that the solvers know, op by op and buffer by buffer.

Only ops of the forward may run again, and only where the applied model can put them: in the
forward that they belong to and in that region's own backward.  The loss is the user's own code, so
nothing is replayed in it, and a recomputation just before it has no place to stand.

Resident memory is not part of the problem; `planner.accounting` adds it.
"""

from __future__ import annotations

from graph_capture.training_graph import Phase, TrainingGraph, TrainingOp
from solvers.problem import Op, Problem, Segment, Storage


def lower(graph: TrainingGraph) -> Problem:
    """The scheduling problem of `graph`: op i is op i, buffer j is storage j, seconds are cost."""
    return Problem(
        ops=tuple(_lower_op(op) for op in graph.ops),
        storages=tuple(Storage(size_bytes=buffer.size_bytes, producer=buffer.producer,
                               kept_to_end=buffer.kept_to_end) for buffer in graph.buffers),
        segments=_segments(graph),
        name="training step",
    )


def _lower_op(op: TrainingOp) -> Op:
    return Op(
        name=op.name,
        cost=op.seconds,
        inputs=op.inputs,
        outputs=op.outputs,
        workspace_bytes=op.workspace_bytes,
        recomputable=op.phase is Phase.FORWARD and not op.pinned,
        inplace=op.inplace,
        replay_state_bytes=op.replay_state_bytes,
    )


def _segments(graph: TrainingGraph) -> tuple[Segment, ...]:
    """One segment for each run of ops of the same region and direction."""
    segments: list[Segment] = []
    forward_of: dict[int, int] = {}  # region to the segment of its forward
    previous: tuple[int, Phase] | None = None
    for index, op in enumerate(graph.ops):
        here = (op.region, op.phase)
        if here == previous:
            continue
        previous = here
        if op.region >= 0 and op.phase is Phase.FORWARD:
            forward_of[op.region] = len(segments)
        home = forward_of.get(op.region)
        segments.append(Segment(start=index, replays=() if home is None else (home,)))
    return tuple(segments)
