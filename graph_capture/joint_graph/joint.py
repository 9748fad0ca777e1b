"""A joint forward+backward graph, cleaned for the planner.

AOTAutograd hands its partitioner one fx graph of the forward and the backward.  Here dead and
duplicate ops are removed, and the backward through outputs that receive no gradient: those
cotangents are zero, and plain autograd would never run that part (AOTAutograd itself allocates the
zeros and runs it).

The backward of a convolution is split in two.  ATen has one op for the gradients of input, weight
and bias, which keeps the first alive while the next kernel allocates its buffers (on a CPU, copies
of its operands in another layout); as two ops, each is alone.  The halves are the same op with
another `output_mask`: they call the same kernels, and the results are bitwise the same.  Ops that
make a returned gradient run as early as possible: such a gradient stays alive to the end anyway,
and the activation from which it is made can be freed before the gradient of the layer's input is
made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.joint_graph.duplicates import without_duplicates
from planner._graph_capture.joint_graph.inplace import can_write_inplace
from planner._graph_capture.joint_graph.reduced_losses import SHRUNK, in_its_storage
from planner._graph_capture.joint_graph.walks import ancestors, descendants, operands, readers
from planner._graph_capture.torch_compat import (
    OpOverload,
    copied_module,
    cotangent_sources,
    effect_tokens,
    gradient_targets,
    mutated_inputs,
    pytree,
    same_sizes,
)


@dataclass(frozen=True)
class JointGraph:
    """A clean joint graph and the roles of its inputs and outputs."""

    graph: fx.Graph
    owner: fx.GraphModule
    """The module with the graph's attributes."""
    primals: tuple[fx.Node, ...]
    """Inputs of the forward: parameters, buffers, the model's inputs."""
    cotangents: tuple[fx.Node, ...]
    """Gradients of the differentiable outputs: inputs of the backward."""
    forward_outputs: tuple[fx.Node | None, ...]
    """Outputs of the forward: updated inputs first, then the model's outputs."""
    mutations: dict[int, int]
    """Position among the forward outputs -> index of the primal that it is copied into."""
    differentiable_outputs: tuple[fx.Node | None, ...]
    """For each cotangent, the forward output whose gradient it is (`None`: an updated input)."""
    gradients: tuple[fx.Node | None, ...]
    """Outputs of the backward, one for each primal (`None`: no gradient)."""

    @property
    def output(self) -> fx.Node:
        """The graph's output node."""
        return self.graph.output_node()

    @property
    def returned(self) -> tuple[int, ...]:
        """Positions of the model's outputs among the forward outputs, without numbers, which other
        graphs do not return."""
        return tuple(place for place in self.returned_with_numbers
                     if (node := self.forward_outputs[place]) is None or not is_number(node))

    @property
    def returned_with_numbers(self) -> tuple[int, ...]:
        """Positions of all outputs of the model among the forward outputs."""
        tokens = effect_tokens(self.output)
        return tuple(place for place in range(len(self.forward_outputs))
                     if place not in self.mutations and place not in tokens)

    @property
    def read_cotangents(self) -> tuple[frozenset[int], ...]:
        """For each output of the backward, the places of the cotangents that it is made of."""
        found: dict[fx.Node, frozenset[int]] = {
            node: frozenset({place}) for place, node in enumerate(self.cotangents)}
        for node in self.graph.nodes:
            if node not in found:
                found[node] = frozenset().union(*(found[each] for each in node.all_input_nodes))
        returned: Any = self.output.args[0]
        return tuple(found.get(each, frozenset())
                     for each in returned[len(self.forward_outputs):])

    def described_anew(self) -> JointGraph:
        """The description of the same graph after some of its outputs were replaced."""
        return _described(self.graph, self.owner, self.primals, self.cotangents,
                          len(self.forward_outputs))

    def copy(self) -> fx.GraphModule:
        """A new module with a copy of the graph; nodes have the same names."""
        return copied_module(self.owner, self.graph)


_NOT_TAKEN_OVER = frozenset({"val", "tensor_meta", "eager_input_vals", "unbacked_bindings"})


