"""Names and digests that are the same for the same graph in any process, on any machine.

A name is module path, op and occurrence, so changes elsewhere in the model do not affect it.  A
digest covers the computation of an op: target, arguments, their origin, shapes and dtypes.  A
structure is the same text without sizes: two batches of different size give different digests and
one structure if the model treats both alike.  Device indices are left out (a plan made for `cuda:0`
serves `cuda:1`); nothing here depends on Python's hash seed or on fx node names.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any

import torch
from torch import fx, nn

from planner._graph_capture.torch_compat import OpOverload, schema_of
from planner._graph_capture.training_graph import Phase
from planner._graph_capture.user_code import is_user_code


class Namer:
    """Hands out stable names in the order of the ops."""

    def __init__(self, region: int = 0) -> None:
        self._prefix = f"{region}:" if region else ""
        self._seen: Counter[tuple[Phase, str, str]] = Counter()

    def name(self, phase: Phase, module: str, target: str) -> str:
        """The name of the next op of this kind, e.g. `transformer.h.0.attn/aten.bmm#1`; regions
        after the first prefix their number."""
        short = target.removesuffix(".default")
        occurrence = self._seen[phase, module, short]
        self._seen[phase, module, short] += 1
        mark = "~" if phase is Phase.BACKWARD else ""
        return f"{self._prefix}{mark}{module}/{short}#{occurrence}"


def module_of(node: fx.Node) -> str:
    """Qualified name of the module that called the op, or whose forward it differentiates."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = next(reversed(stack.values()))
    return _plain_path(path)


def names_in_model(model: nn.Module, values: Sequence[Any]) -> list[str | None]:
    """Return the name of each value that is a parameter or buffer of the model, else `None`."""
    names = {id(tensor): name for name, tensor in
             (*model.named_parameters(), *model.named_buffers())}
    return [names.get(id(value)) for value in values]


def name_modules(captured: fx.GraphModule, root: nn.Module) -> None:
    """Replace the module names in a graph that Dynamo captured by those of `root`.

    Dynamo names a module by the path of the code to it, which differs with whatever wraps a forward
    (`L['own'].__self__.h[0]`, a cell of a closure), and keys it by identity.  A module that is none
    of `root`'s is named by the one that calls it.
    """
    names = {str(id(module)): name for name, module in root.named_modules()}
    for node in captured.graph.nodes:
        stack, caller = node.meta.get("nn_module_stack"), ""
        if stack:
            named = node.meta["nn_module_stack"] = {}
            for key, (path, kind) in stack.items():
                known = names.get(key.partition("@")[0])
                caller = known if known is not None else within(
                    caller, _plain_path(path).rpartition(".")[2])
                named[key] = caller, kind


def modules_as_in(names: Sequence[str], planned: Sequence[str]) -> dict[str, str]:
    """By which module's each module's name is to be replaced for ops of these `names` to have the
    `planned` ones; nothing if no such replacement exists."""
    found: dict[str, str] = {}
    if len(names) == len(planned):
        for mine, theirs in zip(map(_parts, names), map(_parts, planned), strict=True):
            if mine[::2] != theirs[::2] or found.setdefault(mine[1], theirs[1]) != theirs[1]:
                return {}
    return {mine: theirs for mine, theirs in found.items() if mine != theirs}


def _parts(name: str) -> tuple[str, str, str]:
    """What an op's name has in front of its module, the module, and the rest."""
    path, _, op = name.rpartition("/")
    module = re.sub(r"^(\d+:)?~?", "", path)
    return path.removesuffix(module), module, op


def rename_modules(graph: fx.Graph, names: Mapping[str, str]) -> None:
    """Replace names of the modules that call a graph's ops."""
    for node in graph.nodes:
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if (stack := node.meta.get(key)) and (path := _plain_path(
                    next(reversed(stack.values()))[0])) in names:
                node.meta[key] = {"": (names[path], "")}


def within(block: str, module: str) -> str:
    """Qualified name of a module of a block."""
    return f"{block}.{module}" if block and module else block or module


def _plain_path(path: str) -> str:
    """`L['self'].h._modules['0'].attn` -> `h.0.attn`."""
    path = re.sub(r"^L\['\w+'\]", "", path)
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", path)
    return ".".join(part for part in path.split(".") if part and part not in _OF_WRAPPERS)


