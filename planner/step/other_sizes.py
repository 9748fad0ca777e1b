"""A step at other sizes of its inputs: its memory as text in the names of sizes, and its peak.

The model of the world: the ops of a graph with symbolic sizes are the same at every size that the
graph serves; only the bytes of what they exchange differ, and the workspace of their kernels.  The
peak under a schedule is that of the same problem with other numbers, by the project's simulator.
Nothing is assumed to grow with a size.

Workspace at other sizes is measured for each kind of call, once.  Without measurement, at smaller
sizes, it is taken to be at most what it is at the planned ones.

Blind spots: a loss outside of the model is taken to use at smaller sizes what it does at the
planned ones, and in proportion to the model's output at larger ones; so is the workspace of ops
beyond aten's, without the proportion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from planner._apply.rewrite_spec import KernelCall, NamedDimension, SizeRange, SymbolicSizes
from planner._apply.size_expressions import argument, call, number, written
from planner._graph_capture.capture import SymbolicStep
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.memory.tracker import Workspace
from planner._graph_capture.step.symbolic_region import SymbolicRegion
from planner._graph_capture.torch_compat import (
    FakeTensorMode,
    OpOverload,
    fake_tensor,
    pytree,
    schema_of,
)
from planner._graph_capture.training_graph import LOSS_BACKWARD, Phase
from planner.solvers.problem import Schedule
from planner.solvers.simulator import simulate, unroll
from planner.step.variant import Variant


def sizes_of(symbolic: SymbolicStep, variant: Variant) -> SymbolicSizes:
    """The step of one variant as a function of the named sizes; raises `ValueError` where a size
    cannot be written."""
    region, planned = symbolic.region, symbolic.planned
    lowered, graph = region.variants[variant.low_peak], variant.graph
    device = torch.device(graph.device)
    texts = [str(buffer.size_bytes) for buffer in graph.buffers]

    def note(buffer: int, size: Any) -> None:
        text = region.text(size)
        if allocated_bytes(number(text, planned), device) == graph.buffers[buffer].size_bytes:
            texts[buffer] = text

    for op in lowered.ops:
        for storage, buffer in zip(op.outputs, graph.ops[graph.index_of[op.name]].outputs,
                                   strict=True):
            note(buffer, lowered.storages[storage].size_bytes)
    cotangents = [lowered.storages[each].size_bytes for each in lowered.cotangent_storages
                  if each is not None]
    made = graph.ops[graph.index_of[LOSS_BACKWARD]].outputs
    for buffer, size in zip(made[len(made) - len(cotangents):], cotangents, strict=False):
        note(buffer, size)
    return SymbolicSizes(
        ranges=tuple(SizeRange(name, min(smallest, planned[name]), planned[name])
                     for name, smallest in region.smallest.items()),
        dimensions=tuple(NamedDimension(name, place, size)
                         for name, places in symbolic.dimensions.items()
                         for place, size in sorted(places.items())),
        input_bytes=symbolic.input_bytes,
        buffer_bytes=tuple(texts),
        kernels=tuple(_kernels(region, variant, device)))


def _kernels(region: SymbolicRegion, variant: Variant, device: torch.device
             ) -> Iterator[KernelCall]:
    """The calls of the ops that may use workspace."""
    graph, found = variant.graph, dict[tuple[str, str, int], list[int]]()
    for op in region.variants[variant.low_peak].ops:
        target = op.node.target
        if not isinstance(target, OpOverload) or not _is_known(target):
            continue
        args, kwargs, result = pytree.tree_map(
            lambda leaf: leaf.meta.get("val") if hasattr(leaf, "meta") else leaf,
            (op.node.args, dict(op.node.kwargs), op.node.meta.get("val")))
        write = partial(written, size=region.text)
        try:
            words = [*map(write, args), *(f"{name}={write(each)}" for name, each in kwargs.items())]
            made = write(result)
        except ValueError:
            continue
        key = f"{target}({', '.join(words)})", made, op.replay.workspace_bytes(device)
        found.setdefault(key, []).append(graph.index_of[op.name])
    for (text, made, beyond_bytes), places in found.items():
        yield KernelCall(text, made, beyond_bytes, tuple(places))


def _is_known(target: OpOverload) -> bool:
    """True for an op of aten that computes a tensor from others: it reads and writes nothing
    else."""
    schema = schema_of(target)
    return schema.name.startswith("aten::") and any(
        "Tensor" in str(each.type) for each in schema.arguments) and bool(schema.returns)


class SizedPeak:
    """The peak of a step under one schedule, as a function of its sizes."""

    def __init__(self, variant: Variant, schedule: Schedule, sizes: SymbolicSizes,
                 workspace: Workspace) -> None:
        """`variant`: the step at the planned sizes; `workspace`: that of one op."""
        self._variant, self._schedule, self._sizes = variant, schedule, sizes
        self._workspace = workspace
        self._device = torch.device(variant.graph.device)
        graph = variant.graph
        self._of_loss = [place for place, op in enumerate(graph.ops) if op.phase is Phase.LOSS]
        self._cotangents = [buffer for buffer in graph.ops[graph.index_of[LOSS_BACKWARD]].outputs
                            if not sizes.buffer_bytes[buffer].isdecimal()]

    def is_within(self, limit_bytes: int, values: Mapping[str, int]) -> bool:
        """True if the step uses no more than this where the named sizes have these values."""
        is_smaller = all(values[name] <= planned for name, planned in self._sizes.largest.items())
        # Without measurement first: workspace is bounded by that at the planned sizes.
        return (is_smaller and self._bytes_at(values, {}) <= limit_bytes) or (
            self.bytes_at(values) <= limit_bytes)

    def bytes_at(self, values: Mapping[str, int]) -> int:
        """The peak of the whole step where the named sizes have these values."""
        if dict(values) == self._sizes.largest:
            return self._variant.peak_bytes(self._schedule)
        return self._bytes_at(values, self._workspaces(values))

    def saved_bytes_at(self, values: Mapping[str, int]) -> int:
        """Memory that a call keeps from its forward to its backward."""
        return self._total_bytes(self._saved, values)

    def plain_share_at(self, values: Mapping[str, int]) -> float:
        """What a plain call keeps there, as a multiple of what it does at the planned sizes."""
        planned_bytes = self._total_bytes(self._plain_saved, self._sizes.largest)
        return self._total_bytes(self._plain_saved, values) / max(1, planned_bytes)

    @cached_property
    def _saved(self) -> list[str]:
        return self._kept_under(self._schedule)

    @cached_property
    def _plain_saved(self) -> list[str]:
        return self._kept_under(self._variant.problem.keep_all_schedule)

    def _kept_under(self, schedule: Schedule) -> list[str]:
        """Sizes of what a call keeps, as text."""
        buffers = self._variant.kept_buffers(unroll(self._variant.problem, schedule))
        return [self._sizes.buffer_bytes[buffer] for buffer in buffers]

    def resident_bytes_at(self, values: Mapping[str, int]) -> int:
        """Resident memory where the named sizes have these values."""
        inputs = self._sizes.input_bytes
        return (self._variant.budget.resident_bytes + self._total_bytes(inputs, values)
                - self._total_bytes(inputs, self._sizes.largest))

    def _bytes_at(self, values: Mapping[str, int], workspace: Mapping[int, int]) -> int:
        budget, problem = self._variant.budget, self._variant.problem
        texts = self._sizes.buffer_bytes
        bytes_of = {text: allocated_bytes(number(text, values), self._device) for text in {*texts}}
        sizes = [bytes_of[text] for text in texts]
        planned = sum(problem.storages[buffer].size_bytes for buffer in self._cotangents)
        scale = max(1.0, sum(sizes[buffer] for buffer in self._cotangents) / max(1, planned))
        of_loss = {buffer for place in self._of_loss if (
            op := self._variant.graph.ops[place]).name != LOSS_BACKWARD for buffer in op.outputs}
        storages = tuple(
            replace(storage, size_bytes=math.ceil(scale * size)
                    if place in of_loss and self._sizes.buffer_bytes[place].isdecimal() else size)
            for place, (storage, size) in enumerate(zip(problem.storages, sizes, strict=True)))
        ops = tuple(
            replace(op, workspace_bytes=workspace.get(
                place, math.ceil(scale * op.workspace_bytes) if place in self._of_loss
                else op.workspace_bytes))
            for place, op in enumerate(problem.ops))
        net_bytes = simulate(replace(problem, ops=ops, storages=storages),
                             self._schedule).peak_bytes
        resident_bytes = self.resident_bytes_at(values)
        if budget.optimizer is None:
            return resident_bytes + net_bytes
        more_kept = sum(after.size_bytes - before.size_bytes
                        for after, before in zip(storages, problem.storages, strict=True)
                        if before.kept_to_end)
        return max(resident_bytes + net_bytes, budget.optimizer_step_bytes + more_kept
                   + resident_bytes - budget.resident_bytes)

    def _total_bytes(self, texts: Sequence[str], values: Mapping[str, int]) -> int:
        return sum(allocated_bytes(number(text, values), self._device) for text in texts)

    def _workspaces(self, values: Mapping[str, int]) -> dict[int, int]:
        """Workspace by op, as far as it can be measured or follows from the op's code."""
        found: dict[int, int] = {}
        mode = FakeTensorMode()

        def made(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Any:
            return fake_tensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"),
                               self._device)

        for each in self._sizes.kernels:
            name, args, kwargs = call(each.call, values, made)
            result = argument(each.result, values, made)
            size = self._workspace(_op(name), args, kwargs, result) + each.beyond_bytes
            found.update(dict.fromkeys(each.ops, size))
        return found


def _op(name: str) -> OpOverload:
    """The op of aten of this name; raises `ValueError` for any other."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if namespace != "aten" or not isinstance(found, OpOverload) or not _is_known(found):
        raise ValueError(f"{name} is no op of torch that computes a tensor from others")
    return found


def check_calls(sizes: SymbolicSizes) -> None:
    """Raise `ValueError` for a call that cannot be read."""
    def made(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Any:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    for each in sizes.kernels:
        name, _, _ = call(each.call, sizes.largest, made)
        argument(each.result, sizes.largest, made)
        _op(name)
