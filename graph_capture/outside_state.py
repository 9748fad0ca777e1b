"""State outside of a model that its code changes: a counter in a dict, a list that a hook fills.

A plan is made by calling copies of the model, several times.  Attributes of its modules are copied
with it; what its code reaches by globals, closures and default arguments is not, and is put back
after each call.

The model of the world: the forwards of a model's modules and their hooks name what they reach;
methods and functions that they name are followed.  Lists, dicts, sets, objects with attributes,
tensors and random generators are put back, and globals that are bound anew.

Blind spots: objects of other languages, iterators, modules that are not part of the model,
attributes of classes, containers of more than 10,000 items, tensors of more than 1 MiB.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import random
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from planner._graph_capture.module_forward import HOOKS
from planner._graph_capture.torch_compat import no_active_modes

_MOST_ITEMS = 10_000
_LARGEST_TENSOR_BYTES = 2**20
_MOST_OBJECTS = 5_000
"""Objects that are looked at; code that reaches more is no model's."""
_MACHINERY = frozenset({"torch", "torchvision", "planner", "numpy", "logging", "threading",
                        "builtins", "functools", "warnings", "contextlib", "typing", "enum"})
"""Packages whose functions and objects have no state of a model's."""
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


class OutsideState:
    """That state at some moment."""

    def __init__(self, model: nn.Module | None = None, *, with_attributes: bool = False,
                 holds_tensors: bool = False, copies_tensors: bool = True) -> None:
        """`None`: no state.  `with_attributes`: those of the model's modules, too, but for
        parameters and buffers.  `holds_tensors`: what containers contain is kept alive.
        `copies_tensors`: small tensors are put back that are written in place."""
        found = _Search(copies_tensors)
        if model is not None:
            found.search(model, with_attributes)
        self._places, self._containers = found.places, found.containers
        if found.empty:  # as most are that a module has, one by one they would take longer
            self._places.append(_Place(partial(_contents_of, found.empty),
                                       partial(_put_contents, found.empty)))
        self._values = [value if holds_tensors else _weakly(value) for value in self.values()]

    def again(self) -> AbstractContextManager[None]:
        """Inside, the state is as it was at that moment; behind it, it is what it is now."""
        return self.as_in(map(_strongly, self._values))

    @contextlib.contextmanager
    def as_in(self, values: Iterable[Any]) -> Iterator[None]:
        """Inside, the state is as when these `values` were read; behind it, it is what it is now.
        """
        now = self.values()
        self._put(values)
        try:
            yield
        finally:
            self._put(now)

    def put_back(self) -> None:
        """Have the state as it was at that moment, but for containers whose tensors are gone."""
        self._put(map(_strongly, self._values))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that its containers and objects contain now."""
        return [each for container in self._containers
                for each in (container.values() if isinstance(container, dict) else container)
                if isinstance(each, torch.Tensor)]

    def values(self) -> list[Any]:
        """What its containers, objects, tensors and generators have now."""
        with no_active_modes():
            return [place.read() for place in self._places]

    def _put(self, values: Iterable[Any]) -> None:
        with no_active_modes(), torch.no_grad():
            for place, value in zip(self._places, values, strict=True):
                if value is not _GONE:
                    place.put(value)


class Attributes:
    """What attributes of a model's modules refer to at some moment, and what lists, dicts and the
    like among them contain; but for what every module has, and for attributes that come later."""

    def __init__(self, model: nn.Module | None = None) -> None:
        """`None`: no attributes."""
        self._of_modules: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[Any] = []
        for module in () if model is None else model.modules():
            before = {name: value for name, value in vars(module).items()
                      if name not in _OF_EVERY_MODULE}
            self._of_modules.append((vars(module), before))
            self._note([*before.values()])
        self._contents = _contents_of(self._containers)

    def _note(self, pending: list[Any]) -> None:
        seen = set[int]()
        while pending and len(seen) < _MOST_OBJECTS:
            value = pending.pop()
            if type(value) is tuple:
                pending += value
            elif type(value) in _CONTAINERS and id(value) not in seen and len(value) <= _MOST_ITEMS:
                seen.add(id(value))
                self._containers.append(value)
                pending += value.values() if isinstance(value, dict) else value

    def put_back(self) -> None:
        """Let them refer to it again."""
        for attributes, before in self._of_modules:
            attributes.update(before)
        _put_contents(self._containers, self._contents)


_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})


class _Place(NamedTuple):
    """One container, object, tensor or generator."""

    read: Callable[[], Any]
    put: Callable[[Any], object]


class _Search:
    """The places that a model's code reaches."""

    def __init__(self, copies_tensors: bool) -> None:
        self.places: list[_Place] = []
        self.containers: list[Any] = []
        self.empty: list[Any] = []
        """Those of the containers that are empty."""
        self._copies_tensors = copies_tensors
        self._seen: dict[int, object] = {}  # kept alive, so that identities stay
        self._seen_methods: set[tuple[type, str]] = set()
        self._pending: deque[object] = deque()

    def search(self, model: nn.Module, with_attributes: bool) -> None:
        """Find them."""
        for module in model.modules():
            attributes = vars(module)
            if with_attributes:
                self._container(attributes)
            self._pending += [hook for kind in HOOKS if attributes[kind]
                              for hook in attributes[kind].values()]
            self._pending.append(attributes.get("forward"))
            self._methods(type(module), "forward")
        while self._pending and len(self._seen) < _MOST_OBJECTS:
            self._visit(self._pending.popleft())

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, _NO_STATE):
            return
        self._seen[id(value)] = value
        if isinstance(value, partial):
            self._pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            self._pending += [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif type(value) in _CONTAINERS:
            self._container(value)
        elif isinstance(value, random.Random):
            self.places.append(_Place(value.getstate, value.setstate))
        elif isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            self.places.append(_Place(lambda: bits.state,
                                      lambda state: setattr(bits, "state", state)))
        elif isinstance(value, torch.Generator):
            self.places.append(_Place(value.get_state, value.set_state))
        elif isinstance(value, tuple):
            self._pending += value
        elif not _is_machinery(type(value)) and isinstance(
                attributes := getattr(value, "__dict__", None), dict):
            if callable(value):
                self._methods(type(value), "__call__")
            self._container(attributes)

    def _methods(self, kind: type, name: str) -> None:
        """Visit a method of a class, and those that it names."""
        found = inspect.getattr_static(kind, name, None)
        function = inspect.unwrap(getattr(found, "__func__", getattr(found, "fget", found)))
        if isinstance(function, types.FunctionType) and (kind, name) not in self._seen_methods:
            self._seen_methods.add((kind, name))
            self._pending.append(function)
            for other in _names(function.__code__):
                self._methods(kind, other)

    def _function(self, function: types.FunctionType) -> None:
        if _is_machinery(function):
            return
        variables = function.__globals__
        self._pending += [variables[name] for name in _names(function.__code__)
                          if name in variables]
        self._pending += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not bound yet
                self._pending.append(cell.cell_contents)
        for name in _bound_anew(function.__code__):
            if name in variables:
                self.places.append(_Place(partial(variables.get, name),
                                          partial(variables.__setitem__, name)))

    def _container(self, value: Any) -> None:
        if len(value) > _MOST_ITEMS:
            return
        self.containers.append(value)
        if not value:
            self.empty.append(value)
        elif isinstance(value, dict):
            self._pending += [each for each in value.values() if type(each) not in _SCALARS]
            self.places.append(_Place(lambda: dict(value), partial(_put_dict, value)))
        else:
            self._pending += value
            self.places.append(_Place(lambda: list(value), partial(_put_items, value)))

    def _tensor(self, tensor: torch.Tensor) -> None:
        if self._copies_tensors and type(tensor) is torch.Tensor and (
                tensor.layout is torch.strided and not tensor.is_meta
                and tensor.nbytes <= _LARGEST_TENSOR_BYTES):
            alive = weakref.ref(tensor)

            def read() -> torch.Tensor | None:
                found = alive()
                return None if found is None else found.detach().clone()

            def put(value: torch.Tensor | None) -> None:
                found = alive()
                if found is not None and value is not None and not torch.equal(found, value):
                    found.copy_(value)

            self.places.append(_Place(read, put))


_CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict, Counter)
"""Those of other classes may do anything when they are read: transformers' mappings import models.
"""
_SCALARS = frozenset({bool, int, float, str, type(None)})
_NO_STATE = (nn.Module, type, types.ModuleType, types.BuiltinFunctionType, torch.optim.Optimizer,
             str, int, float, bytes, type(None))


