"""Operands over which an op can write its result once they are dead.

Functionalization turned in-place ops into allocating ones; a kernel that reads each element before
it writes it can be put back in place.  That holds for every pointwise op (torch tags them), for the
softmax backwards, which reduce a whole row before they write it, for the summand of a matrix
product, and for a tensor of which a part is replaced.  The schedule determines if the input is
dead: `solvers.simulator` decides among the candidates found here.

Blind spots: out-variants that torch generated (functional call, then copy) would save nothing and
are not used; if a kernel's result has another layout than its traced fake copy, an op that should
have overwritten it allocates new memory (see `overwrite`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from planner._graph_capture.torch_compat import OpOverload, same_sizes, schema_of
from planner._graph_capture.torch_compat.dispatch import define_op
from planner._graph_capture.torch_compat.symbols import is_dense

_aten = torch.ops.aten

_ROW_WISE = frozenset({
    _aten._softmax_backward_data.default,
    _aten._log_softmax_backward_data.default,
})
"""Not pointwise, but each row of the gradient is reduced before any of it is overwritten."""
_ADDING = {_aten.addmm.default: _aten.addmm_.default, _aten.baddbmm.default: _aten.baddbmm_.default}
"""Matrix products with a summand as the first operand."""


def _scattering(op: OpOverload, view: OpOverload) -> OpOverload:
    """The op that copies its second operand into `view` of its first, which `op` leaves as it is.
    """
    schema = schema_of(op)
    takes = str(schema).partition("(Tensor ")[2].rpartition(" -> ")[0]

    def run(whole: torch.Tensor, part: torch.Tensor, *where: Any, **named: Any) -> torch.Tensor:
        view(whole, *where, **named).copy_(part)
        return whole

    return define_op(f"{schema.name.partition('::')[2]}_",
                     f"(Tensor(a!) {takes} -> Tensor(a!)", run)


_SCATTERING = {_aten.slice_scatter.default: _scattering(_aten.slice_scatter.default,
                                                        _aten.slice.Tensor),
               _aten.select_scatter.default: _scattering(_aten.select_scatter.default,
                                                         _aten.select.int)}
_INPLACE = {**_ADDING, **_SCATTERING}


def inplace_candidates(
    node: fx.Node, share_storage: Callable[[fx.Node, fx.Node], bool]
) -> tuple[fx.Node, ...]:
    """Operands of `node`, in order of preference, that its result may overwrite.

    `share_storage`: true if two operands live in one storage.  The operand's tensor must have the
    result's shape, strides, dtype and conjugate bit and cover its whole storage; no other operand
    may see that storage through a different view.
    """
    result = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(result, torch.Tensor):
        return ()
    writer = _writer(node.target)
    if writer is None and node.target is not _aten.clone.default:
        return ()
    if not _fills_its_storage(result):
        return ()
    found = []
    for position, operand in enumerate(node.args):
        if not isinstance(operand, fx.Node) or not same_layout(operand.meta.get("val"), result):
            continue
        if operand.op == "placeholder" or not _fills_its_storage(operand.meta["val"]):
            continue
        if writer is not None and not writer.accepts(position):
            continue
        if operand not in found and all(_same_view(operand, other) for other in node.all_input_nodes
                                        if share_storage(operand, other)):
            found.append(operand)
    return tuple(found)


def can_write_inplace(target: OpOverload) -> bool:
    """True if the op's result may overwrite some operand, layouts permitting."""
    return target is _aten.clone.default or _writer(target) is not None


def write_inplace(
    graph: fx.Graph, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
    operand: fx.Node, size_of: Callable[[Any], Any] = lambda size: size,
) -> fx.Node:
    """Emit `target(*args, **kwargs)` such that its result is written over `operand`, one of the
    candidates of `inplace_candidates`; `size_of`: what a size is in the graph, a number or a node.
    """
    if target is _aten.clone.default:
        variant, settings = _aten.alias.default, {}
    else:
        writer = _writer(target)
        if writer is None:
            raise ValueError(f"{target} has no variant that writes into an operand")
        variant, destination = writer.variant(args, operand)
        settings = {**kwargs, **destination}
    strides = tuple(tuple(map(size_of, arg.meta["val"].stride())) for arg in args
                    if isinstance(arg, fx.Node) and isinstance(arg.meta["val"], torch.Tensor))
    return graph.call_function(overwrite, (variant, settings, target, args, kwargs, strides))


