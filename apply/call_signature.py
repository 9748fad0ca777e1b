"""The call signature of a step: its arguments and settings, and the differences from a plan's.

Two steps of one model have different graphs because something about the call differs.  A graph
shows this in ops and hashes; this file shows it in the user's words.

Blind spots: settings in a global, a hook or an attribute of the model; values of numbers that are
no argument of the call.  If nothing here differs, only the graphs can be compared.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from planner._apply.rewrite_spec import CallSignature, InputKey, ParameterKey, RewriteSpec
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.module_forward import (
    Forward,
    hooks_and_classes,
    modules_of,
    parameters_of,
)


def signature_of(model: nn.Module, own: Forward | None, args: Sequence[Any],
                 kwargs: Mapping[str, Any]) -> CallSignature:
    """Return the signature of the call `model(*args, **kwargs)` under the current settings.
    `own`: the forward that the instance has; `None`: that of its class."""
    wrapper = None if own is None else (
        f"{getattr(own, '__module__', '')}.{getattr(own, '__qualname__', type(own).__name__)}"
        .removesuffix(".<locals>.forward"))
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return CallSignature(
        inputs=tuple(_input_keys(_named_arguments(model, own, args, kwargs))),
        autocast=autocast_state(), wrapper=wrapper,
        attention=attention if isinstance(attention, str) else None)


_FIRST_OF_VALUES = frozenset("0123456789-'\"")
"""First characters of the `repr` of numbers and texts, which no dtype and no type begins with."""


@dataclass(frozen=True, slots=True)
class Call:
    """All that is known of a call in advance and that decides which graphs it runs."""

    signature: CallSignature
    training: bool
    trainable: tuple[bool, ...]
    """`requires_grad` of each parameter, in the order of `parameters()`."""
    hooks: tuple[int, ...] = ()
    """The hooks of the submodules."""
    classes: int = 0
    """A hash of the classes of the submodules."""

    @classmethod
    def of(cls, model: nn.Module, own: Forward | None, args: Sequence[Any],
           kwargs: Mapping[str, Any]) -> Call:
        """Describe the call `model(*args, **kwargs)` under the current settings.  `own`: as for
        `signature_of`."""
        modules = modules_of(model)
        return cls(signature_of(model, own, args, kwargs), model.training,
                   tuple(p.requires_grad for p in parameters_of(modules)),
                   *hooks_and_classes(modules))

    def may_be_served_as(self, planned: Call) -> bool:
        """Return whether this may be the same graph with no tensor larger."""
        mine, theirs = self.signature, planned.signature
        return ((self.training, self.trainable, self.hooks, self.classes, mine.autocast)
                == (planned.training, planned.trainable, planned.hooks, planned.classes,
                    theirs.autocast)
                and [key.name for key in mine.inputs] == [key.name for key in theirs.inputs]
                and all(map(_is_no_larger, mine.inputs, theirs.inputs)))

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Sizes of the tensors among its inputs, by name."""
        return planned_sizes(self.signature)

    @property
    def values(self) -> dict[str, str]:
        """The numbers and texts among its inputs, by name."""
        return {key.name: key.kind for key in self.signature.inputs
                if key.kind[:1] in _FIRST_OF_VALUES}

    def with_values(self, values: Mapping[str, str]) -> Call:
        """The same with these numbers and texts."""
        return replace(self, signature=replace(self.signature, inputs=tuple(
            replace(key, kind=values.get(key.name, key.kind))
            for key in self.signature.inputs))) if values else self

    def without(self, names: Collection[str]) -> Call:
        """The same without these inputs."""
        return replace(self, signature=replace(self.signature, inputs=tuple(
            key for key in self.signature.inputs if key.name not in names))) if names else self

    @property
    def without_sizes(self) -> Call:
        """The same for tensors of any size."""
        def of(key: InputKey) -> InputKey:
            dtype, sizes = _dtype_and_sizes(key.kind)
            return replace(key, kind=f"{dtype}/{len(sizes)}")

        return replace(self, signature=replace(
            self.signature, inputs=tuple(map(of, self.signature.inputs))))

    def __str__(self) -> str:
        """Its first inputs and unusual settings, for a log."""
        found = self.signature
        words = [f"{key.name} {key.kind}" for key in found.inputs[:3]]
        words += ["..."] * (len(found.inputs) > 3)
        words += [f"autocast {found.autocast}"] * bool(found.autocast)
        return ", ".join([*words, *([] if self.training else ["eval mode"])])


