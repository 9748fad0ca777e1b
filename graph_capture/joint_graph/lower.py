"""Lowers a joint fx graph to ops that exchange storages, for planning and rewriting.

Nodes are grouped by the storage of their value.  A node whose result only aliases its inputs (a
view, `detach`, a tuple element) is no op: it costs nothing and is emitted again wherever it is
needed.  Everything up to the last op that a forward output needs is the forward; the rest is the
backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.joint_graph.inplace import inplace_candidates
from planner._graph_capture.joint_graph.joint import (
    JointGraph,
    is_number,
    is_tuple_element,
    tensors_of,
)
from planner._graph_capture.joint_graph.naming import (
    Namer,
    describe_call,
    describe_structure,
    describe_value,
    digest,
    module_of,
    source_of,
    target_name,
    within,
)
from planner._graph_capture.joint_graph.replay import Replay, replay_of
from planner._graph_capture.joint_graph.symbolic_sizes import Sizes, Values
from planner._graph_capture.joint_graph.walks import ancestors
from planner._graph_capture.torch_compat import (
    FakeTensorMode,
    OpOverload,
    same_sizes,
    schema_of,
    spanned_elements,
    storage_key,
)
from planner._graph_capture.training_graph import Phase, RegionSignature

RESIDENT = -1
"""In place of a storage's index: it belongs to an input of the region and is always alive."""


@dataclass(frozen=True, slots=True)
class LoweredStorage:
    """A buffer made by an op of the region, or a cotangent that comes in from outside."""

    size_bytes: int
    producer: int
    """Index of the op that makes it; -1 for a cotangent."""
    root: fx.Node | None
    """The node whose value it is when it is made (`None`: nothing reads it)."""


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """One op of the region."""

    node: fx.Node
    name: str
    target: str
    module: str
    source: str
    phase: Phase
    inputs: tuple[int, ...]
    """Storages that it reads, without those of the region's inputs."""
    outputs: tuple[int, ...]
    inplace: tuple[int, ...]
    """Input storages that its only output may overwrite, in order of preference."""
    inplace_operands: tuple[fx.Node, ...]
    """For each of `inplace`, the operand to write into."""
    replay: Replay
    digest: str
    structure: str
    """Hash of the same text as the digest, without sizes."""
    result: str
    """Dtype, shape and strides of its result."""


@dataclass(frozen=True)
class LoweredRegion:
    """The ops of one joint graph in the order of execution, and the storages between them."""

    joint: JointGraph
    index: int
    """Its number among the regions of the step."""
    ops: tuple[LoweredOp, ...]
    storages: tuple[LoweredStorage, ...]
    num_forward: int
    """The first `num_forward` ops are the forward."""
    storage_of: Mapping[fx.Node, int]
    """Tensor-valued node -> its storage, or `RESIDENT`."""
    mutation_sources: tuple[int, ...]
    """Storages that are copied into inputs (BatchNorm's statistics) right after the forward."""
    held_outputs: tuple[int, ...]
    """Storages that the forward returns to its caller."""
    gradient_storages: tuple[tuple[int, int], ...]
    """(storage, index of the primal) for each gradient that the backward returns."""
    cotangent_storages: tuple[int | None, ...]
    """For each cotangent its storage; `None` if no gradient flows in."""
    base_of: Mapping[fx.Node, fx.Node]
    """Node -> the input or op result that it is or views."""
    hoisted: tuple[int, ...] = ()
    """See `Region.hoisted`."""
    chunks: int = 1
    """Number of chunks in which its widest part runs; 1 if it has no such part."""
    inner_chunks: int = 1
    """Number of chunks in which the insides of layers run; 1 if there are none."""
    elided: tuple[int, ...] = ()
    """See `Region.elided`."""
    saved_by_default: frozenset[str] = frozenset()
    """Names of the nodes that Inductor's own partitioner saves; empty if the hoisted ops were
    given."""

    @property
    def returned(self) -> tuple[fx.Node | None, ...]:
        """The outputs of the forward, mutated inputs not counted."""
        return tuple(self.joint.forward_outputs[place] for place in self.joint.returned)

    def primals_read_by(self, node: fx.Node) -> list[int]:
        """Indices of the region's inputs that an op reads, itself or through a view."""
        bases = {self.base_of[source] for source in node.all_input_nodes}
        return [index for index, primal in enumerate(self.joint.primals) if primal in bases]


