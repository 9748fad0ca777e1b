"""The commands of `checkpoint-planner` by name.

Results go to stdout, progress to stderr and only on a terminal.
"""

from __future__ import annotations

from importlib import import_module

import typer

COMMANDS = ("plan", "show", "frontier", "verify", "max-batch", "max-seq", "advise", "memory")
"""In the order of the help; each is the function `run` of a file in `planner.cli.commands`."""

app = typer.Typer(
    name="checkpoint-planner", add_completion=False, pretty_exceptions_enable=False,
    no_args_is_help=True, rich_markup_mode=None,
    help="Plan which activations of a PyTorch training step to keep and which to recompute.")
for _name in COMMANDS:
    app.command(_name)(import_module(f"planner.cli.commands.{_name.replace('-', '_')}").run)


def main() -> None:
    """Entry point of `checkpoint-planner`."""
    app()