def _is_machinery(described: Any) -> bool:
    return str(getattr(described, "__module__", None)).partition(".")[0] in _MACHINERY


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that code names."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


@functools.lru_cache(maxsize=4096)
def _bound_anew(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code binds."""
    if _STORE_GLOBAL not in code.co_code[::2]:
        return ()
    return tuple(step.argval for step in dis.get_instructions(code)
                 if step.opcode == _STORE_GLOBAL)


_GONE = object()


class _TensorReference(weakref.ref[torch.Tensor]):
    """A reference that stands for the tensor itself; containers may contain references, too."""


def _weakly(value: Any) -> Any:
    """The content of a container with weak references to its tensors, which may be large."""
    match value:
        case list():
            return [_TensorReference(each) if isinstance(each, torch.Tensor) else each
                    for each in value]
        case dict():
            return dict(zip(value, _weakly([*value.values()]), strict=True))
        case _:
            return value


def _strongly(value: Any) -> Any:
    """The inverse; `_GONE` where a tensor is gone."""
    match value:
        case list():
            found = [*map(_referred, value)]
            return _GONE if any(each is _GONE for each in found) else found
        case dict():
            # What else it contains is put back.
            return {key: _referred(each) for key, each in value.items()}
        case _:
            return value


def _referred(value: Any) -> Any:
    if not isinstance(value, _TensorReference):
        return value
    tensor = value()
    return _GONE if tensor is None else tensor


def _contents_of(containers: list[Any]) -> list[Any]:
    """What each contains; `None` for nothing."""
    return [None if not each else dict(each) if isinstance(each, dict) else list(each)
            for each in containers]


def _put_contents(containers: list[Any], before: list[Any]) -> None:
    for container, contents in zip(containers, before, strict=True):
        if contents is None:
            if container:
                container.clear()
        else:
            (_put_dict if isinstance(contents, dict) else _put_items)(container, contents)


def _put_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    # What is gone leaves in place what came after it.
    found = {name: value.get(name, _GONE) if each is _GONE else each
             for name, each in before.items()}
    before = {name: each for name, each in found.items() if each is not _GONE}
    if len(value) != len(before) or any(
            name not in value or value[name] is not each for name, each in before.items()):
        value.clear()
        value.update(before)


def _put_items(value: Any, before: list[Any]) -> None:
    now = list(value)
    if len(now) != len(before) or any(
            mine is not other for mine, other in zip(now, before, strict=True)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(before)
