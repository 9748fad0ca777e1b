"""Methods of a model, other than `forward`, that are trained within a budget.

The model of the world: a planned method is an attribute of the instance, which every caller meets;
to the planner it is the forward of a module that has the model as its only submodule.  Inside of a
planned call the model has the methods of its class, so that one that calls another is one graph.

Where nobody named the methods, a step that trained the model without its forward shows that there
are some: in the next one those called from outside, with an output that requires gradients, are
looked for.

Blind spots: properties, static and class methods; methods of submodules; whoever kept a bound
method from before.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from planner._graph_capture.module_forward import in_place_of_forward, own_forward
from planner._graph_capture.output_tensors import output_tensors

if TYPE_CHECKING:
    from planner.attached.observing import ObservingForward, Settings

Function = Callable[..., Any]


class PlannedMethod:
    """Stands in the instance for a method of its class, and runs it under a plan."""

    def __init__(self, model: nn.Module, name: str, settings: Settings,
                 kind: type[ObservingForward]) -> None:
        """`kind`: the class of planned forwards."""
        self.model, self.name, self.settings = model, name, settings
        self.__doc__ = getattr(type(model), name).__doc__
        module = _module_class(type(model), name)(model)  # type: ignore[arg-type]
        self.planning = kind(module, None, settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method."""
        vars(self.planning.__self__)["training"] = self.model.training
        return self.planning(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(getattr(type(self.model), self.name), self.model))

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedMethod:
        return PlannedMethod(deepcopy(self.model, memo), self.name, self.settings,
                             type(self.planning))

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedMethod, (self.model, self.name, self.settings, type(self.planning))


@cache
def _module_class(cls: type[nn.Module], name: str) -> type[nn.Module]:
    """The class of modules whose forward is this method of the model in them."""
    function: Function = getattr(cls, name)

    def __init__(self: Any, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.model = model

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self.model, *args, **kwargs)

    forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return type(f"{cls.__name__}.{name}", (nn.Module,), {
        "__init__": __init__, "forward": forward, "__module__": cls.__module__, _IS_METHOD: True})


_IS_METHOD = "is_of_planned_method"


def model_of(module: nn.Module) -> nn.Module:
    """The model whose method is the forward of this module; else the module itself."""
    if getattr(type(module), _IS_METHOD, False):
        return module.get_submodule("model")
    return module


def planned_methods(model: nn.Module) -> list[PlannedMethod]:
    """The methods of a model that are planned."""
    return [value for value in vars(model).values() if isinstance(value, PlannedMethod)]


def plan_methods(model: nn.Module, names: tuple[str, ...], settings: Settings,
                 kind: type[ObservingForward]) -> None:
    """Plan these methods of the model, and no others."""
    for each in planned_methods(model):
        del vars(model)[each.name]
    for name in names:
        vars(model)[name] = PlannedMethod(model, name, settings, kind)


def check_methods(model: nn.Module, names: object) -> tuple[str, ...]:
    """The names of methods, checked against the model."""
    if isinstance(names, str) or not isinstance(names, tuple | list) or not names:
        raise TypeError("methods must be a tuple of names of methods, such as (\"forward\", "
                        f"\"encode\"), got {names!r}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"methods must name methods, got {name!r}")
        if not inspect.isfunction(getattr(type(model), name, None)):
            raise ValueError(f"{type(model).__name__} has no method {name!r} that could be planned")
    return tuple(names)


@contextlib.contextmanager
def with_methods_of_class(module: nn.Module) -> Iterator[None]:
    """Inside, the model has the methods of its class; `module`: it, or the module of a method."""
    model = model_of(module)
    attributes = vars(model)
    planned = {name: value for name, value in attributes.items()
               if isinstance(value, PlannedMethod | _Probe)}
    for name in planned:
        del attributes[name]
    try:
        if model is module:
            yield
        else:
            with in_place_of_forward(model, own_forward(model)):
                yield
    finally:
        attributes.update(planned)


class MethodSearch:
    """Looks for the methods of a model that train it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.found: set[str] = set()
        """Methods called from outside whose output requires gradients."""
        self.depth = 0
        for name in _public_methods(type(model)):
            vars(model).setdefault(name, _Probe(self, model, name))

    def end(self) -> tuple[str, ...]:
        """End the search; returns the names found."""
        attributes = vars(self._model)
        for name in [name for name, value in attributes.items() if isinstance(value, _Probe)]:
            del attributes[name]
        return tuple(sorted(self.found))


class _Probe:
    def __init__(self, search: MethodSearch, model: nn.Module, name: str) -> None:
        self._search, self._model, self._name = search, model, name
        self._function: Function = getattr(type(model), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        search = self._search
        search.depth += 1
        try:
            output = self._function(self._model, *args, **kwargs)
        finally:
            search.depth -= 1
        if not search.depth and torch.is_grad_enabled() and any(
                tensor.grad_fn is not None for tensor in output_tensors(output)):
            search.found.add(self._name)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return types.MethodType, (self._function, self._model)


def _public_methods(cls: type[nn.Module]) -> list[str]:
    """Methods that the classes of a model define beyond `nn.Module`."""
    return [name for name in dir(cls) if not name.startswith("_") and not hasattr(nn.Module, name)
            and inspect.isfunction(inspect.getattr_static(cls, name))]
