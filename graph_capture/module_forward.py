"""Forward overrides: functions that replace a module's forward in the instance.

The model of the world: `nn.Module.__call__` runs the hooks and, between them, `self.forward`; an
attribute of the instance comes before the method of the class.  So an attribute `forward` replaces
a computation for every caller: `module(x)`, `module.forward(x)`, a wrapper around the module, a
copy of the module.  Others put their own functions there too (accelerate, for mixed precision); an
override keeps and calls the forward that it found in the instance.

Blind spots: a class that defines `__call__` without calling `forward`; code that kept the earlier
bound method; `copy.copy` of a module with an override shares it, and so runs the module that it was
copied from.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Forward = Callable[..., Any]
"""A function of a module's arguments."""


def call_forward(module: nn.Module, own: Forward | None, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module without its hooks; `own`: the instance's forward, `None`: the method
    of its class."""
    if own is None:
        return type(module).forward(module, *args, **kwargs)
    return own(*args, **kwargs)


class ForwardOverride:
    """A function that replaces the forward of one module; copies and pickles refer to the copy of
    the module.

    It looks like a bound method to wrappers of methods (`__func__`) and readers of signatures.
    """

    def __init__(self, module: nn.Module, inner: Forward | None) -> None:
        """`inner`: the instance's forward before; `None`: the method of its class."""
        self.__self__ = module
        self.inner = inner
        _OVERRIDES[id(module)] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; subclasses run something else."""
        return self.plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The replaced forward."""
        return call_forward(self.__self__, self.inner, *args, **kwargs)

    def without_self(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the forward, also if this override was bound to the module once more."""
        return args[1:] if args and args[0] is self.__self__ else args

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function of a module, this one or a copy of it, and its arguments."""

        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            mine = self if module is self.__self__ else forward_override(module)
            if mine is None:  # A wrapper of this method was copied.
                mine = copy.deepcopy(self, {id(self.__self__): module})
                vars(module)["_placeholder"] = mine  # which keeps it alive
            return mine(*args, **kwargs)

        forward.__signature__ = inspect.signature(  # type: ignore[attr-defined]
            type(self.__self__).forward)
        return forward

    @property
    def __code__(self) -> types.CodeType:
        """The code of the class's method, which `torch.export` reads."""
        code: types.CodeType = inspect.unwrap(type(self.__self__).forward).__code__
        return code

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the replaced forward."""
        return inspect.signature(self.inner if self.inner is not None else
                                 types.MethodType(type(self.__self__).forward, self.__self__))

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles."""
        return dict(vars(self))

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        vars(new).update(self.__getstate__())
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _OVERRIDES[id(self.__self__)] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = copy.copy(self)
        new.__self__ = copy.deepcopy(self.__self__, memo)
        new.inner = copy.deepcopy(self.inner, memo)
        _OVERRIDES[id(new.__self__)] = new
        return new


_OVERRIDES: WeakValueDictionary[int, ForwardOverride] = WeakValueDictionary()
"""Overrides by identity of the module, also if others have wrapped them since."""


def forward_override(module: nn.Module) -> ForwardOverride | None:
    """The override of a module's forward, also if others have wrapped it since."""
    found = _OVERRIDES.get(id(module))
    return found if found is not None and found.__self__ is module else None


def overrides() -> list[ForwardOverride]:
    """All overrides of forwards."""
    return list(_OVERRIDES.values())


def own_forward(module: nn.Module) -> Forward | None:
    """The instance's own forward beneath overrides; `None`: that of its class."""
    found = vars(module).get("forward")
    while isinstance(found, ForwardOverride):
        found = found.inner
    return found


def set_forward(module: nn.Module, forward: Forward | None) -> None:
    """Give the instance a forward of its own; `None`: that of its class."""
    if forward is not None:
        vars(module)["forward"] = forward
    else:
        vars(module).pop("forward", None)


def take_down(model: nn.Module) -> None:
    """Remove every override from a model and its submodules."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), ForwardOverride):
            _OVERRIDES.pop(id(module), None)
            set_forward(module, own_forward(module))


@contextlib.contextmanager
def in_place_of_forward(module: nn.Module, forward: Forward | None) -> Iterator[None]:
    """Inside, the instance has this forward; `None`: that of its class."""
    before = vars(module).get("forward")
    set_forward(module, forward)
    try:
        yield
    finally:
        set_forward(module, before)


@contextlib.contextmanager
def in_place_of_forwards(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Inside, each of these instances has the forward paired with it."""
    with contextlib.ExitStack() as stack:
        for module, forward in forwards:
            stack.enter_context(in_place_of_forward(module, forward))
        yield


def rebound(value: Any, copies: Mapping[int, Any]) -> Any:
    """A function with each module and tensor that it refers to replaced by its copy; `copies`: by
    identity of the original.

    A function refers to what its closure and its defaults contain, a method also to the object that
    it is bound to, a partial function to its arguments.  A function that refers to no original, and
    anything else, stays as it is.
    """
    return _Rebinder(copies).of(value)


class _Rebinder:
    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._functions: dict[int, types.FunctionType] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, nn.Module | torch.Tensor):
            return self._copies.get(id(value), value)
        if not self._refers(value, set()):
            return value
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, functools.partial):
            return functools.update_wrapper(functools.partial(
                self.of(value.func), *map(self.of, value.args),
                **{name: self.of(each) for name, each in value.keywords.items()}), value)
        if isinstance(value, ForwardOverride):  # as without it
            return self.of(types.MethodType(type(value.__self__).forward, value.__self__)
                           if value.inner is None else value.inner)
        return self._function(value)

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        found = self._functions.get(id(value))
        if found is None:  # else it refers to itself
            cells = tuple(types.CellType() for _ in value.__closure__ or ())
            found = self._functions[id(value)] = types.FunctionType(
                value.__code__, value.__globals__, value.__name__, closure=cells)
            found.__defaults__ = value.__defaults__ and tuple(map(self.of, value.__defaults__))
            found.__kwdefaults__ = value.__kwdefaults__ and {
                name: self.of(each) for name, each in value.__kwdefaults__.items()}
            functools.update_wrapper(found, value)
            for new, content in zip(cells, _closure(value), strict=True):
                new.cell_contents = self.of(content)
        return found

    def _refers(self, value: Any, seen: set[int]) -> bool:
        """True if a value refers to an original."""
        if isinstance(value, nn.Module | torch.Tensor):
            return id(value) in self._copies
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, types.MethodType):
            parts: Iterable[Any] = (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            parts = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, ForwardOverride):
            parts = (value.__self__,)
        elif isinstance(value, types.FunctionType):
            parts = (*_closure(value), *(value.__defaults__ or ()),
                     *(value.__kwdefaults__ or {}).values())
        else:
            return False
        return any(self._refers(each, seen) for each in parts)


