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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self
from weakref import WeakValueDictionary

from torch import nn

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
            set_forward(module, own_forward(module))
            _OVERRIDES.pop(id(module), None)


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


def rebound(forward: Forward | None, old: nn.Module, new: nn.Module) -> Forward | None:
    """An instance's forward for a shallow copy of the module: a method or partial function bound to
    `old` is bound to `new`; anything else stays."""
    if isinstance(forward, types.MethodType) and forward.__self__ is old:
        return types.MethodType(forward.__func__, new)
    if isinstance(forward, functools.partial) and any(arg is old for arg in forward.args):
        bound = functools.partial(
            forward.func, *(new if arg is old else arg for arg in forward.args),
            **forward.keywords)
        return functools.update_wrapper(bound, forward)
    return forward