class Emitter:
    """Inserts nodes before another one."""

    def __init__(self, graph: fx.Graph, before: fx.Node, *, compiled: bool = False) -> None:
        """`compiled`: the graph has Inductor's decompositions."""
        self._graph, self._compiled = graph, compiled
        self._before = before
        self._mode = next(node.meta["val"].fake_mode for node in graph.nodes
                          if hasattr(node.meta.get("val"), "fake_mode"))

    def __call__(self, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any
                 ) -> fx.Node:
        """A new call, attributed to the source code of `like`."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key not in _NOT_TAKEN_OVER}
        values = fx.node.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with self._mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def cast(self, value: fx.Node, dtype: torch.dtype, *, like: fx.Node) -> fx.Node:
        """A new conversion to another dtype."""
        if self._compiled:
            return self(torch.ops.prims.convert_element_type.default, value, dtype, like=like)
        return self(torch.ops.aten._to_copy.default, value, like=like, dtype=dtype)


def count_cotangents(module: fx.GraphModule) -> int:
    """Number of differentiable outputs of a joint graph."""
    return sum(is_cotangent(node) for node in module.graph.find_nodes(op="placeholder"))


def clean_joint_graph(
    module: fx.GraphModule, num_forward_outputs: int, cotangents: Sequence[bool]
) -> JointGraph:
    """The joint graph without dead code, duplicates, and the backward of outputs for which
    `cotangents` is false.  The given module is not changed."""
    graph = without_duplicates(module.graph)
    _remove_whole_slices(graph)
    _describe_whole_storages(graph)
    placeholders = graph.find_nodes(op="placeholder")
    tangents = tuple(node for node in placeholders if is_cotangent(node))
    primals = tuple(node for node in placeholders if not is_cotangent(node))
    if len(cotangents) != len(tangents):
        raise CaptureError(
            f"the graph has {len(tangents)} differentiable outputs, "
            f"but {len(cotangents)} were described")
    for node in primals:
        if not isinstance(node.meta.get("val"), torch.Tensor | torch.SymInt):
            raise CaptureError(
                f"input {node.name} of the graph is a {type(node.meta.get('val')).__name__}, "
                "not a tensor: capture with static shapes")
    _prune_backward(graph, num_forward_outputs,
                    [t for t, used in zip(tangents, cotangents, strict=True) if not used])
    eliminate_dead_code(graph)
    _forward_first(graph, num_forward_outputs)
    halve_convolution_backwards(graph)
    _hasten_gradients(graph, num_forward_outputs)
    graph.lint()
    return _described(graph, module, primals, tangents, num_forward_outputs)


def _forward_first(graph: fx.Graph, num_forward_outputs: int) -> None:
    """Move the forward before the backward.  A returned view of a tensor that is written in place
    is traced again after the backward."""
    returned: Any = graph.output_node().args[0]
    forward = ancestors((node for node in returned[:num_forward_outputs]
                         if isinstance(node, fx.Node)), lambda node: node.op != "placeholder")
    backward = _in_backward(graph)
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    first = next((node for node in nodes if node in backward), graph.output_node())
    for node in nodes[nodes.index(first):]:
        if node in forward:
            first.prepend(node)


def _remove_whole_slices(graph: fx.Graph) -> None:
    """Remove the slices that indexing such as `x[:, 0]` takes of whole dimensions of symbolic size,
    and the copies in their backward.  Where a size is a number, ATen takes no such slice."""
    for target, first in _SLICES.items():
        for node in graph.find_nodes(op="call_function", target=target):
            given: list[Any] = [*node.args[first:], *_WHOLE_SLICE[len(node.args) - first:]]
            dimension, start, end, step = given
            source = node.args[0]
            if (isinstance(node.meta["val"].shape[dimension], torch.SymInt)
                    and (start or 0, step) == (0, 1) and end in (None, _WHOLE_SLICE[2])):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


_SLICES = {torch.ops.aten.slice.Tensor: 1, torch.ops.aten.slice_backward.default: 2}
"""Ops whose arguments from this place on are dimension, start, end and step."""
_WHOLE_SLICE = (0, 0, torch.iinfo(torch.int64).max, 1)


def _describe_whole_storages(graph: fx.Graph) -> None:
    for target in SHRUNK:
        for node in graph.find_nodes(op="call_function", target=target):
            node.meta["val"] = in_its_storage(target, *traced_call(node))


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase unread nodes except random ops: without these, later ones would draw other numbers.
    Within a compilation fx would erase these, too."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure())


def _described(graph: fx.Graph, owner: fx.GraphModule, primals: tuple[fx.Node, ...],
               tangents: tuple[fx.Node, ...], num_forward_outputs: int) -> JointGraph:
    output = graph.output_node()
    returned = output.args[0]
    forward_outputs = tuple(returned[:num_forward_outputs])
    gradients = list(returned[num_forward_outputs:])
    by_input: list[fx.Node | None] = [None] * len(primals)
    for position, source in gradient_targets(output).items():
        by_input[source] = returned[position]
    if not gradient_targets(output):
        by_input[:len(gradients)] = gradients
    return JointGraph(
        graph=graph, owner=owner, primals=primals, cotangents=tangents,
        forward_outputs=tuple(n if isinstance(n, fx.Node) else None for n in forward_outputs),
        mutations=mutated_inputs(output),
        differentiable_outputs=tuple(
            source if isinstance(source, fx.Node) else None
            for source in cotangent_sources(tangents, output, returned)),
        gradients=tuple(n if isinstance(n, fx.Node) else None for n in by_input))


def _hasten_gradients(graph: fx.Graph, num_forward_outputs: int) -> None:
    """Move each op of the backward that makes a returned gradient, also by way of views and casts,
    to just behind the last of its operands, together with views of it; ops behind the same operand
    keep their order."""
    nodes = list(graph.nodes)
    output = graph.output_node()
    of_forward = {node for node in output.args[0][:num_forward_outputs]
                  if isinstance(node, fx.Node)}
    hastened = {output}
    for node in reversed(nodes):
        if (node.op == "call_function" and node.users and node not in of_forward
                and not node.is_impure() and hastened.issuperset(node.users)
                and (is_view(node) or all(user is output or len(_tensor_inputs(user)) == 1
                                          for user in node.users))):
            hastened.add(node)
    rank: dict[fx.Node, float] = {}
    in_backward = _in_backward(graph)
    start = float("inf")  # where the backward begins
    latest = 0.0  # the highest rank so far
    for position, node in enumerate(nodes):
        rank[node] = position
        if is_number(node):
            rank[node] = max((rank[size] for size in node.all_input_nodes), default=position)
        elif node.op == "call_function" and node in in_backward:
            start = min(start, position)
            if node in hastened:
                last = max(rank[operand] for operand in node.all_input_nodes)
                if _makes_anew(node, hastened):
                    last = max(last, latest)
                rank[node] = last if last >= start else start - 0.5
            latest = max(latest, rank[node])
    previous = nodes[0]
    for node in sorted(nodes, key=rank.__getitem__):  # stable: operands stay in front
        if node is not previous:
            previous.append(node)
        previous = node


def _makes_anew(node: fx.Node, hastened: set[fx.Node]) -> bool:
    """True for an op that turns the gradient of a tensor that only it reads into another one, as
    the backward of weight normalization does.

    It waits for the gradient of the layer's input, which may be the last reader of the weight.
    """
    return (len(_tensor_inputs(node)) > 1 and not is_view(node)
            and not can_write_inplace(node.target)
            and any(source in hastened and readers(source, is_view) == {node}
                    for source in operands(node, is_view)))


def _tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, without numbers, which are constants in other graphs."""
    return [source for source in node.all_input_nodes if not is_number(source)]


