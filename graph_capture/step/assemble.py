"""Assembles lowered regions, the loss between them, and costs into one `TrainingGraph`.

In addition to the captured ops a step has pseudo-ops, at which memory appears or must still be
alive although nothing of the model computes: mutated inputs are updated after a forward, autograd
makes the cotangent of the loss, a gradient in another layout than its parameter is copied, code
between two regions passes tensors on.  They have no cost and no digest, since a plan cannot
recompute them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from planner._graph_capture.dynamo.uncaptured import UncapturedCode
from planner._graph_capture.joint_graph.inplace import has_strides
from planner._graph_capture.joint_graph.lower import LoweredOp, epilogue_name, region_signature
from planner._graph_capture.memory.trace import COMMUNICATION
from planner._graph_capture.op_costs.costs import OpCost
from planner._graph_capture.optimizer.in_backward import EarlyGradients
from planner._graph_capture.plain_step.loss import LossFootprint
from planner._graph_capture.step.regions import RegionUse
from planner._graph_capture.torch_compat import AUTOGRAD_HOLDS_COTANGENTS
from planner._graph_capture.training_graph import (
    KEPT_BY_USER,
    LOSS_BACKWARD,
    RUNS_SEVERAL_TIMES,
    Buffer,
    Category,
    ModelOutput,
    Phase,
    Region,
    ResidentMemory,
    TrainingGraph,
    TrainingOp,
    pseudo_op,
)

SCALAR_BYTES = 4
"""Size of a loss, and of the cotangent with which its backward starts."""


class Keeper:
    """The ops that the user wants kept, by patterns of module and op names."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._used: set[str] = set()

    def __call__(self, module: str, target: str) -> bool:
        """True if an op of this module is to be kept."""
        hit = False
        for pattern in self._patterns:
            if _is_inside(module, pattern) or target == pattern or target.startswith(f"{pattern}."):
                self._used.add(pattern)
                hit = True
        return hit

    def check_all_used(self) -> None:
        """Raise `ValueError` for a pattern that matched nothing."""
        for pattern in self._patterns:
            if pattern not in self._used:
                raise ValueError(
                    f"keep={pattern!r} names no module and no op of the captured forward; give a "
                    "module name such as 'layers.3.attn' (wildcards allowed) or an op such as "
                    "'aten.topk'")


def _is_inside(module: str, pattern: str) -> bool:
    """True if a module, or one that contains it, matches."""
    parts = module.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:length]), pattern)
               for length in range(1, len(parts) + 1))


def assemble(
    uses: Sequence[RegionUse], *, loss: LossFootprint | None, cost_of: Callable[[fx.Node], OpCost],
    pinned_by_user: Callable[[str, str], bool], resident: ResidentMemory, device: torch.device,
    uncaptured: UncapturedCode | None = None, early: EarlyGradients | None = None,
    freed: Sequence[int] = (),
) -> TrainingGraph:
    """The graph of the whole step: forwards in order, the loss, backwards in reverse.

    `loss`: of a loss computed outside the model; `None`: the caller starts the backward with the
    cotangents, and holds them.  `pinned_by_user(module, target)` tells which ops the user wants
    kept.  Where code runs between the regions, `uncaptured` accounts for the loss too, and `loss`
    is not used.  `early`: gradients that the loop frees as they come; `freed`: primals of these, in
    that order, of a single region.
    """
    return _Assembly(uses, None if uncaptured else loss, uncaptured, cost_of,
                     pinned_by_user, device, early or {}, freed).run(resident)


