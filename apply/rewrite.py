"""A lowered region and its insertions -> the forward and backward graphs that execute them.

The runs are emitted in the order of the schedule: first runs in the order of the region, insertions
(see `_EMIT`) just before the op that they serve.  A view is recomputed where it is first needed
after its storage was made, and again in the backward, so that one tensor for each storage crosses
from the forward to the backward: on the host if it is stored there (`apply.host_store`). fx drops
every name after its last use; the storages then live as long as `solvers.simulator` says.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from planner._apply.host_store import begin_fetch, begin_store, finish
from planner._apply.rewrite_spec import (
    Fetch,
    InplaceReuse,
    InsertedAction,
    Insertion,
    Release,
    RunAgain,
    Store,
    Stored,
)
from planner._graph_capture.joint_graph.inplace import write_inplace
from planner._graph_capture.joint_graph.joint import is_cotangent, is_tuple_element, tensors_of
from planner._graph_capture.joint_graph.lower import (
    RESIDENT,
    LoweredOp,
    LoweredRegion,
    epilogue_name,
)
from planner._graph_capture.joint_graph.replay import draw, new_state, replay
from planner._graph_capture.joint_graph.symbolic_sizes import Sizes
from planner._graph_capture.torch_compat import (
    OpOverload,
    expression_of,
    module_of,
    split_joint_graph,
)
from planner._graph_capture.torch_compat.recurrent import in_training
from planner._graph_capture.training_graph import Phase


@dataclass(frozen=True, slots=True)
class RewrittenRegion:
    """The two modules that AOTAutograd's runtime calls."""

    forward: fx.GraphModule
    backward: fx.GraphModule


def rewrite(region: LoweredRegion, insertions: Sequence[Insertion] = (),
            inplace_reuses: Sequence[InplaceReuse] = (),
            released: Sequence[int] = ()) -> RewrittenRegion:
    """Return forward and backward of `region` with these insertions and in-place runs.  `released`:
    outputs of its forward that the caller does not keep alive, so that a run of their op in the
    forward replaces them."""
    return _Rewriter(region, insertions, inplace_reuses, released).run()