def is_number(node: fx.Node) -> bool:
    """True if a node is a symbolic number, or an input or output that holds one: Dynamo passes a
    Python float as a tensor."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float):
        return True
    if not isinstance(value, torch.Tensor) or (value.dim(), value.dtype, value.device.type) != (
            0, torch.float64, "cpu"):
        return False
    if node.target is torch.ops.aten.scalar_tensor.default:
        return isinstance(node.args[0], fx.Node) and all(
            user.op == "output" for user in node.users)
    return node.op == "placeholder" and not is_cotangent(node) and all(
        user.target is torch.ops.aten._local_scalar_dense.default for user in node.users)


def _in_backward(graph: fx.Graph) -> set[fx.Node]:
    """The cotangents and all nodes computed from them."""
    return descendants(filter(is_cotangent, graph.find_nodes(op="placeholder")))


def is_view(node: fx.Node) -> bool:
    """True if the op, by its schema, returns a view of its operand."""
    return isinstance(node.target, OpOverload) and node.target.is_view


def unviewed(node: fx.Node) -> fx.Node:
    """The base of a view; the node itself if it is none."""
    while is_view(node) or node.target is torch.ops.aten._unsafe_view.default:
        node = node.all_input_nodes[0]
    return node


def primals_of(module: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a joint graph's forward."""
    return [node for node in module.graph.find_nodes(op="placeholder") if not is_cotangent(node)]


