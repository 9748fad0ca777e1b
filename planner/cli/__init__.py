"""The command line `checkpoint-planner`: commands prepare and run, `planner.reporters` prints."""

from planner.cli import size_commands
from planner.cli.commands import app, main

__all__ = ["app", "main", "size_commands"]
