"""Compare a captured region with the step of a rewrite spec.

A rewrite spec contains the whole step that its schedule was simulated on.  The captured region is
compared with it: the inputs, outputs and sizes of each op, the operands that it may be written
over, whether it may run again and what that needs.  If nothing is understated, the schedule is
legal for the region and uses no more memory than the simulator found.

Blind spots: ops outside of the regions are not compared.  In a graph that Inductor compiles, sizes
are those of buffers that leave a kernel; they are not compared, but the code is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner._apply.rewrite_spec import RewriteSpec, RunAgain
from planner._graph_capture.joint_graph.joint import tensors_of
from planner._graph_capture.joint_graph.lower import LoweredOp, LoweredRegion
from planner._graph_capture.training_graph import Phase, TrainingOp


def difference_from_step(spec: RewriteSpec, index: int, lowered: LoweredRegion, *,
                         may_be_larger: bool = False) -> str | None:
    """Describe the first op that differs between the rewrite spec and the region, its `index`-th;
    `None` if there is none, and for a rewrite spec without a step.

    Sizes may be smaller than stated; larger ones only with `may_be_larger`.
    """
    if not spec.ops:
        return None
    planned = [op for op in spec.ops if op.region == index and op.digest]
    if [op.name for op in planned] != [op.name for op in lowered.ops]:
        return f"the plan has other ops than region {index} of the model"
    if spec.regions[index].elided != lowered.elided:
        return (f"the plan makes no outputs {list(spec.regions[index].elided)} of region "
                f"{index}, the model's code can do without {list(lowered.elided)}")
    return _Comparison(spec, index, lowered, planned, may_be_larger).first_difference()


def outputs_let_go(spec: RewriteSpec, index: int, lowered: LoweredRegion) -> tuple[int, ...]:
    """Return the places of the outputs of a region's forward, not counting mutated inputs, that the
    caller must release before the backward, according to the rewrite spec."""
    released = set(spec.regions[index].released)
    if spec.ops and len(spec.regions) == 1:  # else code between regions may keep them alive
        planned = {op.name: op for op in spec.ops}
        held = {buffer for op in spec.ops if not op.digest for buffer in op.inputs}
        held |= {place for place, buffer in enumerate(spec.buffers) if buffer.kept_to_end}
        # Tensors that the plan itself saves for the backward exist anyway.
        again = {action.op for group in spec.regions[index].insertions
                 for action in group.actions if isinstance(action, RunAgain)}
        held |= {buffer for op in spec.ops if op.phase is Phase.BACKWARD for buffer in op.inputs
                 if spec.ops[spec.buffers[buffer].producer].name not in again}
        made = {storage for op in lowered.ops for storage, buffer in zip(
            op.outputs, planned[op.name].outputs, strict=True) if buffer not in held}
        released |= {place for place, node in enumerate(lowered.returned)
                     if node is not None and lowered.storage_of.get(node) in made}
    return tuple(sorted(released))


class _Comparison:
    def __init__(self, spec: RewriteSpec, index: int, lowered: LoweredRegion,
                 planned: Sequence[TrainingOp], may_be_larger: bool) -> None:
        self._may_be_larger = may_be_larger
        self._spec, self._region, self._lowered = spec, spec.regions[index], lowered
        self._is_eager = spec.backend == "eager"
        self._pairs = list(zip(lowered.ops, planned, strict=True))
        self._made: dict[int, int] = {}
        """Storage that an op of the region makes -> its buffer."""
        self._cotangent: dict[int, set[int]] = {}
        """Storage of a cotangent -> buffers that it may be."""

    def first_difference(self) -> str | None:
        for op, planned in self._pairs:
            if len(op.outputs) != len(planned.outputs):
                return (f"the plan says that {op.name} makes {len(planned.outputs)} results, it "
                        f"makes {len(op.outputs)}")
            self._made.update(zip(op.outputs, planned.outputs, strict=True))
        buffers = set(self._made.values())
        for storage in self._lowered.cotangent_storages:
            if storage is not None:
                self._cotangent[storage] = {
                    place for op, planned in self._pairs if storage in op.inputs
                    for place in planned.inputs} - buffers
        for op, planned in self._pairs:
            difference = self._of_op(op, planned)
            if difference is not None:
                return f"the plan says that {op.name} {difference}"
        return self._of_reuses() or self._of_what_leaves()

    def _of_op(self, op: LoweredOp, planned: TrainingOp) -> str | None:
        for storage in op.inputs:
            if storage in self._made:
                if self._made[storage] not in planned.inputs:
                    return f"does not read what {self._maker_of(storage)} makes, which it reads"
            else:
                self._cotangent[storage] &= set(planned.inputs)
                if not self._cotangent[storage]:
                    return "does not read a gradient of an output, which it reads"
        if planned.phase is Phase.FORWARD and op.replay.pinned and not planned.pinned:
            return f"may run again; it may not: {op.replay.pinned}"
        if not self._is_eager:
            return None
        for storage, buffer in zip(op.outputs, planned.outputs, strict=True):
            stated, found = (self._spec.buffers[buffer].size_bytes,
                             self._lowered.storages[storage].size_bytes)
            if found > stated and not self._may_be_larger:
                return f"makes {stated:,} bytes, it makes {found:,}"
        sample = next(iter(tensors_of(op.node.meta.get("val"))), None)
        if sample is not None and not planned.pinned:
            needed = op.replay.state_bytes(sample.device)
            if needed > planned.replay_state_bytes and not self._may_be_larger:
                return (f"holds {planned.replay_state_bytes:,} bytes to run again, it holds "
                        f"{needed:,}")
        for buffer in planned.inplace:
            if not any(self._may_be(storage, buffer) for storage in op.inplace):
                return f"may write its result over buffer {buffer}, it may not"
        return None

    def _may_be(self, storage: int, buffer: int) -> bool:
        return (self._made[storage] == buffer if storage in self._made
                else buffer in self._cotangent[storage])

    def _of_reuses(self) -> str | None:
        """Compare in-place runs: the overwritten operand is given by its place among the
        candidates."""
        planned_of: Mapping[str, tuple[LoweredOp, TrainingOp]] = {
            op.name: (op, planned) for op, planned in self._pairs}
        for reuse in self._region.inplace_reuses:
            op, planned = planned_of[reuse.op]
            if not (reuse.candidate < min(len(op.inplace), len(planned.inplace)) and self._may_be(
                    op.inplace[reuse.candidate], planned.inplace[reuse.candidate])):
                return (f"the plan says that {reuse.op} writes its result over candidate "
                        f"{reuse.candidate}, which is another operand or none")
        return None

    def _of_what_leaves(self) -> str | None:
        """Compare the outputs of the region: gradients, and copies into inputs.  Others keep them
        alive, to the end or for a while.  An output that nobody is stated to keep alive is not
        written over."""
        ours = {id(planned) for _, planned in self._pairs}
        held = {buffer for op in self._spec.ops if id(op) not in ours for buffer in op.inputs}
        held |= {place for place, buffer in enumerate(self._spec.buffers) if buffer.kept_to_end}
        region = self._lowered
        for storage in (*(storage for storage, _ in region.gradient_storages),
                        *region.mutation_sources):
            if storage in self._made and self._made[storage] not in held:
                return (f"the plan lets go what {self._maker_of(storage)} makes, which leaves "
                        "the graph")
        outputs = {storage for storage in region.held_outputs
                   if storage in self._made and self._made[storage] not in held}
        for reuse in self._region.inplace_reuses:
            op = next(op for op, _ in self._pairs if op.name == reuse.op)
            if op.inplace[reuse.candidate] in outputs:
                return (f"the plan lets {op.name} write over what "
                        f"{self._maker_of(op.inplace[reuse.candidate])} makes, which is an output")
        return None

    def _maker_of(self, storage: int) -> str:
        return self._lowered.ops[self._lowered.storages[storage].producer].name
