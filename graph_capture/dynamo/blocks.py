"""The repeated blocks of a model: the units that are compiled one by one.

The model of the world: a deep model keeps its blocks in containers (`ModuleList`, `Sequential`,
`ModuleDict`), several of one class side by side.  The outermost such modules are the blocks, with
everything inside them.  If there are none, each repeated `Sequential` is a block. torch.compile
decides if two blocks of a class are the same computation: it compiles code once for all modules
that pass its guards.

Blind spot: blocks that the model keeps as plain attributes (`self.block1`, `self.block2`); name
them.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

WHOLE_MODEL = "model"
"""The model is one unit."""
REPEATED_BLOCKS = "blocks"
"""Each repeated block is a unit."""


def find_blocks(model: nn.Module, regions: str | Sequence[str]) -> tuple[str, ...]:
    """Qualified names of the modules that are compiled one by one; none for the whole model.

    `regions`: `"model"`, `"blocks"`, or names of modules (wildcards allowed).  Raises `ValueError`
    where there are no such modules, or one lies within another.
    """
    if regions == WHOLE_MODEL:
        return ()
    if regions == REPEATED_BLOCKS:
        found = repeated_blocks(model)
        if not found:
            raise ValueError(
                'regions="blocks" found no repeated blocks (modules of one class side by side in '
                f"a ModuleList, Sequential or ModuleDict) in {type(model).__name__}: name them, as "
                'in regions=("encoder.layer.*",), or use regions="model"')
        return found
    patterns = (regions,) if isinstance(regions, str) else tuple(regions)
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"regions={pattern!r} names no module of {type(model).__name__}; "
                             f'expected "model", "blocks" or names such as {names[:1]}')
    # A wildcard spans dots, so matches may be nested; the outermost ones count.
    chosen: list[str] = []
    for name in names:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) and not any(
                name.startswith(f"{outer}.") for outer in chosen):
            chosen.append(name)
    return tuple(chosen)


def most_alike(model: nn.Module) -> int:
    """The number of repeated blocks of the most frequent class; 0 if there are none."""
    kinds = Counter(type(model.get_submodule(name)) for name in repeated_blocks(model))
    return max(kinds.values(), default=0)


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Those that `find_blocks` finds by itself."""
    return (tuple(_repeated(model, "", _CONTAINERS))
            or tuple(_repeated(model, "", (nn.ModuleList, nn.ModuleDict))))


def _repeated(module: nn.Module, path: str, never: tuple[type[nn.Module], ...]) -> Iterator[str]:
    """The outermost repeated modules that are no instance of `never`."""
    kinds = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        is_block = (isinstance(module, _CONTAINERS) and kinds[type(child)] > 1
                    and not isinstance(child, never) and _is_composed(child))
        if is_block:
            yield inner
        else:
            yield from _repeated(child, inner, never)


def _is_composed(module: nn.Module) -> bool:
    """True if a module has submodules and trainable parameters; a single layer is too small a
    unit."""
    return (next(module.children(), None) is not None
            and any(parameter.requires_grad for parameter in module.parameters()))
