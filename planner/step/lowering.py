"""Lower a training graph to the solvers' problem, op by op and buffer by buffer.

Only ops of the forward may run again, and only where the applied model can place them: in their own
forward and in the same region's backward.  The loss, the sums of gradients between regions and
autograd's copies of finished gradients are outside the captured graphs: nothing is replayed in
them, and a recomputation cannot be placed just before them.

With a link to the host, buffers that the forward saves for its own backward, and no others, may be
stored there.  A GPU's slot has the bandwidth of its PCIe generation, in both directions at the same
time, minus protocol overhead; each copy is launched like an op.

Resident memory is not part of the problem; `planner.step.breakdown` adds it.

Blind spots: a slot with fewer lanes, a switch or a host shared with other GPUs, hosts with several
sockets.  `planner.Gpu(host_link_gb=...)` sets another bandwidth.
"""

from __future__ import annotations

import torch

from planner._graph_capture.op_costs.devices import device_model
from planner._graph_capture.training_graph import (
    KEPT_BY_USER,
    RUNS_SEVERAL_TIMES,
    Category,
    Phase,
    TrainingGraph,
)
from planner.arguments.planning import Planning
from planner.solvers.problem import Link, Op, Problem, Segment, Storage


def lower(graph: TrainingGraph, link: Link | None = None) -> Problem:
    """The scheduling problem of `graph`: op i is op i, buffer j is storage j, seconds are cost.
    `link`: to the host, if results may be stored there."""
    saved = frozenset[int]() if link is None else _saved_within_regions(graph)
    return Problem(
        ops=tuple(Op(
            name=op.name, cost=op.seconds, inputs=op.inputs, outputs=op.outputs,
            workspace_bytes=op.workspace_bytes, inplace=op.inplace,
            recomputable=op.phase is Phase.FORWARD and not op.pinned,
            replay_state_bytes=op.replay_state_bytes) for op in graph.ops),
        storages=tuple(Storage(size_bytes=buffer.size_bytes, producer=buffer.producer,
                               kept_to_end=buffer.kept_to_end, offloadable=index in saved)
                       for index, buffer in enumerate(graph.buffers)),
        segments=_segments(graph),
        name="training step",
        link=link,
    )


def _saved_within_regions(graph: TrainingGraph) -> frozenset[int]:
    """Buffers that the forward of a region produces for itself and its own backward, and that no
    other code of the model or of its caller references."""
    regions: list[set[int]] = [set() for _ in graph.buffers]
    read_in_backward: set[int] = set()
    for op in graph.ops:
        for buffer in op.inputs:
            regions[buffer].add(op.region if op.digest else -1)
            if op.phase is Phase.BACKWARD:
                read_in_backward.add(buffer)
    return frozenset(
        index for index, buffer in enumerate(graph.buffers)
        for maker in (graph.ops[buffer.producer],)
        if buffer.kind is Category.ACTIVATIONS and not buffer.kept_to_end
        and maker.phase is Phase.FORWARD and maker.digest and maker.region >= 0
        and maker.pinned not in (KEPT_BY_USER, RUNS_SEVERAL_TIMES)
        and index in read_in_backward and regions[index] == {maker.region})


def _segments(graph: TrainingGraph) -> tuple[Segment, ...]:
    """One segment per run of ops of the same region and direction; pseudo-ops of the backward
    (without a digest), and the backward of a region that makes views alone, are segments without
    replays."""
    segments: list[Segment] = []
    forward_of: dict[int, int] = {}  # region to the segment of its forward
    previous: tuple[int, Phase, bool] | None = None
    for index, op in enumerate(graph.ops):
        ours = op.region >= 0 and (op.phase is Phase.FORWARD or bool(op.digest))
        here = (op.region, op.phase, ours)
        if here == previous:
            continue
        previous = here
        if ours and op.phase is Phase.FORWARD:
            forward_of[op.region] = len(segments)
        replays = (forward_of[op.region],) if ours and op.region in forward_of else ()
        segments.append(Segment(start=index, replays=replays))
    return tuple(segments)


def host_link(planning: Planning, device: str) -> Link | None:
    """The host link of the device of `planning`; `None` if storing is not allowed.

    Raises `ValueError` if the device has no memory of its own.
    """
    if "offload" not in planning.allow:
        return None
    model = device_model(device, gpu=planning.gpu)
    if model.gpu is None:
        raise ValueError(f'allow="offload" on the device `{torch.device(device)}`: its results are '
                         'in the memory of the host already; plan for device="cuda", or leave '
                         '"offload" out')
    return Link(model.host_bytes_per_second, model.launch_seconds)
