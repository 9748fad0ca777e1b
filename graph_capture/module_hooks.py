"""The hooks and classes of a model's submodules, which help to decide which graph a call runs.

Blind spot: hooks with the same code count as equal, whatever they close over.
"""

from __future__ import annotations

from torch import nn


def hooks_within(model: nn.Module) -> tuple[int, ...]:
    """The hooks of a model's submodules, by module and code; hooks of the model itself run around
    its forward and are left out."""
    found: list[int] = []
    waiting = [*model._modules.values()]
    number = 0
    while waiting:  # runs at each step, so without `modules()`, which is several times slower
        module = waiting.pop()
        if module is None:
            continue
        number += 1
        attributes = vars(module)
        for kind in _HOOKS:
            if attributes[kind]:
                found += [hash((number, kind, id(getattr(hook, "__code__", type(hook)))))
                          for hook in attributes[kind].values()]
        waiting += attributes["_modules"].values()
    return tuple(found)


def classes_within(model: nn.Module) -> int:
    """A hash of the classes of a model's submodules; it changes if a submodule is replaced by one
    of another class, or parametrized."""
    found: list[int] = []
    waiting = [*model._modules.values()]
    while waiting:
        module = waiting.pop()
        if module is not None:
            found.append(id(type(module)))
            waiting += module._modules.values()
    return hash(tuple(found))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
