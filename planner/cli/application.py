"""The commands of `checkpoint-planner` by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

COMMANDS = ("plan", "show", "frontier", "verify", "max-batch", "max-seq", "advise", "memory")
"""In the order of the help; each is the function `run` of a module in `planner.cli.commands`."""

NAME = "checkpoint-planner"


def commands() -> Callable[..., Any]:
    """All commands as one callable that takes a list of arguments."""
    app = typer.Typer(
        name=NAME, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
        help="Plan which activations of a PyTorch training step to keep and which to recompute.")
    for name in COMMANDS:
        app.command(name)(import_module(f"planner.cli.commands.{name.replace('-', '_')}").run)
    return get_command(app)  # Typer's own wrapper replaces sys.excepthook