_OF_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes under which wrappers of torch (`torch.compile`, fully sharded data parallel,
`checkpoint_wrapper`) keep the module that they wrap."""


def source_of(node: fx.Node) -> str:
    """`file:line` of the innermost frame of the model's own code."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return next((f"{PurePath(path).name}:{line}" for path, line in reversed(frames)
                 if is_user_code(path)), "")


def target_name(node: fx.Node) -> str:
    """The op, e.g. `aten.addmm.default`."""
    target = node.target
    if isinstance(target, str):
        return target
    return str(target) if isinstance(target, OpOverload) else getattr(
        target, "__name__", str(target))


def digest(*parts: str) -> str:
    """A short hash of the parts."""
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:16]


def describe_call(node: fx.Node, references: Mapping[fx.Node, str]) -> str:
    """A canonical text of target, arguments and result; operands by their reference."""
    arguments = ", ".join(_canonical(argument, references) for argument in node.args)
    keywords = ", ".join(f"{key}={_canonical(node.kwargs[key], references)}"
                         for key in sorted(node.kwargs))
    return f"{target_name(node)}({arguments}; {keywords}) -> {describe_value(node.meta.get('val'))}"


def describe_structure(node: fx.Node, references: Mapping[fx.Node, str]) -> str:
    """Like `describe_call`, without everything that depends on tensor sizes: shapes (except the
    number of dimensions), and numbers where the op accepts a size or an operand (a mean divides by
    one)."""
    names, sizes = _arguments(node.target) if isinstance(node.target, OpOverload) else ((), ())
    named = [*zip(names, node.args, strict=False), *sorted(node.kwargs.items())]
    words = [f"{name}={_canonical(argument, references, sizes=name not in sizes)}"
             for name, argument in named]
    words += [_canonical(argument, references) for argument in node.args[len(names):]]
    return f"{target_name(node)}({', '.join(words)}) -> {_kind_of(node.meta.get('val'))}"


@cache
def _arguments(target: OpOverload) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of an op's arguments, and of those that are sizes or numbers that may follow from
    sizes.

    torch's schemas write `SymInt` for sizes, and `int` for dimensions and modes; an operand is a
    `Scalar` or `float`, or a `Tensor` that may be replaced by a number.
    """
    arguments = schema_of(target).arguments
    sizes = re.findall(r"(?:SymInt|Scalar|float)(?:\[\d*\])?\??\s(\w+)", str(schema_of(target)))
    operands = [argument.name for argument in arguments if str(argument.type) == "Tensor"]
    return (tuple(argument.name for argument in arguments),
            frozenset((*sizes, *operands)) - _SETTINGS)


_SETTINGS = frozenset({"stride", "padding", "dilation", "output_padding", "groups", "kernel_size"})
"""Arguments that the model fixes, although a schema lets them be computed from sizes."""


def _kind_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}/{value.dim()}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_kind_of, value)) + ")"
    return type(value).__name__


def describe_value(value: object) -> str:
    """Shapes, strides and dtypes of a value."""
    if isinstance(value, torch.Tensor):
        return (f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
                f"/{list(value.stride())}")
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe_value(item) for item in value) + ")"
    return repr(value) if isinstance(value, (int, float, bool, str, type(None))) else type(
        value).__name__


def _canonical(
    argument: object, references: Mapping[fx.Node, str], *, sizes: bool = True
) -> str:
    """A canonical text of an argument; without `sizes`, numbers are replaced by a word."""
    if isinstance(argument, fx.Node):
        return references[argument]
    if isinstance(argument, (tuple, list)):
        return "[" + ", ".join(
            _canonical(item, references, sizes=sizes) for item in argument) + "]"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{key}: {_canonical(argument[key], references, sizes=sizes)}"
                               for key in sorted(argument)) + "}"
    if isinstance(argument, torch.device):
        return argument.type
    if not sizes and isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return "number"
    if isinstance(argument, (int, float, bool, str, type(None), torch.dtype, torch.layout,
                             torch.memory_format, complex, slice)):
        return repr(argument)
    return type(argument).__name__