def is_cotangent(node: fx.Node) -> bool:
    """True if an input of a joint graph belongs to its backward."""
    return "tangents" in str(node.target)


def _prune_backward(
    graph: fx.Graph, num_forward_outputs: int, absent: Sequence[fx.Node]
) -> None:
    """Propagate the zeros of `absent` cotangents.

    The backward is linear in the cotangents, so a node is zero if all its cotangent-dependent
    inputs are.  Where a zero meets a gradient, a sum passes the gradient on and any other op gets
    the zeros it needs; a gradient that is zero altogether becomes `None`, as in plain autograd.
    """
    if not absent:
        return
    dependent = _in_backward(graph)
    zero: set[fx.Node] = set(absent)
    for node in list(graph.nodes):
        sources = [source for source in node.all_input_nodes if source in dependent]
        zeros = [source for source in sources if source in zero]
        if node.op == "output" or not zeros:
            continue
        if len(zeros) == len(sources):
            zero.add(node)
            continue
        if survivor := _surviving_summand(node, zero):
            node.replace_all_uses_with(survivor)
            continue
        for source in zeros:
            node.replace_input_with(source, _materialised_zeros(Emitter(graph, node), source))
    output = graph.output_node()
    returned = list(output.args[0])
    for position in range(num_forward_outputs, len(returned)):
        if returned[position] in zero:
            returned[position] = None
    output.args = (type(output.args[0])(returned),)


def _surviving_summand(node: fx.Node, zero: set[fx.Node]) -> fx.Node | None:
    """The other summand of a sum with a zero, if it is bitwise the sum."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    survivor = right if left in zero else left
    if not isinstance(survivor, fx.Node):
        return None
    mine, whole = survivor.meta["val"], node.meta["val"]
    same = same_sizes(mine.shape, whole.shape) and mine.dtype == whole.dtype
    return survivor if same else None


def _materialised_zeros(emit: Emitter, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"cannot make the zero gradient of {node.name}, "
                           f"which is a {type(value).__name__}")
    return emit(torch.ops.aten.zeros.default, list(value.shape), like=node, dtype=value.dtype,
                device=value.device)


def is_tuple_element(node: fx.Node) -> bool:
    """True if the node picks one result of an op with several."""
    return node.op == "call_function" and node.target is operator.getitem


def tensors_of(tree: object) -> list[torch.Tensor]:
    """The tensors in a node's value or among an op's arguments, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def traced_call(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The traced values of a node's arguments, and of the node."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)),
                              lambda operand: operand.meta.get("val"))
    return args, kwargs, node.meta.get("val")


_WHOLE = torch.ops.aten.convolution_backward.default
OUTPUT_MASK = 10
"""Position of the argument that selects the wanted gradients."""


def halves(target: object, args: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Arguments of the two calls into which a call can be split, the half for weight and bias
    first; none if it is no backward of a convolution, or makes only one of them."""
    if target is not _WHOLE or not (args[OUTPUT_MASK][0] and any(args[OUTPUT_MASK][1:])):
        return ()
    _, *of_weight = args[OUTPUT_MASK]
    return tuple((*args[:OUTPUT_MASK], mask)
                 for mask in ([False, *of_weight], [True, False, False]))


def halve_convolution_backwards(graph: fx.Graph) -> None:
    """Split each backward of a convolution that makes gradients of both input and weight."""
    for node in graph.find_nodes(op="call_function", target=_WHOLE):
        calls = halves(node.target, node.args)
        elements = list(node.users)
        if not calls or any(user.target is not operator.getitem for user in elements):
            continue
        with graph.inserting_before(node):
            of_weight, of_input = (_half(graph, node, args) for args in calls)
        for element in elements:
            element.replace_input_with(node, of_input if element.args[1] == 0 else of_weight)
        graph.erase_node(node)


def _half(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    half = graph.call_function(_WHOLE, args)
    half.meta = dict(node.meta)
    half.meta["val"] = tuple(value if wanted else None for value, wanted
                             in zip(node.meta["val"], args[OUTPUT_MASK], strict=True))
    return half
