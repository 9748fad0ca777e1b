"""Modules that run between the calls of planned models, seen by a hook for all modules.

Model of the world: the hook is there from the end of a planned model's step to the next call of any
planned model.

Blind spot: torch compiles a module anew where such a hook comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

Note = Callable[[nn.Module], None]

_notes: list[WeakMethod[Note]] = []
_hooks: list[RemovableHandle] = []


def watch_running_modules(note: Note) -> None:
    """Call `note`, a method, with each module that runs, until a planned model is called."""
    _notes.append(WeakMethod(note))
    if not _hooks:
        _hooks.append(register_module_forward_pre_hook(_note_run))


def leave_running_modules() -> None:
    """Take the hook away: a planned model is called, for which it would be the user's."""
    for hook in _hooks:
        hook.remove()
    _hooks.clear()
    _notes.clear()


def _note_run(module: nn.Module, _: object) -> None:
    if torch.compiler.is_compiling():
        return
    for each in _notes:
        if (note := each()) is not None:
            note(module)
