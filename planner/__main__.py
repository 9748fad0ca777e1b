"""`python -m planner` is `checkpoint-planner`."""

from planner.cli import main

main()
