"""The command line `checkpoint-planner`: commands prepare and run, `planner.reporters` prints."""

from planner.cli import size_commands
from planner.cli.commands import app, main
from planner.cli.memory_command import memory_command

__all__ = ["app", "main", "memory_command", "size_commands"]