def overwrite(
    variant: OpOverload, settings: dict[str, Any], target: OpOverload, args: tuple[Any, ...],
    kwargs: dict[str, Any], strides: tuple[tuple[int, ...], ...],
) -> torch.Tensor:
    """`variant(*args, **settings)`, which overwrites an operand, if the operands have their traced
    strides; otherwise the functional `target(*args, **kwargs)`.

    Some kernels lay out their results differently from their traced fake copies (BatchNorm of a
    transposed input does); a result written over such an operand would not have the strides that
    later views expect.

    An operand may be a view; the result, a new tensor to autograd, is none: where the model returns
    it, the caller may change it.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not all(map(has_strides, tensors, strides)):
        return target(*args, **kwargs)
    result: torch.Tensor = variant(*args, **settings)
    return _aten._unsafe_view(result, result.shape) if result._is_view() else result


def has_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """True if these are the strides of `tensor`, dimensions of size 1 aside."""
    found = tensor.stride()
    return found == strides or all(
        mine == wanted or size == 1
        for mine, wanted, size in zip(found, strides, tensor.shape, strict=True))


@dataclass(frozen=True, slots=True)
class _Writer:
    """The variants of an op that write into one of its operands."""

    inplace: OpOverload | None
    """`op_`, which writes into the first operand."""
    out: OpOverload | None
    """`op.out`, which writes into the operand passed as `out_name`."""
    out_name: str

    def accepts(self, position: int) -> bool:
        return self.out is not None or (self.inplace is not None and position == 0)

    def variant(
        self, args: tuple[Any, ...], operand: fx.Node
    ) -> tuple[OpOverload, dict[str, Any]]:
        """The op to call, and the keyword argument for the operand if it needs one."""
        if self.inplace is not None and args and args[0] is operand:
            return self.inplace, {}
        if self.out is None:
            raise ValueError(f"{self.inplace} can write only into its first operand")
        return self.out, {self.out_name: operand}


@cache
def _writer(target: OpOverload) -> _Writer | None:
    if target in _INPLACE:
        return _Writer(_INPLACE[target], None, "")
    if torch.Tag.pointwise not in target.tags and target not in _ROW_WISE:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or target is _aten.clone.default:
        return None
    inplace = _inplace_overload(target)
    out, out_name = _out_overload(target)
    if inplace is None and out is None:
        return None
    return _Writer(inplace, out, out_name)


def _inplace_overload(target: OpOverload) -> OpOverload | None:
    namespace, _, name = schema_of(target).name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name + "_", None)
    overload = schema_of(target).overload_name or "default"
    if packet is None or overload not in packet.overloads():
        return None
    variant = getattr(packet, overload)
    same = [a.name for a in schema_of(variant).arguments] == [
        a.name for a in schema_of(target).arguments]
    return variant if same and schema_of(variant).is_mutable else None


def _out_overload(target: OpOverload) -> tuple[OpOverload | None, str]:
    wanted = [(a.name, str(a.type)) for a in schema_of(target).arguments]
    packet = target.overloadpacket
    for name in packet.overloads():
        variant = getattr(packet, name)
        outs = [a for a in schema_of(variant).arguments if a.is_out]
        others = [(a.name, str(a.type)) for a in schema_of(variant).arguments if not a.is_out]
        if len(outs) == 1 and others == wanted and torch.Tag.generated not in variant.tags:
            return variant, outs[0].name
    return None, ""


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return (tensor.storage_offset() == 0
            and same_sizes([tensor.untyped_storage().nbytes()],
                           [tensor.numel() * tensor.element_size()])
            and is_dense(tensor))


def same_layout(value: object, result: torch.Tensor) -> bool:
    """True if a value is a tensor with the other's shape, strides, dtype, device, conjugate bit and
    sign."""
    return (isinstance(value, torch.Tensor) and same_sizes(value.shape, result.shape)
            and value.dtype == result.dtype and same_sizes(value.stride(), result.stride())
            and value.device == result.device and value.is_conj() == result.is_conj()
            and value.is_neg() == result.is_neg())


def _same_view(operand: fx.Node, other: fx.Node) -> bool:
    mine, theirs = operand.meta["val"], other.meta.get("val")
    return (same_layout(theirs, mine) and isinstance(theirs, torch.Tensor)
            and theirs.storage_offset() == mine.storage_offset())


