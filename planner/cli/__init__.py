"""The command line `checkpoint-planner`: commands prepare and run, `planner.reporters` prints."""

from planner.cli.application import app, main

__all__ = ["app", "main"]
