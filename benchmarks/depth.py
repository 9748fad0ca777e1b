"""How planning time grows with depth: the same layers, ever more of them.

    python -m benchmarks.depth gpt2_12.problem gpt2_24.problem --budgets .4,.2

Problems are files that `benchmarks.captured` wrote, by depth.  Overheads are in percent of the cost
of running every op once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import add_numbers, benchmark_parser, parse
from benchmarks.problem_file import read_problem
from benchmarks.solvers import machine
from benchmarks.table import Table
from solvers import simulate, solve


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = benchmark_parser("depth", __doc__, time_limit=60.0)
    parser.add_argument("problems", type=Path, nargs="+", help="files of benchmarks.captured")
    add_numbers(parser, "--budgets", (0.5, 0.3), "fractions of the plain peak")
    arguments = parse(parser, argv)
    print(machine())
    table = Table("problem:12", "ops:5d", "budget:g", "found %:.3f", "bound %:.3f", "seconds:.1f",
                  "to the row above:.1f")
    for budget in arguments.budgets:
        before = None
        for path in arguments.problems:
            problem = read_problem(path)
            plain_peak, _ = simulate(problem, problem.keep_all_schedule)
            found = solve(problem, int(budget * plain_peak), time_limit=arguments.time_limit)
            table.row(path.stem, len(problem), budget, 100 * found.overhead,
                      100 * found.overhead_bound, found.seconds,
                      None if before is None else found.seconds / before)
            before = found.seconds
    return 0


if __name__ == "__main__":
    sys.exit(main())
