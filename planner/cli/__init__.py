"""The command line `checkpoint-planner`: commands prepare and run, `planner.reporters` prints."""

from planner.cli.process import main

__all__ = ["main"]
