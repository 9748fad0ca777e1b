"""The optimizers of a training loop: one or several instances, or one class or name.

Two classes of torch update only some parameters: Muon matrices, SparseAdam those whose gradients
are sparse.  Given by class or name, each is combined with the usual optimizer for the other
parameters (according to torch's documentation or common use).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): value for name, value in sorted(vars(torch.optim).items(),
                                                  key=lambda item: item[0].lower())
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer}
"""Every class of `torch.optim` by its name in lower case."""

_OF_LIBRARIES: dict[str, tuple[str, str]] = {
    **{name.lower(): ("bitsandbytes.optim", name) for name in (
        "Adam8bit", "AdamW8bit", "AdEMAMix8bit", "Lion", "Lion8bit", "RMSprop8bit")},
    **{f"paged_{name.lower()}": ("bitsandbytes.optim", f"Paged{name}") for name in (
        "Adam", "Adam8bit", "AdamW", "AdamW8bit", "Lion", "Lion8bit")},
    **{name.lower(): ("torchao.optim", name) for name in ("Adam4bit", "AdamW4bit", "AdamWFp8")},
    "adamw_schedulefree": ("schedulefree", "AdamWScheduleFree"),
    "sgd_schedulefree": ("schedulefree", "SGDScheduleFree"),
}
"""Module and class of further optimizers, by their name."""


def _class_named(name: str) -> type[Optimizer]:
    """The class of that name.

    Raises `ValueError` for an unknown one, and for one whose package is not installed.
    """
    found = OPTIMIZERS.get(name.lower())
    if found is not None:
        return found
    if name.lower() not in _OF_LIBRARIES:
        raise ValueError(f"unknown optimizer {name!r}; expected one of "
                         f"{', '.join((*OPTIMIZERS, *_OF_LIBRARIES))}, or an instance or class")
    module, attribute = _OF_LIBRARIES[name.lower()]
    try:
        kind: type[Optimizer] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0]
        raise ValueError(f"the optimizer {name!r} is {attribute} of {package}, which cannot be "
                         f"imported ({error}): pip install -U {package}") from error
    return kind


@dataclass(frozen=True, slots=True)
class _Selective:
    """An optimizer that accepts only some parameters."""

    takes: Callable[[torch.Tensor, bool], bool]
    """True for accepted parameters; arguments: a parameter, and True if its gradient is sparse."""
    others: type[Any]
    """The optimizer for all other parameters."""
    wanted: str
    """Description of the accepted parameters."""


_SELECTIVE: dict[str, _Selective] = {
    "Muon": _Selective(lambda parameter, sparse: parameter.dim() == 2, torch.optim.AdamW,
                       "matrices"),
    "SparseAdam": _Selective(lambda parameter, sparse: sparse, torch.optim.Adam,
                             "parameters with sparse gradients, such as those of "
                             "nn.Embedding(..., sparse=True)"),
}


def optimizer_name(optimizer: object) -> str:
    """Names of the classes of the given optimizer or optimizers.

    Raises `ValueError` for an unknown name and `TypeError` for an object that is no optimizer.
    """
    if isinstance(optimizer, str):
        return _class_named(optimizer).__name__
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return optimizer.__name__
    if isinstance(optimizer, Optimizer):
        return type(optimizer).__name__
    if isinstance(optimizer, Sequence) and optimizer:
        for each in optimizer:
            if not isinstance(each, Optimizer):
                kind = each.__name__ if isinstance(each, type) else type(each).__name__
                raise TypeError("several optimizers are expected as instances, each with its own "
                                f"parameters, got {kind}")
        return " + ".join(type(each).__name__ for each in optimizer)
    raise TypeError("expected an optimizer of torch, its class or its name, or a sequence of "
                    f"optimizers, got {type(optimizer).__name__}")


def instances(optimizer: object) -> tuple[Optimizer, ...] | None:
    """The given instances; `None` for a class or a name."""
    if isinstance(optimizer, Optimizer):
        return (optimizer,)
    if isinstance(optimizer, str | type) or not isinstance(optimizer, Sequence):
        return None
    return tuple(optimizer)


def make_optimizers(optimizer: object, trainable: Sequence[torch.Tensor],
                    sparse: Collection[int]) -> list[Optimizer]:
    """Optimizers of a class, or of its name, on these parameters, with default settings.

    `sparse`: identities of the parameters whose gradients are sparse.  Raises `ValueError` if the
    class accepts none of them, or refuses them.
    """
    kind: Any = _class_named(optimizer) if isinstance(optimizer, str) else optimizer
    assert isinstance(kind, type)
    rule = _SELECTIVE.get(kind.__name__) if kind in OPTIMIZERS.values() else None
    if rule is None:
        return [kind(trainable)]
    taken = [p for p in trainable if rule.takes(p, id(p) in sparse)]
    others = [p for p in trainable if not rule.takes(p, id(p) in sparse)]
    if not taken:
        raise ValueError(f"{kind.__name__} takes {rule.wanted}, and the model has none; "
                         f"choose another optimizer, {rule.others.__name__} for one")
    return [kind(taken), *([rule.others(others)] if others else [])]
