"""One module per command, with a function `run`; `planner.cli.application` lists them.

The signature of `run` declares the command's options (`planner.cli.options`).  The modules that do
the work are imported when it runs: `--help` needs neither torch nor a solver.
"""
