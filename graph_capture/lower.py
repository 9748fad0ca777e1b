"""A joint fx graph as ops that exchange storages: the form in which a step is planned and rewritten.

Nodes are grouped by the storage that their value lives in.  A node whose result only aliases its
inputs (a view, `detach`, a tuple element) is no op: it costs nothing and is re-made wherever it is
needed.  Everything up to the last op that a forward output needs is the forward; the rest is the
backward.  Capture and apply both lower the same way, so that a plan's names fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graph_capture.errors import CaptureError
from graph_capture.inplace import inplace_candidates
from graph_capture.joint import JointGraph, is_tuple_element, tensors_of
from graph_capture.naming import (
    Namer,
    describe_call,
    digest,
    module_of,
    source_of,
    target_name,
)
from graph_capture.replay import Replay, replay_of
from graph_capture.torch_compat import storage_key
from graph_capture.training_graph import Phase

RESIDENT = -1
"""In place of a storage's index: it belongs to an input of the region and is always alive."""


@dataclass(frozen=True, slots=True)
class LoweredStorage:
    """A buffer made by an op of the region, or a cotangent that comes in from outside."""

    size_bytes: int
    producer: int
    """Index of the op that makes it; -1 for a cotangent."""
    root: fx.Node | None
    """The node that holds it when it is made (`None`: nothing reads it)."""


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
    """Storages that it reads; those of the region's inputs are left out."""
    outputs: tuple[int, ...]
    inplace: tuple[int, ...]
    """Input storages that its only output may take over, in order of preference."""
    inplace_operands: tuple[fx.Node, ...]
    """For each of `inplace`, the operand to write into."""
    replay: Replay
    digest: str


@dataclass(frozen=True)
class LoweredRegion:
    """The ops of one joint graph in the order of execution, and the storages between them."""

    joint: JointGraph
    ops: tuple[LoweredOp, ...]
    storages: tuple[LoweredStorage, ...]
    num_forward: int
    """The first `num_forward` ops are the forward."""
    storage_of: Mapping[fx.Node, int]
    """Tensor-valued node -> its storage, or `RESIDENT`."""
    mutation_sources: tuple[int, ...]
    """Storages that are copied into inputs (BatchNorm's statistics) right after the forward."""
    held_outputs: tuple[int, ...]
    """Storages that the forward hands to its caller."""
    gradient_storages: tuple[tuple[int, int], ...]
    """(storage, index of the primal) for each gradient that the backward returns."""
    cotangent_storages: tuple[int | None, ...]
    """For each cotangent its storage; `None` where no gradient flows in."""


def lower(joint: JointGraph, primal_names: Sequence[str]) -> LoweredRegion:
    """Lower a clean joint graph; `primal_names` are stable names of its inputs."""
    return _Lowering(joint, primal_names).run()


