"""The hooks and classes of a model's submodules, which help to decide which graph a call runs.

Blind spot: hooks with the same code count as equal, whatever they close over.
"""

from __future__ import annotations

from torch import nn


def hooks_within(model: nn.Module) -> tuple[int, ...]:
    """The hooks of a model's submodules, by module and code; hooks of the model itself run around
    its forward and are left out."""
    return hooks_and_classes_within(model)[0]


def hooks_and_classes_within(model: nn.Module) -> tuple[tuple[int, ...], int]:
    """`hooks_within`, and a hash of the classes of the submodules, which changes if one is replaced
    by one of another class, or parametrized."""
    hooks: list[int] = []
    classes: list[int] = []
    waiting = [*model._modules.values()]
    while waiting:  # runs at each step, so without `modules()`, which is several times slower
        module = waiting.pop()
        if module is None:
            continue
        classes.append(id(type(module)))
        attributes = vars(module)
        for kind in _HOOKS:
            if attributes[kind]:
                hooks += [hash((len(classes), kind, id(getattr(hook, "__code__", type(hook)))))
                          for hook in attributes[kind].values()]
        waiting += attributes["_modules"].values()
    return tuple(hooks), hash(tuple(classes))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