def planned_sizes(signature: CallSignature) -> dict[str, tuple[int, ...]]:
    """Sizes of the tensors among the inputs of a signature, by name."""
    return {key.name: tuple(_dtype_and_sizes(key.kind)[1]) for key in signature.inputs}


def input_tensors(model: nn.Module, own: Forward | None, args: Sequence[Any],
                  kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments of a call, by the names that `Call.sizes` has."""
    return {name: value for name, value in _leaves(_named_arguments(model, own, args, kwargs))
            if isinstance(value, torch.Tensor)}


def tensor_keys(model: nn.Module) -> tuple[ParameterKey, ...]:
    """Return the keys of every parameter and buffer of a model, as a rewrite spec lists them."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return tuple(
        ParameterKey(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."),
                     tensor.requires_grad)
        for name, tensor in named)


def differences(spec: RewriteSpec, model: nn.Module, now: CallSignature) -> list[str]:
    """Describe the differences between a step's call signature and that of a rewrite spec."""
    words = list(_device_differences(spec.device, model))
    words += _tensor_differences(spec.tensors, tensor_keys(model))
    if model.training != spec.training:
        now_in, planned_in = ("train", "eval") if model.training else ("eval", "train")
        words.append(f"the model is in {now_in} mode, and was in {planned_in} mode when the plan "
                     "was made")
    then = spec.signature
    if then is None:
        return words
    planned = {key.name: key for key in then.inputs}
    given = {key.name: key for key in now.inputs}
    found = []
    if extra := [name for name in given if name not in planned]:
        found.append(f"this call has {_listed(extra)}, which the plan's inputs did not have")
    if missing := [name for name in planned if name not in {*given, *dict(spec.overrides)}]:
        found.append(f"the plan's inputs had {_listed(missing)}, which this call has not")
    for name, key in given.items():
        if name in planned:
            found += _input_differences(planned[name], key)
    if then.autocast != now.autocast:
        found.append(f"the plan was made {_under(then.autocast)}, this step runs "
                     f"{_under(now.autocast)}")
    if then.attention != now.attention:
        found.append(f"the plan was made with attention {then.attention!r}, this model has "
                     f"{now.attention!r}")
    if then.wrapper != now.wrapper:
        found.append(f"the plan was made {_wrapped(then.wrapper)}, this one is "
                     f"{_wrapped(now.wrapper)}")
    return found + words


