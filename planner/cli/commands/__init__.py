"""One file for each command, with a function `run`; `planner.cli.application` lists them.

A command says in its signature what it takes (`planner.cli.options`), and imports what does the
work when it runs: `--help` needs neither torch nor a solver.
"""
