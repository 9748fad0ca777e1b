"""How planning time grows with depth: the same layers, ever more of them.

    python -m benchmarks.depth --layers 6,12,24,48,96 --budgets .5,.3
    python -m benchmarks.depth --problems gpt2_12.problem gpt2_24.problem --budgets .4,.2

The first form takes synthetic GPT blocks (`solvers.synthetic_gpt`), the second what
`benchmarks.captured` wrote.  Overheads are in percent of the cost of running every op once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.problem_file import read_problem
from benchmarks.solvers import machine
from solvers import Problem, simulate, solve
from solvers.synthetic_gpt import gpt

HEADER = ("| problem | ops | budget | found % | bound % | seconds | to the row above |\n"
          "| --- | ---: | ---: | ---: | ---: | ---: | ---: |")


def measure(problems: Sequence[tuple[str, Problem]], budget: float, time_limit: float) -> None:
    """Print a row for each problem under the same fraction of its plain peak."""
    before = None
    for name, problem in problems:
        plain_peak, _ = simulate(problem, problem.keep_all_schedule)
        result = solve(problem, int(budget * plain_peak), time_limit=time_limit)
        factor = "" if before is None else f"{result.seconds / before:.1f}"
        print(f"| {name} | {len(problem)} | {budget:g} | {100 * result.overhead:.3f} "
              f"| {100 * result.overhead_bound:.3f} | {result.seconds:.1f} | {factor} |",
              flush=True)
        before = result.seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.depth",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default="6,12,24,48,96", help="depths of synthetic problems")
    parser.add_argument("--problems", type=Path, nargs="*", default=[],
                        help="files of benchmarks.captured instead, by depth")
    parser.add_argument("--budgets", default=".5,.3", help="fractions of the plain peak")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per plan")
    arguments = parser.parse_args(argv)
    problems = [(path.stem, read_problem(path)) for path in arguments.problems] or [
        (f"{layers} layers", gpt(int(layers))) for layers in arguments.layers.split(",")]
    print(machine(), HEADER, sep="\n")
    for budget in arguments.budgets.split(","):
        measure(problems, float(budget), arguments.time_limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
