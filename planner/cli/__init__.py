"""The command line `checkpoint-planner`: commands prepare and run, `planner.reporters` prints."""

from planner.cli.commands import app, main

__all__ = ["app", "main"]