class _Assembly:
    def __init__(
        self, uses: Sequence[RegionUse], loss: LossFootprint | None,
        uncaptured: UncapturedCode | None, cost_of: Callable[[fx.Node], OpCost],
        pinned_by_user: Callable[[str, str], bool], device: torch.device, early: EarlyGradients,
        freed: Sequence[int],
    ) -> None:
        self.uses, self.loss, self.cost_of = uses, loss, cost_of
        self.early, self.freed = early, freed
        self.uncaptured = uncaptured
        self.pinned_by_user, self.device = pinned_by_user, device
        self.ops: list[TrainingOp] = []
        self.buffers: list[Buffer] = []
        self.index: dict[tuple[int, int], int] = {}  # (region, storage) -> buffer
        self.foreign: dict[int, int] = {}  # storage of uncaptured code -> buffer
        self.handed_over: list[tuple[int, int]] = []
        # gradients that uncaptured code reads, and the region whose gradient it waits for
        self.leaving: dict[int, list[tuple[int, int]]] = {}
        # gap -> (region, storage) of gradients of parameters that are freed there
        self.gap = 0  # the next gap between regions
        self.done = len(uses)  # the last region whose backward has run
        self.input_gradients: dict[tuple[int, int], list[int]] = {}
        # (region, storage of an output) -> buffers of its gradients from later regions

    def run(self, resident: ResidentMemory) -> TrainingGraph:
        last, between = len(self.uses), self.uncaptured
        forwards = []
        for number in range(last):
            if between:
                self._gaps(between.before_forward[number], Phase.FORWARD)
            forwards.append(self._forward(number))
        if between:
            self._gaps(between.last_of_loss, Phase.LOSS)
        self._loss()
        backwards: dict[int, range] = {}
        for number in reversed(range(last)):
            if between and number in between.before_backward:
                self._gaps(between.before_backward[number], Phase.BACKWARD, number)
            backwards[number] = self._backward(number)
            self._sum_gradients()
            self.done = number
        if between:
            self._gaps(len(between.workspace_bytes) - 1, Phase.BACKWARD)
        regions = tuple(Region(forwards[number], backwards[number], cotangents=use.cotangents,
                               region_signature=region_signature(use.lowered), block=use.block,
                               hoisted=use.lowered.hoisted, elided=use.lowered.elided)
                        for number, use in enumerate(self.uses))
        outputs = tuple(
            ModelOutput(self.index[number, storage], tuple(tensors), number, tuple(places))
            for number, use in enumerate(self.uses)
            for storage, (tensors, places) in use.returned.items())
        return TrainingGraph(tuple(self.ops), tuple(self.buffers), regions, resident,
                             str(self.device), outputs=outputs)

    def _forward(self, number: int) -> range:
        use = self.uses[number]
        start = len(self.ops)
        lowered = use.lowered
        for op in lowered.ops[:lowered.num_forward]:
            self._op(number, op)
        if lowered.mutation_sources:
            sources = tuple(self.index[number, s] for s in lowered.mutation_sources)
            self._pseudo_op(epilogue_name(number), Phase.FORWARD, number, sources, ())
        return range(start, len(self.ops))

    def _loss(self) -> None:
        loss = self.loss
        reads: tuple[int, ...] = ()
        made = []
        if loss is not None and loss.forward_peak_bytes:
            # The caller keeps the loss, and autograd's caller the 1 with which the backward starts.
            value = min(SCALAR_BYTES, loss.retained_bytes)
            kept = self._buffer(loss.retained_bytes - value, Category.ACTIVATIONS)
            scalar = self._buffer(value, Category.ACTIVATIONS, kept_to_end=True)
            self._pseudo_op("loss/forward#0", Phase.LOSS, -1, (), (kept, scalar),
                            loss.forward_peak_bytes - loss.retained_bytes)
            reads = (kept,)
            made.append(self._buffer(value, Category.TEMPORARIES, kept_to_end=True))
        for number, use in enumerate(self.uses):
            for position, storage in enumerate(use.lowered.cotangent_storages):
                if (storage is None or self._fed_by_later_region(number, position)
                        or self._foreign_cotangent(number, position) is not None):
                    continue
                size = use.lowered.storages[storage].size_bytes
                self.index[number, storage] = self._buffer(
                    size, Category.TEMPORARIES,
                    kept_to_end=loss is None and self.uncaptured is None)
                made.append(self.index[number, storage])
        workspace_bytes = 0 if loss is None else max(
            0, loss.backward_peak_bytes - loss.retained_bytes - (SCALAR_BYTES if reads else 0)
            - sum(gradient.size_bytes for gradient in loss.outputs))
        self._pseudo_op(LOSS_BACKWARD, Phase.LOSS, -1, reads, tuple(made), workspace_bytes)

    def _gaps(self, last: int, phase: Phase, next_backward: int | None = None) -> None:
        """Add the gaps up to `last`; before the backward of region `next_backward` uncaptured code
        sums that region's cotangents."""
        while self.gap <= last:
            self._gap(self.gap, phase, next_backward if self.gap == last else None)
            self.gap += 1

    def _gap(self, gap: int, phase: Phase, next_backward: int | None) -> None:
        """Add the buffers that uncaptured code makes, and reads for the last time, between two
        regions."""
        code = self.uncaptured
        assert code is not None
        last_read = [self.foreign[index] for index, storage in enumerate(code.storages)
                     if storage.released == gap and storage.made < gap]
        for number, use in enumerate(self.uses):
            last_read += [self.index[number, storage] for storage, released
                          in use.released.items() if released == gap]
        for (number, _), gradients in self.input_gradients.items():
            if number == next_backward:
                last_read += gradients
        last_read += [self.index[number, storage] for number, storage
                      in self.leaving.pop(gap, ())]
        last_read += [buffer for buffer, awaited in self.handed_over if awaited >= self.done]
        self.handed_over = [wait for wait in self.handed_over if wait[1] < self.done]
        made = []
        for index, storage in enumerate(code.storages):
            if storage.made == gap:
                kind = storage.kind or (
                    Category.ACTIVATIONS if phase is not Phase.BACKWARD else
                    Category.GRADIENTS if storage.parameter else Category.TEMPORARIES)
                self.foreign[index] = self._buffer(
                    storage.size_bytes, kind, kept_to_end=storage.released is None,
                    label=storage.parameter if kind is Category.GRADIENTS else
                    COMMUNICATION if storage.kind is Category.TEMPORARIES else "")
                made.append(self.foreign[index])
        if made or last_read or code.workspace_bytes[gap]:
            self._pseudo_op(f"/uncaptured code#{gap}", phase, -1, tuple(dict.fromkeys(last_read)),
                            tuple(made), code.workspace_bytes[gap])

    def _foreign_cotangent(self, number: int, position: int) -> int | None:
        """The uncaptured buffer that is a cotangent of a region."""
        return None if self.uncaptured is None else (
            self.uncaptured.cotangents.get((number, position)))

    def _fed_by_later_region(self, number: int, position: int) -> bool:
        """True if the gradient of an output comes from later regions alone.  If code runs between
        regions, a gradient that the loss makes as well is among the buffers of that code."""
        output = self._output_of_cotangent(number, position)
        is_for_loss = self.uncaptured is None and output in self.uses[number].returned
        return output is not None and not is_for_loss and any(
            link == (number, output)
            for use in self.uses[number + 1:] for link in use.linked_inputs.values())

    def _output_of_cotangent(self, number: int, position: int) -> int | None:
        """The storage of the differentiable output of a cotangent."""
        lowered = self.uses[number].lowered
        source = lowered.joint.differentiable_outputs[position]
        return None if source is None else lowered.storage_of.get(source)

    def _backward(self, number: int) -> range:
        use = self.uses[number]
        lowered = use.lowered
        for position, storage in enumerate(lowered.cotangent_storages):
            foreign = self._foreign_cotangent(number, position)
            if storage is None:
                continue
            if foreign is not None:
                self.index[number, storage] = self.foreign[foreign]
            elif (number, storage) not in self.index:
                self._receive_gradient(number, position, storage)
        start = len(self.ops)
        for op in lowered.ops[lowered.num_forward:]:
            self._op(number, op)
        if AUTOGRAD_HOLDS_COTANGENTS and len(self.ops) > start:
            self._hold_to_last_op({
                self.index[number, storage]
                for position, storage in enumerate(lowered.cotangent_storages)
                if storage is not None and not self._is_copied(number, position, storage)})
        for storage, primal in lowered.gradient_storages:
            self._hand_over_gradient(number, storage, primal)
        if not self.uncaptured:
            self._free_gradients(number)
        return range(start, len(self.ops))

    def _free_gradients(self, number: int) -> None:
        """Hooks use and free the gradients of a region one by one, when it has made all of them."""
        use = self.uses[number]
        names = [use.parameter_names.get(primal, "") for primal in self.freed]
        for name in names:
            if name not in self.early:
                continue
            gradients = [index for index, buffer in enumerate(self.buffers)
                         if buffer.kind is Category.GRADIENTS and buffer.label == name]
            for index in gradients:
                self.buffers[index] = replace(self.buffers[index], kept_to_end=False)
            self._pseudo_op(f"~/use of the gradient#{len(self.ops)}", Phase.BACKWARD, number,
                            tuple(gradients), (), self.early[name])

    def _is_copied(self, number: int, position: int, storage: int) -> bool:
        """True if the region's backward gets its own copy of an expanded cotangent: that of a sum
        is one number, from which torch makes a whole tensor."""
        output = self._output_of_cotangent(number, position)
        tensors, _ = self.uses[number].returned.get(-1 if output is None else output, ([], []))
        size = self.uses[number].lowered.storages[storage].size_bytes
        return bool(tensors) and self.loss is not None and all(
            self.loss.outputs[tensor].size_bytes < size for tensor in tensors)

    def _hold_to_last_op(self, buffers: set[int]) -> None:
        """Keep these buffers until the last op so far has run, and prevent their reuse."""
        last = self.ops[-1]
        self.ops[-1] = replace(
            last, inputs=tuple(dict.fromkeys((*last.inputs, *sorted(buffers)))),
            inplace=tuple(buffer for buffer in last.inplace if buffer not in buffers))

    def _receive_gradient(self, number: int, position: int, storage: int) -> None:
        """Add the gradient of an output that only later regions read: theirs, summed by
        autograd."""
        output = self._output_of_cotangent(number, position)
        found = self.input_gradients.get((number, output if output is not None else -1), [])
        if len(found) == 1:
            self.index[number, storage] = found[0]
            return
        self.index[number, storage] = self._sum(number, position, found)

    def _sum_gradients(self) -> None:
        """Sum gradients of an output from several regions: autograd adds each as it comes."""
        for (number, output), gradients in self.input_gradients.items():
            if len(gradients) > 1 and self._sums((number, output)):
                gradients[:] = [self._sum(number, self._positions(number, output)[0], gradients)]

    def _positions(self, number: int, output: int) -> list[int]:
        """Of the cotangents of an output."""
        return [position for position in range(len(self.uses[number].cotangents))
                if self._output_of_cotangent(number, position) == output]

    def _sums(self, source: tuple[int, int]) -> bool:
        """True if the gradients of an output have a sum that is no buffer of uncaptured code."""
        number, output = source
        positions = self._positions(number, output)
        return bool(positions) and all(self._foreign_cotangent(number, position) is None
                                       for position in positions)

    def _sum(self, number: int, position: int, gradients: Sequence[int]) -> int:
        lowered = self.uses[number].lowered
        storage = lowered.cotangent_storages[position]
        assert storage is not None
        total = self._buffer(lowered.storages[storage].size_bytes, Category.TEMPORARIES)
        self._pseudo_op(f"{number}:/sum of gradients#{len(self.ops)}", Phase.BACKWARD, -1,
                        tuple(dict.fromkeys(gradients)), (total,))
        return total

    def _hand_over_gradient(self, number: int, storage: int, primal: int) -> None:
        use = self.uses[number]
        buffer = self.index.get((number, storage))
        if buffer is None:
            return
        gone = None if self.uncaptured is None else (
            self.uncaptured.gradients_released.get((number, primal)))
        if primal in use.linked_inputs:
            source = use.linked_inputs[primal]
            if gone is not None and not self._sums(source):
                self.leaving.setdefault(gone, []).append((number, storage))
            else:
                self.input_gradients.setdefault(source, []).append(buffer)
            return
        if self.uncaptured and (number, primal) in self.uncaptured.inputs:
            self.handed_over.append((buffer, self._last_with_gradient(
                self.uncaptured.inputs[number, primal])))
            return
        name = use.parameter_names.get(primal, "")
        if gone is not None:
            self.leaving.setdefault(gone, []).append((number, storage))
            if name in self.early and self.buffers[buffer].kind is Category.TEMPORARIES:
                self.buffers[buffer] = replace(self.buffers[buffer], kind=Category.GRADIENTS,
                                               label=name)
            return
        gradient = use.lowered.joint.gradients[primal]
        parameter = use.lowered.joint.primals[primal].meta["val"]
        if gradient is not None and not (
                gradient.meta["val"].shape == parameter.shape
                and has_strides(gradient.meta["val"], parameter.stride())):
            # Autograd copies a gradient whose layout is not the parameter's.
            copied = self._buffer(parameter.numel() * parameter.element_size(),
                                  Category.GRADIENTS, kept_to_end=True, label=name)
            self._pseudo_op(f"~/layout of the gradient#{len(self.ops)}", Phase.BACKWARD, number,
                            (buffer,), (copied,))
            return
        kind = self.buffers[buffer].kind
        if kind is Category.TEMPORARIES:
            kind = Category.GRADIENTS
        self.buffers[buffer] = replace(
            self.buffers[buffer], kind=kind, kept_to_end=True, label=name)

    def _last_with_gradient(self, foreign: int) -> int:
        """The last region, in the backward, that makes a gradient of this storage: until then
        autograd keeps those of the others, to sum them."""
        assert self.uncaptured is not None
        return min(number for (number, primal), storage in self.uncaptured.inputs.items()
                   if storage == foreign
                   and self.uses[number].lowered.joint.gradients[primal] is not None)

    def _op(self, number: int, op: LoweredOp) -> None:
        use = self.uses[number]
        index = len(self.ops)
        kind = Category.ACTIVATIONS if op.phase is Phase.FORWARD else Category.TEMPORARIES
        outputs = []
        for storage in op.outputs:
            buffer = self._buffer(
                use.lowered.storages[storage].size_bytes, kind, producer=index,
                kept_to_end=op.phase is Phase.FORWARD and storage in use.returned)
            self.index[number, storage] = buffer
            outputs.append(buffer)
        inputs = [self.index[number, storage] for storage in op.inputs]
        inputs += self._inputs_from_elsewhere(number, op.node)
        cost = self.cost_of(op.node)
        pinned = op.replay.pinned or (RUNS_SEVERAL_TIMES if use.repeated else "") or (
            "reads what other code writes later" if self._reads_written(number, op.node) else "")
        if op.phase is Phase.FORWARD and not pinned and self.pinned_by_user(op.module, op.target):
            pinned = KEPT_BY_USER
        self.ops.append(TrainingOp(
            name=op.name, target=op.target, module=op.module, source=op.source, phase=op.phase,
            region=number, inputs=tuple(dict.fromkeys(inputs)), outputs=tuple(outputs),
            flops=cost.flops, bytes_moved=cost.bytes_moved, seconds=cost.seconds,
            workspace_bytes=cost.workspace_bytes + op.replay.workspace_bytes(self.device),
            pinned=pinned,
            inplace=() if use.repeated else tuple(
                self.index[number, storage] for storage in op.inplace),
            replay_state_bytes=op.replay.state_bytes(self.device), digest=op.digest,
            result=op.result))

    def _reads_written(self, number: int, node: fx.Node) -> bool:
        """True if other code writes an input that the op reads; the region's own updates, which
        `joint_graph.replay` knows, do not count."""
        if self.uncaptured is None or not self.uncaptured.written:
            return False
        lowered = self.uses[number].lowered
        return any((number, primal) in self.uncaptured.written
                   and primal not in lowered.joint.mutations.values()
                   for primal in lowered.primals_read_by(node))

    def _inputs_from_elsewhere(self, number: int, node: fx.Node) -> list[int]:
        """Buffers of other regions, or of uncaptured code, that the op reads."""
        use = self.uses[number]
        foreign = {} if self.uncaptured is None else self.uncaptured.inputs
        if not use.linked_inputs and not foreign:
            return []
        found = []
        for primal in use.lowered.primals_read_by(node):
            if primal in use.linked_inputs:
                found.append(self.index[use.linked_inputs[primal]])
            elif (number, primal) in foreign:
                found.append(self.foreign[foreign[number, primal]])
        return found

    def _buffer(self, size_bytes: int, kind: Category, *, producer: int | None = None,
                kept_to_end: bool = False, label: str = "") -> int:
        """Add a buffer; without a producer it belongs to the next op."""
        self.buffers.append(Buffer(
            size_bytes, len(self.ops) if producer is None else producer, kind, kept_to_end, label))
        return len(self.buffers) - 1

    def _pseudo_op(self, name: str, phase: Phase, region: int, inputs: tuple[int, ...],
                   outputs: tuple[int, ...], workspace_bytes: int = 0) -> None:
        self.ops.append(pseudo_op(name, phase, region, inputs, outputs, workspace_bytes))