@dataclass
class _ReplayInputs:
    """The inputs that the first run of an op saves for its replays."""

    state: fx.Node | None = None
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Rewriter:
    """Emits the runs one by one into a new joint graph, then splits it."""

    def __init__(self, region: LoweredRegion, insertions: Sequence[Insertion],
                 inplace_reuses: Sequence[InplaceReuse], released: Sequence[int]) -> None:
        self.region = region
        self.index_of = {op.name: index for index, op in enumerate(region.ops)}
        groups = {insertion.before: insertion.actions for insertion in insertions}
        self.before_epilogue = groups.pop(epilogue_name(region.index), ())
        self.before = {self.index_of[name]: actions for name, actions in groups.items()}
        self.inplace_reuses: Mapping[tuple[int, int], int] = {
            (self.index_of[t.op], t.run): t.candidate for t in inplace_reuses}
        self.replayed = {self.index_of[action.op] for insertion in insertions
                         for action in insertion.actions if isinstance(action, RunAgain)}
        self.kept = (set(region.held_outputs) | {s for s, _ in region.gradient_storages}) - {
            region.storage_of[node] for place, node in enumerate(region.returned)
            if place in released and node is not None}
        self.nodes_of: dict[int, list[fx.Node]] = {}
        for node, storage in region.storage_of.items():
            self.nodes_of.setdefault(storage, []).append(node)
        self.makers = {op.node for op in region.ops} | {s.root for s in region.storages}
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.runs: Counter[int] = Counter()
        self.replay_inputs: dict[int, _ReplayInputs] = {}
        self.leaving: dict[int, fx.Node] = {}  # storage to its copy to the host
        self.on_host: dict[int, fx.Node] = {}
        self.coming: dict[int, fx.Node] = {}  # storage to its copy back, until it is read
        self.in_forward = True
        self.forward_nodes: set[fx.Node] = set()
        self.saved: dict[fx.Node, None] = {}
        self.sizes = Sizes.of(region.joint.primals)
        self.size_nodes: dict[tuple[bool, Any], fx.Node] = {}

    def run(self) -> RewrittenRegion:
        """Emit everything and split."""
        joint = self.region.joint
        for node in joint.graph.nodes:
            if node.op == "placeholder":
                self._emit_copy(node)
        outputs: list[object] = []
        for index in range(len(self.region.ops) + 1):
            if index == self.region.num_forward:
                self._emit_inserted(self.before_epilogue)
                outputs.extend(self._resolved(joint.output.args[0][:len(joint.forward_outputs)]))
                self._enter_backward()
            if index < len(self.region.ops):
                self._emit_inserted(self.before.get(index, ()))
                self._emit_run(index)
        outputs.extend(self._resolved(joint.output.args[0][len(joint.forward_outputs):]))
        output = self.graph.output(outputs)
        output.meta = dict(joint.output.meta)
        for value in outputs[len(joint.forward_outputs):]:
            if isinstance(value, fx.Node):
                self._note_crossing(value)
        self.graph.lint()
        module = module_of(joint.owner, self.graph)
        forward, backward = split_joint_graph(
            module, list(self.saved), len(joint.forward_outputs))
        return RewrittenRegion(forward, backward)

    def _enter_backward(self) -> None:
        """From now on recompute views, from the saved tensors."""
        self.in_forward = False
        roots = {storage.root for storage in self.region.storages}
        self.env = {node: new for node, new in self.env.items()
                    if node in roots or node.op == "placeholder"}

    def _resolved(self, values: Sequence[object]) -> list[object]:
        return [self._value(v) if isinstance(v, fx.Node) else v for v in values]

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the node in the new graph with the current value of `node`; a missing view is
        recomputed."""
        storage = self.region.storage_of.get(node, RESIDENT)
        if storage in self.coming:
            self._end_fetch(storage)
        if node not in self.env:
            if node in self.makers:
                raise ValueError(f"{node.name} is read where the schedule does not hold it")
            for source in node.all_input_nodes:
                self._value(source)
            self._emit_copy(node)
        return self.env[node]

    def _emit_inserted(self, actions: Sequence[InsertedAction]) -> None:
        for action in actions:
            if type(action) not in _EMIT:
                raise ValueError(f"{action!r} is no action that the rewriter can emit; it knows "
                                 f"{', '.join(known.__name__ for known in _EMIT)}")
            _EMIT[type(action)](self, action)

    def _emit_run_again(self, action: RunAgain) -> None:
        self._emit_run(self.index_of[action.op])

    def _emit_store(self, action: Store) -> None:
        storage, root = self._moved(action)
        self.leaving[storage] = self._emit_call(begin_store, (self._value(root),), root)

    def _emit_release(self, action: Release) -> None:
        storage, root = self._moved(action)
        host = self._emit_call(finish, (self.leaving.pop(storage),), root)
        value: Any = root.meta["val"]
        with value.fake_mode:
            host.meta["val"] = torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="cpu")
        self.on_host[storage] = host

    def _emit_fetch(self, action: Fetch) -> None:
        storage, root = self._moved(action)
        host = self.on_host[storage]
        self._note_crossing(host)
        for node in self.nodes_of[storage]:
            self.env.pop(node, None)
        self.coming[storage] = self._emit_call(
            begin_fetch, (host, root.meta["val"].device), root)

    def _end_fetch(self, storage: int) -> None:
        root = self.region.storages[storage].root
        assert root is not None, "nothing reads what has no root"
        new = self._emit_call(finish, (self.coming.pop(storage),), root)
        new.meta["val"] = root.meta["val"]
        self.env[root] = new

    def _emit_call(self, function: Callable[..., Any], args: tuple[Any, ...], original: fx.Node
                   ) -> fx.Node:
        new = self.graph.call_function(function, args)
        self._describe(new, original)
        new.meta.pop("val", None)  # a copy under way is no tensor
        return new

    def _moved(self, action: Stored) -> tuple[int, fx.Node]:
        """Return the storage that an action moves, and the node that represents it when it is made.
        """
        storage = self.region.ops[self.index_of[action.op]].outputs[action.output]
        root = self.region.storages[storage].root
        if root is None:
            raise ValueError(f"{action!r} moves what nothing reads")
        return storage, root

    def _emit_run(self, index: int) -> None:
        op = self.region.ops[index]
        run = self.runs[index]
        self.runs[index] += 1
        copied = op.replay.copied_inputs if run else ()
        for source in op.node.all_input_nodes:
            if source not in copied:
                self._value(source)
        if run:
            self._forget(op)
        elif index in self.replayed:
            self._prepare_replays(index, op)
        candidate = self.inplace_reuses.get((index, run))
        if candidate is not None:
            new = self._emit_inplace(index, op, run, op.inplace_operands[candidate])
        elif run:
            new = self._emit_replay(index, op)
        elif op.replay.random and index in self.replayed:
            new = self._emit_draw(index, op)
        else:
            new = self._emit_copy(op.node)
        self.env[op.node] = new
        for user in op.node.users:
            # A tuple must not outlive its run: it would keep all of its elements alive.
            if is_tuple_element(user) and not (
                    run and self._keeps(self.region.storage_of.get(user, RESIDENT))):
                self._emit_copy(user)

    def _keeps(self, storage: int) -> bool:
        """Return whether the first result is still to be returned, so that a replay does not
        replace it.  Once the forward has returned, it does."""
        return self.in_forward and storage in self.kept

    def _forget(self, op: LoweredOp) -> None:
        """Drop views and elements of the previous results, which are stale once the op runs again.
        """
        for storage in op.outputs:
            if not self._keeps(storage):
                self.coming.pop(storage, None)
                for node in self.nodes_of.get(storage, ()):
                    self.env.pop(node, None)

    def _prepare_replays(self, index: int, op: LoweredOp) -> None:
        inputs = _ReplayInputs()
        for source in op.replay.copied_inputs:
            copy = self.graph.call_function(torch.ops.aten.clone.default, (self.env[source],))
            self._describe(copy, source)
            inputs.copies[source] = copy
        self.replay_inputs[index] = inputs

    def _emit_draw(self, index: int, op: LoweredOp) -> fx.Node:
        """Emit the first run of a random op that runs again; return the node that replaces it."""
        value = op.node.meta["val"]
        sample: Any = tensors_of(value)[0]
        new = self.graph.call_function(*draw(
            op.node.target, *self._arguments(op, {}), sample.device))
        self._describe(new, op.node)
        with sample.fake_mode:
            state = new_state(sample.device)
        results = value if isinstance(value, tuple | list) else (value,)
        new.meta["val"] = (*results, state)
        self.replay_inputs[index].state = self._emit_element(new, len(results), op.node)
        return new if results is value else self._emit_element(new, 0, op.node)

    def _emit_element(self, made: fx.Node, position: int, original: fx.Node) -> fx.Node:
        element = self.graph.call_function(operator.getitem, (made, position))
        self._describe(element, original)
        element.meta["val"] = made.meta["val"][position]
        return element

    def _emit_replay(self, index: int, op: LoweredOp) -> fx.Node:
        inputs = self.replay_inputs[index]
        args, kwargs = self._arguments(op, inputs.copies)
        target = op.node.target
        if inputs.state is not None:
            self._note_crossing(inputs.state)
            device = tensors_of(op.node.meta["val"])[0].device
            target, args, kwargs = replay(target, args, kwargs, device, inputs.state)
        new = self.graph.call_function(in_training(target), args, kwargs)
        self._describe(new, op.node)
        return new

    def _emit_inplace(
        self, index: int, op: LoweredOp, run: int, overwritten: fx.Node
    ) -> fx.Node:
        target = op.node.target
        assert isinstance(target, OpOverload)
        args, kwargs = self._arguments(op, self.replay_inputs[index].copies if run else {})
        new = write_inplace(self.graph, target, args, kwargs, self.env[overwritten], self._size)
        self._describe(new, op.node)
        return new

    def _size(self, size: Any) -> Any:
        """A size in the new graph: a number, or a node if it is symbolic."""
        if not isinstance(size, torch.SymInt):
            return size
        if not expression_of(size).free_symbols:  # torch has fixed it
            return int(size)
        key = self.in_forward, expression_of(size)
        if key not in self.size_nodes:
            givers = [self._operand(giver) for giver in self.sizes.givers(self.region.joint.graph)]
            new = self.graph.call_function(self.sizes.function(size), tuple(givers))
            self._describe(new, givers[0])
            new.meta["val"] = size
            self.size_nodes[key] = new
        return self.size_nodes[key]

    def _arguments(
        self, op: LoweredOp, copies: Mapping[fx.Node, fx.Node]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the current operands of a run; `copies` replace inputs that the step mutates."""

        def operand(node: fx.Node) -> fx.Node:
            if node not in copies:
                return self._operand(node)
            self._note_crossing(copies[node])
            return copies[node]

        return fx.map_arg(op.node.args, operand), dict(fx.map_arg(op.node.kwargs, operand))

    def _emit_copy(self, node: fx.Node) -> fx.Node:
        new = self.graph.node_copy(node, self._operand)
        new.target = in_training(new.target)
        if new.target is torch.ops.aten.view.default:
            # No view may exist if a kernel lays out its result in another way than its trace.
            new.target = torch.ops.aten.reshape.default
        self._describe(new, node)
        self.env[node] = new
        return new

    def _operand(self, node: fx.Node) -> fx.Node:
        new = self.env[node]
        self._note_crossing(new)
        return new

    def _note_crossing(self, new: fx.Node) -> None:
        """Record a value of the forward that the backward reads as a saved tensor."""
        if not self.in_forward and new in self.forward_nodes:
            self.saved.setdefault(new)

    def _describe(self, new: fx.Node, original: fx.Node) -> None:
        new.meta = dict(original.meta)
        if original.op == "placeholder":
            if not is_cotangent(original):
                self.forward_nodes.add(new)
            return
        phase = Phase.FORWARD if self.in_forward else Phase.BACKWARD
        # Without this, the split would put a recomputation that depends on inputs alone into both.
        new.meta["partitioner_tag"] = f"must_be_in_{phase.value}"
        if self.in_forward:
            self.forward_nodes.add(new)


_EMIT: Mapping[type, Callable[[_Rewriter, Any], None]] = {
    RunAgain: _Rewriter._emit_run_again, Store: _Rewriter._emit_store,
    Release: _Rewriter._emit_release, Fetch: _Rewriter._emit_fetch}
"""Method that emits each kind of inserted action."""
