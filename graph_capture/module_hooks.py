"""The hooks and classes of a model's submodules: some of what decides which graph a call runs.

Blind spot: hooks with the same code are taken for the same, whatever they close over.
"""

from __future__ import annotations

from torch import nn


def hooks_within(model: nn.Module) -> tuple[int, ...]:
    """The hooks of a model's submodules, by module and code; those of the model itself run around
    its forward, whatever that is."""
    found: list[int] = []
    waiting = [*model._modules.values()]
    number = 0
    while waiting:  # at each step, so without `modules()`, which takes several times as long
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
    """A hash of the classes of a model's submodules: another one where a submodule was replaced by
    one of another kind, or parametrized."""
    found: list[int] = []
    waiting = [*model._modules.values()]
    while waiting:
        module = waiting.pop()
        if module is not None:
            found.append(id(type(module)))
            waiting += module._modules.values()
    return hash(tuple(found))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