def _closure(function: types.FunctionType) -> tuple[Any, ...]:
    """Values in a function's closure; `None` for a variable that has no value yet."""

    def content(cell: types.CellType) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return None

    return tuple(map(content, function.__closure__ or ()))


@contextlib.contextmanager
def removed_afterwards(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Context of hooks that were registered for it."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The list of `model.modules()`, made several times faster, for what runs at each step."""
    found, seen = [model], {id(model)}

    def visit(module: nn.Module) -> None:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
                if child._modules:
                    visit(child)

    visit(model)
    return found


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of `modules_of` a model, as `model.parameters()` lists them."""
    return [*{id(parameter): parameter for module in modules
              for parameter in module._parameters.values() if parameter is not None}.values()]


def hooks_within(model: nn.Module) -> tuple[int, ...]:
    """The hooks of a model's submodules, by module and code; hooks of the model itself run around
    its forward and are left out."""
    return hooks_and_classes(modules_of(model))[0]


def hooks_and_classes(modules: Sequence[nn.Module]) -> tuple[tuple[int, ...], int]:
    """`hooks_within` the first of these modules, which contains the others, and a hash of the
    others' classes, which changes if one is replaced by one of another class, or parametrized."""
    within = modules[1:]
    hooks = [hash((number, kind, id(getattr(hook, "__code__", type(hook)))))
             for number, module in enumerate(within) for kind in HOOKS
             if (found := vars(module)[kind]) for hook in found.values()]
    return tuple(hooks), hash(tuple(id(type(module)) for module in within))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that contain its hooks."""