class _Lowering:
    """The state of one pass over the graph."""

    def __init__(self, joint: JointGraph, primal_names: Sequence[str]) -> None:
        self.joint = joint
        self.by_key: dict[int, int] = {}
        self.storage_of: dict[fx.Node, int] = {}
        self.references: dict[fx.Node, str] = {}
        self.sizes: list[int] = []
        self.producers: list[int] = []
        self.roots: list[fx.Node | None] = []
        self.ops: list[LoweredOp] = []
        self.namer = Namer()
        self.mutated_keys: set[int] = set()
        for primal, name in zip(joint.primals, primal_names, strict=True):
            self._add_resident(primal, name)
        self.mutated_keys = {storage_key(joint.primals[index].meta["val"])
                             for index in joint.mutations.values()}
        self.cotangents: list[int | None] = []
        for index, node in enumerate(joint.cotangents):
            self.references[node] = f"cotangent:{index}"
            if node.users:
                self.cotangents.append(self._new_storage(node.meta["val"], producer=-1))
                self.roots[-1] = node
                self.storage_of[node] = self.cotangents[-1]
            else:
                self.cotangents.append(None)

    def _add_resident(self, node: fx.Node, reference: str) -> None:
        self.by_key[storage_key(node.meta["val"])] = RESIDENT
        self.storage_of[node] = RESIDENT
        self.references[node] = reference

    def _new_storage(self, tensor: torch.Tensor, producer: int) -> int:
        index = len(self.sizes)
        self.by_key[storage_key(tensor)] = index
        self.sizes.append(tensor.untyped_storage().nbytes())
        self.producers.append(producer)
        self.roots.append(None)
        return index

    def run(self) -> LoweredRegion:
        """Visit the nodes in order."""
        last_forward = _last_forward_node(self.joint)
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
            joint=joint, ops=tuple(self.ops), storages=storages, num_forward=num_forward,
            storage_of=self.storage_of,
            mutation_sources=self._storages(mutated), held_outputs=self._storages(outputs),
            gradient_storages=tuple(
                (self.storage_of[node], index) for index, node in enumerate(joint.gradients)
                if node is not None and self.storage_of.get(node, RESIDENT) != RESIDENT),
            cotangent_storages=tuple(self.cotangents))

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
                self.references[node] = f"constant:{node.target}"
            return
        value = node.meta.get("val")
        tensors = tensors_of(value)
        fresh = [t for t in tensors if storage_key(t) not in self.by_key]
        fresh = list({storage_key(t): t for t in fresh}.values())
        if _is_alias(node, fresh):
            self._note_alias(node, value)
            return
        index = len(self.ops)
        outputs = tuple(self._new_storage(tensor, index) for tensor in fresh)
        inputs = self._storages(node.all_input_nodes)
        module, target = module_of(node), target_name(node)
        name = self.namer.name(phase, module, target)
        call = describe_call(node, self.references)
        candidates = inplace_candidates(node) if len(outputs) == 1 else ()
        usable = [(self.storage_of[c.operand], c.operand) for c in candidates
                  if self.storage_of.get(c.operand, RESIDENT) != RESIDENT]
        self.references[node] = name
        if isinstance(value, torch.Tensor):
            self.storage_of[node] = self.by_key[storage_key(value)]
            if outputs:
                self.roots[outputs[0]] = node
        self.ops.append(LoweredOp(
            node=node, name=name, target=target, module=module, source=source_of(node),
            phase=phase, inputs=inputs, outputs=outputs,
            inplace=tuple(storage for storage, _ in usable),
            inplace_operands=tuple(operand for _, operand in usable),
            replay=replay_of(node, self._sees_mutated), digest=digest(call)))

    def _note_alias(self, node: fx.Node, value: object) -> None:
        if is_tuple_element(node) and isinstance(node.args[0], fx.Node):
            self.references[node] = f"{self.references[node.args[0]]}[{node.args[1]}]"
        else:
            call = describe_call(node, self.references)
            self.references[node] = f"view:{digest(call)}"
        if not isinstance(value, torch.Tensor):
            return
        storage = self.by_key[storage_key(value)]
        self.storage_of[node] = storage
        if storage != RESIDENT and self.roots[storage] is None and is_tuple_element(node):
            self.roots[storage] = node

    def _sees_mutated(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and storage_key(value) in self.mutated_keys


def _is_alias(node: fx.Node, fresh: Sequence[torch.Tensor]) -> bool:
    """Whether the node only gives another name to storages that exist."""
    if is_tuple_element(node):
        return True
    if fresh or not tensors_of(node.meta.get("val")):
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable


def _last_forward_node(joint: JointGraph) -> fx.Node | None:
    """The last node, in order, that some forward output needs."""
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    needed: set[fx.Node] = set()
    pending = [node for node in joint.forward_outputs if node is not None]
    while pending:
        node = pending.pop()
        if node not in needed and node.op != "placeholder":
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return max(needed, key=order.__getitem__, default=None)


def _attribute(owner: fx.GraphModule, path: str) -> object:
    value: object = owner
    for part in path.split("."):
        value = getattr(value, part)
    return value