def _named_arguments(model: nn.Module, own: Forward | None, args: Sequence[Any],
                     kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, including positional ones."""
    forward = types.MethodType(type(model).forward, model) if own is None else own
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # Arguments that do not bind are numbered.
        return {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}[{index}]": item for index, item in enumerate(value)})
        else:
            named[name] = value
    return named


def _input_keys(arguments: Mapping[str, Any]) -> Iterator[InputKey]:
    first: dict[int, str] = {}
    for name, value in _leaves(arguments):
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise CaptureError(
                    f"the argument {name} is a nested tensor, whose rows have lengths of their "
                    "own; expected ordinary tensors: pad the batch and give the model a mask, or "
                    "plan the modules that get ordinary tensors")
            earlier = first.setdefault(id(value), name)
            yield InputKey(name, f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}",
                           value.requires_grad, None if earlier == name else earlier)
        elif isinstance(value, (bool, int, float, str)):
            yield InputKey(name, repr(value)[:60])
        else:
            yield InputKey(name, type(value).__name__)


def _leaves(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments by name, including those in lists and mappings; `None` counts as absent.
    """
    for name, value in sorted(arguments.items()):
        if isinstance(value, Mapping):
            yield from _leaves({f"{name}[{key!r}]": item for key, item in value.items()})
        elif isinstance(value, (list, tuple)):
            yield from _leaves({f"{name}[{index}]": item for index, item in enumerate(value)})
        elif value is not None:
            yield name, value


def autocast_state() -> str:
    """Return each device type with its dtype, where autocast is on."""
    kinds = ["cpu"]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type not in kinds:
        kinds.append(accelerator.type)
    return autocast_words({kind: torch.get_autocast_dtype(kind) for kind in kinds
                           if torch.is_autocast_enabled(kind)})


def autocast_words(dtypes: Mapping[str, torch.dtype]) -> str:
    """Return the dtypes of autocast by device type, as a plan records them."""
    return ", ".join(f"{kind} {str(dtype).removeprefix('torch.')}"
                     for kind, dtype in dtypes.items())


@contextmanager
def autocast_as_planned(spec: RewriteSpec) -> Iterator[None]:
    """Context in which autocast is on as it was when the rewrite spec was made."""
    recorded = "" if spec.signature is None else spec.signature.autocast
    with ExitStack() as stack:
        for each in filter(None, recorded.split(", ")):
            kind, name = each.split()
            stack.enter_context(torch.autocast(kind, getattr(torch, name)))
        yield


def _is_no_larger(mine: InputKey, planned: InputKey) -> bool:
    """Return whether an input is the planned one, or a tensor like it that is larger in no
    dimension."""
    dtype, sizes = _dtype_and_sizes(mine.kind)
    planned_dtype, planned_sizes = _dtype_and_sizes(planned.kind)
    return (mine.requires_grad == planned.requires_grad and dtype == planned_dtype
            and len(sizes) == len(planned_sizes)
            and all(size <= most for size, most in zip(sizes, planned_sizes, strict=True)))


def _dtype_and_sizes(kind: str) -> tuple[str, list[int]]:
    """Split the kind of a tensor into dtype and sizes; any other kind is returned without sizes."""
    dtype, bracket, sizes = kind.rstrip("]").partition("[")
    if not bracket or not hasattr(torch, dtype):
        return kind, []
    return dtype, [int(size) for size in sizes.split(", ") if size]


def _device_differences(planned: str, model: nn.Module) -> Iterator[str]:
    here = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"meta"}
    kind = planned.partition(":")[0]
    if kind and here and kind not in here:
        yield (f"the plan was made for {kind}, whose kernels it names, and the model is on "
               f"{', '.join(sorted(here))}: move it there, or plan for the device that it is on")


def _input_differences(then: InputKey, now: InputKey) -> Iterator[str]:
    if then.kind != now.kind:
        yield f"`{now.name}` is {now.kind}, and was {then.kind} in the plan's inputs"
    if then.requires_grad != now.requires_grad:
        yield (f"`{now.name}` requires a gradient, which it did not in the plan's inputs"
               if now.requires_grad else
               f"`{now.name}` requires no gradient, which it did in the plan's inputs")


def _tensor_differences(planned: Sequence[ParameterKey], found: Sequence[ParameterKey]
                        ) -> Iterator[str]:
    here = {key.name: key for key in found}
    both = [(key, here[key.name]) for key in planned if key.name in here]
    changes = {
        "frozen now, and trained when the plan was made":
            [now.name for then, now in both if then.requires_grad and not now.requires_grad],
        "trained now, and frozen when the plan was made":
            [now.name for then, now in both if now.requires_grad and not then.requires_grad],
        "of another dtype than when the plan was made":
            [now.name for then, now in both if then.dtype != now.dtype],
        "of another shape than when the plan was made":
            [now.name for then, now in both if then.shape != now.shape],
        "no part of this model, and of the plan's": [
            key.name for key in planned if key.name not in here],
        "no part of the plan's model, and of this one": [
            name for name in here if name not in {key.name for key in planned}],
    }
    for change, names in changes.items():
        if names:
            yield f"{_listed(names)} {'are' if len(names) > 1 else 'is'} {change}"


def _listed(names: Sequence[str]) -> str:
    """List the first names and the number of the others."""
    shown = [f"`{name}`" for name in names[:3]]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _under(autocast: str) -> str:
    return f"under autocast ({autocast})" if autocast else "without autocast"


def _wrapped(wrapper: str | None) -> str:
    return f"with its forward wrapped by {wrapper}" if wrapper else "with the forward of its class"