def epilogue_name(region: int) -> str:
    """Name of the pseudo-op, after a region's forward, that updates mutated inputs."""
    return f"{f'{region}:' if region else ''}/update of mutated inputs#0"


def lower(joint: JointGraph, primal_names: Sequence[str], region: int = 0, block: str = ""
          ) -> LoweredRegion:
    """Lower a clean joint graph, the step's `region`-th; `primal_names`: stable names of its
    inputs; `block`: the submodule of the graph, empty for the whole model."""
    return _Lowering(joint, primal_names, region, block).run()


class _Lowering:
    """The state of one pass over the graph."""

    def __init__(self, joint: JointGraph, primal_names: Sequence[str], region: int, block: str
                 ) -> None:
        self.joint = joint
        self.block = block
        self.by_key: dict[int, int] = {}
        self.base_of: dict[fx.Node, fx.Node] = {}
        self.storage_of: dict[fx.Node, int] = {}
        self.references: dict[fx.Node, str] = {}
        self.region_signatures: dict[fx.Node, str] = {}  # references that do not depend on sizes
        self.sizes: list[int] = []
        self.producers: list[int] = []
        self.roots: list[fx.Node | None] = []
        self.ops: list[LoweredOp] = []
        self.namer = Namer(region)
        self.region = region
        self.mutated = {joint.primals[index] for index in joint.mutations.values()}
        for primal, name in zip(joint.primals, primal_names, strict=True):
            # The layout of an input is in no op's result, but affects the workspace of kernels.
            self._add_resident(primal, f"{name} {describe_value(primal.meta['val'])}")
            self.region_signatures[primal] = "number" if is_number(primal) else name
        self.cotangents: list[int | None] = []
        for index, node in enumerate(joint.cotangents):
            self.references[node] = self.region_signatures[node] = f"cotangent:{index}"
            self.base_of[node] = node
            if node.users:
                self.storage_of[node] = self._new_storage(node.meta["val"], producer=-1)
                self.cotangents.append(self.storage_of[node])
                self.roots[-1] = node
            else:
                self.cotangents.append(None)

    def _add_resident(self, node: fx.Node, reference: str) -> None:
        self.base_of[node] = node
        self.storage_of[node] = RESIDENT
        self.references[node] = self.region_signatures[node] = reference

    def _new_storage(self, tensor: torch.Tensor, producer: int) -> int:
        index = len(self.sizes)
        self.by_key[storage_key(tensor)] = index
        self.sizes.append(tensor.untyped_storage().nbytes())
        self.producers.append(producer)
        self.roots.append(None)
        return index

    def run(self) -> LoweredRegion:
        """Visit the nodes in order."""
        last_forward = last_forward_node(self.joint)
        phase = Phase.FORWARD if last_forward is not None else Phase.BACKWARD
        num_forward = 0
        for node in self.joint.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                self._visit(node, phase)
            elif node.op not in ("placeholder", "output"):
                raise CaptureError(f"the captured graph has a {node.op} node, {node.name}; "
                                   "expected only calls of functions")
            if node is last_forward:
                num_forward, phase = len(self.ops), Phase.BACKWARD
        storages = tuple(
            LoweredStorage(size, producer, root)
            for size, producer, root in zip(self.sizes, self.producers, self.roots, strict=True))
        joint = self.joint
        outputs = [node for position, node in enumerate(joint.forward_outputs)
                   if node is not None and position not in joint.mutations]
        mutated = [node for position, node in enumerate(joint.forward_outputs)
                   if node is not None and position in joint.mutations]
        return LoweredRegion(
            joint=joint, index=self.region, ops=tuple(self.ops), storages=storages,
            num_forward=num_forward, storage_of=self.storage_of,
            mutation_sources=self._storages(mutated), held_outputs=self._storages(outputs),
            gradient_storages=tuple(
                (self.storage_of[node], index) for index, node in enumerate(joint.gradients)
                if node is not None and self.storage_of.get(node, RESIDENT) != RESIDENT),
            cotangent_storages=tuple(self.cotangents), base_of=self.base_of)

    def _storages(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        found = (self.storage_of.get(node, RESIDENT) for node in nodes)
        return tuple(dict.fromkeys(index for index in found if index != RESIDENT))

    def _visit(self, node: fx.Node, phase: Phase) -> None:
        if node.op == "get_attr":
            value = _attribute(self.joint.owner, str(node.target))
            node.meta.setdefault("val", value)
            if isinstance(value, torch.Tensor):
                self._add_resident(node, f"constant:{node.target}")
            else:
                self.references[node] = self.region_signatures[node] = f"constant:{node.target}"
                self.base_of[node] = node
            return
        value = node.meta.get("val")
        if is_number(node):  # computed from the symbols, on the host
            self.references[node], self.region_signatures[node] = f"number:{value}", "number"
            self.base_of[node] = node
            return
        base = _aliased_operand(node)
        if base is not None:
            self._note_alias(node, base, value)
            return
        index = len(self.ops)
        if any(tensor.layout is not torch.strided for tensor in tensors_of(value)):
            raise CaptureError(
                f"{node.target} makes a sparse tensor, as nn.Embedding(sparse=True) does for its "
                "gradient; a plan is made for dense ones: set sparse=False, or account for the "
                "step as it is with planner.memory")
        made = {storage_key(tensor): tensor for tensor in tensors_of(value)}
        outputs = tuple(self._new_storage(tensor, index) for tensor in made.values())
        if node.target in _WHOLE_STORAGE_COPIES:
            self.sizes[outputs[0]] = self._storage_bytes(node.args[0])
        module, target = within(self.block, module_of(node)), target_name(node)
        name = self.namer.name(phase, module, target)
        call = describe_call(node, self.references)
        structure = describe_structure(node, self.region_signatures)
        candidates = () if len(outputs) != 1 else inplace_candidates(
            node, lambda left, right: self.base_of[left] is self.base_of[right])
        usable = [(self.storage_of[operand], operand) for operand in candidates
                  if self.storage_of.get(operand, RESIDENT) != RESIDENT
                  and same_sizes([self._storage_bytes(operand)], [self.sizes[outputs[0]]])]
        self.references[node] = self.region_signatures[node] = name
        self.base_of[node] = node
        if isinstance(value, torch.Tensor):
            self.storage_of[node] = self.by_key[storage_key(value)]
            self.roots[outputs[0]] = node
        self.ops.append(LoweredOp(
            node=node, name=name, target=target, module=module, source=source_of(node),
            phase=phase, inputs=self._storages(node.all_input_nodes), outputs=outputs,
            inplace=tuple(storage for storage, _ in usable),
            inplace_operands=tuple(operand for _, operand in usable),
            replay=replay_of(node, lambda operand: self.base_of[operand] in self.mutated),
            digest=digest(call), structure=digest(structure), result=describe_value(value)))

    def _storage_bytes(self, node: fx.Node) -> int:
        storage = self.storage_of[node]
        if storage != RESIDENT:
            return self.sizes[storage]
        value: torch.Tensor = self.base_of[node].meta["val"]
        return value.untyped_storage().nbytes()

    def _note_alias(self, node: fx.Node, base: fx.Node, value: object) -> None:
        if is_tuple_element(node):
            self.references[node] = f"{self.references[base]}[{node.args[1]}]"
            self.region_signatures[node] = f"{self.region_signatures[base]}[{node.args[1]}]"
        else:
            self.references[node] = f"view:{digest(describe_call(node, self.references))}"
            # The views on the way may depend on sizes: a view of everything is none.
            self.region_signatures[node] = self.region_signatures[base]
        self.base_of[node] = node if self._is_element_of_op(node, base) else self.base_of[base]
        if not isinstance(value, torch.Tensor):
            if base in self.storage_of:
                self.storage_of[node] = self.storage_of[base]
            return
        if self._is_element_of_op(node, base):
            storage = self.by_key[storage_key(value)]
            if self.roots[storage] is None:
                self.roots[storage] = node
        else:
            storage = self.storage_of[base]
        self.storage_of[node] = storage

    def _is_element_of_op(self, node: fx.Node, base: fx.Node) -> bool:
        """True if the node picks a result of an op that makes several, not a part of a view."""
        return is_tuple_element(node) and base not in self.storage_of


def _aliased_operand(node: fx.Node) -> fx.Node | None:
    """The operand whose storage the node's result aliases; `None` for an op that computes.

    The schema decides, not the traced storages: those are stale where a duplicate op was merged.
    """
    if is_tuple_element(node):
        return node.args[0]
    if not isinstance(node.target, OpOverload) or schema_of(node.target).is_mutable:
        return None
    if node.target in _UNANNOTATED_VIEWS:
        return node.all_input_nodes[0]
    schema = schema_of(node.target)
    if not schema.returns or any(r.alias_info is None for r in schema.returns):
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            operand = (node.args[position] if position < len(node.args)
                       else node.kwargs.get(argument.name))
            return operand if isinstance(operand, fx.Node) else None
    return None


_WHOLE_STORAGE_COPIES = frozenset({
    torch.ops.aten.copy.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
    torch.ops.aten.as_strided_scatter.default,
})
"""Ops that keep the strides of their first operand by copying its whole storage, of which it may be
a small part; the traced storages do not show that."""

_UNANNOTATED_VIEWS = frozenset({
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
})
"""Ops whose results alias their operand although their schema does not say so."""


def last_forward_node(joint: JointGraph) -> fx.Node | None:
    """The last node, in order, that some forward output needs."""
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    needed = ancestors((node for node in joint.forward_outputs if node is not None),
                       lambda node: node.op != "placeholder")
    return max(needed, key=order.__getitem__, default=None)


def _attribute(owner: fx.GraphModule, path: str) -> object:
    value: object = owner
    for part in path.split("."):
        value = getattr(value, part)
    return value


@contextlib.contextmanager
def region_at(region: LoweredRegion, sizes: Sizes, values: Values) -> Iterator[LoweredRegion]:
    """A region with symbolic sizes where the symbols have these values; inside, its nodes hold
    numbers."""
    mode = FakeTensorMode()
    kept = [(node, node.meta["val"]) for node in region.joint.graph.nodes if "val" in node.meta]
    try:
        for node, value in kept:
            node.meta["val"] = sizes.at(value, values, mode)
        yield replace(region, storages=tuple(
            replace(storage, size_bytes=sizes.number(storage.size_bytes, values))
            for storage in region.storages), ops=tuple(
            replace(op, result=describe_value(op.node.meta.get("val"))) for op in region.ops))
    finally:
        for node, value in kept:
            node.meta["val"] = value


def region_signature(region: LoweredRegion) -> RegionSignature:
    """The structure of a region, and its sizes, which show if a plan for one batch serves another.

    Two regions of equal structure have ops of the same names that read, make and may overwrite the
    same storages; so a schedule of the one is a schedule of the other, with the same lifetimes.
    """
    joint = region.joint
    parts = [f"{op.name} {op.structure} {op.inputs} {op.outputs} {op.inplace} "
             f"{op.replay.pinned} {op.replay.random} {len(op.replay.copied_inputs)}"
             for op in region.ops]
    # Numbers among the inputs, which are constants in other graphs, do not count.
    numbers = [*map(is_number, joint.primals)]
    inputs = [primal.meta["val"] for primal in joint.primals if not is_number(primal)]
    gradients = tuple((storage, index - sum(numbers[:index]))
                      for storage, index in region.gradient_storages)
    parts.append(f"{region.num_forward} {region.mutation_sources} {region.held_outputs} "
                 f"{gradients} {region.cotangent_storages}")
    return RegionSignature(
        structure=digest(*parts),
        storage_bytes=tuple(storage.size_bytes for storage in region.storages),
        input_bytes=tuple(spanned_elements(value) * value.element_size() for value in inputs),
        input_layout=digest(*map(describe_value, inputs)))
