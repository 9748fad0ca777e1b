"""Every solver on every instance: overhead found and proven, seconds, peak, published figures.

    python -m benchmarks.solvers --instances FOLDER --budgets .9,.8,.5 --time-limit 60

Instances are networkx node-link JSON files (see `solvers.instances`); `--models` names models that
are captured first (see `benchmarks.captured`), and `--problems` takes files that it wrote.
`auto` searches until the time limit; `usual` is `auto` as planning has it, which stops when more
work is not worth it.  Budgets are fractions of the peak of the plain order.  Overheads are
percentages of the cost of running every op once.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.arguments import add_names, add_numbers, benchmark_parser, parse
from benchmarks.baselines import checkmate, moccasin
from benchmarks.problem_file import read_problem
from benchmarks.published import PUBLISHED
from benchmarks.table import Table
from solvers import SOLVERS, Algorithm, InfeasibleBudget, load_problem, simulate, solve
from solvers.lazy import cheapest_walk
from solvers.local_search import improve, repair
from solvers.minimum import minimum_peak, working_set_floor
from solvers.problem import Problem, Schedule


class Found(NamedTuple):
    """What a solver hands back; None: nothing was found, nothing is proven."""

    schedule: Schedule | None
    bound: float | None
    """Lower bound on the cost of every legal schedule, in the problem's unit."""


Method = Callable[[Problem, int, float, int], Found]


def lazy(problem: Problem, budget_bytes: int, time_limit: float, seed: int) -> Found:
    """Lazy walks alone."""
    deadline = time.monotonic() + time_limit
    return Found(cheapest_walk(problem, budget_bytes, deadline=deadline), None)


def local(problem: Problem, budget_bytes: int, time_limit: float, seed: int) -> Found:
    """Annealing alone, from lazy walks or, where they fail, from the plain order."""
    begin = time.monotonic()
    deadline = begin + time_limit
    start = cheapest_walk(
        problem, budget_bytes, deadline=begin + time_limit / 10,
    ) or repair(problem, budget_bytes, problem.keep_all_schedule, time_limit=time_limit / 2,
                seed=seed)
    if start is None:
        return Found(None, None)
    return Found(improve(problem, budget_bytes, start, time_limit=time_limit, deadline=deadline,
                         seed=seed), None)


def _solver(solver: str | Algorithm, work_limit: float | None = math.inf) -> Method:
    def method(problem: Problem, budget_bytes: int, time_limit: float, seed: int) -> Found:
        try:
            result = solve(problem, budget_bytes, solver=solver, time_limit=time_limit, seed=seed,
                           work_limit=work_limit)
        except InfeasibleBudget:
            return Found(None, None)
        return Found(result.schedule, result.lower_bound)
    return method


METHODS: dict[str, Method] = {
    "lazy": lazy, "local": local,
    "checkmate": _solver(checkmate), "moccasin": _solver(moccasin),
    **{name: _solver(name) for name in SOLVERS},
    "usual": _solver("auto", None),
}
"""Everything that can be compared, by name."""


def machine() -> str:
    """The machine and the versions that the figures belong to, in one line."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux: the name that Python knows has to do
    return (f"{model}, {os.cpu_count()} cores, {platform.system()}, "
            f"Python {platform.python_version()}, OR-Tools {version('ortools')}")


def measure(problem: Problem, instance: str, budgets: Sequence[float], solvers: Sequence[str],
            time_limit: float, seed: int, table: Table) -> None:
    """Run the solvers on one problem, printing each row as it comes."""
    plain_peak, _ = simulate(problem, problem.keep_all_schedule)

    def percent(cost: float) -> float:
        return 100 * (cost / problem.keep_all_cost - 1)

    for budget in budgets:
        published = ", ".join(map(str, PUBLISHED.get((instance, round(budget, 6)), ())))
        for name in solvers:
            start = time.monotonic()
            found = METHODS[name](problem, int(budget * plain_peak), time_limit, seed)
            seconds, overhead, peak = time.monotonic() - start, None, None
            if found.schedule is not None:
                simulation = simulate(problem, found.schedule)
                if simulation.peak_bytes > budget * plain_peak:
                    raise AssertionError(f"{name} on {instance} at {budget} is over budget")
                overhead, peak = percent(simulation.cost), simulation.peak_bytes / plain_peak
            table.row(instance, len(problem), budget, name,
                      "none" if overhead is None else overhead,
                      None if found.bound is None else percent(found.bound), seconds, peak,
                      published)


def _smallest(problem: Problem, instance: str, seed: int) -> str:
    plain_peak, _ = simulate(problem, problem.keep_all_schedule)
    start = time.monotonic()
    peak, cost = simulate(problem, minimum_peak(problem, seed=seed))
    return (f"{instance}: smallest peak found {peak / plain_peak:.4f} of the plain peak "
            f"(floor {working_set_floor(problem) / plain_peak:.4f}) at "
            f"{100 * (cost / problem.keep_all_cost - 1):.1f}% in {time.monotonic() - start:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = benchmark_parser("solvers", __doc__, time_limit=60.0)
    parser.add_argument("--instances", type=Path, help="folder of node-link JSON instances")
    parser.add_argument("--problems", type=Path, nargs="*", default=[],
                        help="files written by benchmarks.problem_file.save_problem")
    parser.add_argument("--models", default="",
                        help="names of models to capture, e.g. gpt2,llama_8b")
    parser.add_argument("--only", default="", help="instances whose name contains this")
    add_numbers(parser, "--budgets", (0.9, 0.8, 0.7, 0.5, 0.4, 0.3, 0.2),
                "fractions of the plain peak")
    add_names(parser, "--solvers", METHODS, ("auto", "local"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minimum", action="store_true", help="also the smallest peak of each")
    arguments = parse(parser, argv)
    if arguments.instances is None and not arguments.problems and not arguments.models:
        parser.error("expected --instances FOLDER, --models NAMES or --problems FILE; got none")
    problems: list[tuple[str, Problem]] = []
    if arguments.instances is not None:
        problems += [(path.stem, load_problem(path))
                     for path in sorted(arguments.instances.glob("*.json"))]
    problems += [(path.stem, read_problem(path)) for path in arguments.problems]
    if arguments.models:
        from benchmarks.captured import captured

        problems += [(name, captured(name).base.problem) for name in arguments.models.split(",")]
    problems = [(name, problem) for name, problem in problems if arguments.only in name]
    print(machine())
    print(f"at most {arguments.time_limit:g} s per run, seed {arguments.seed}; overhead in percent "
          "of the plain cost, budget and peak as fractions of the plain peak\n")
    table = Table("instance:20", "ops:5d", "budget:g", "solver:9", "found %:8.3f", "bound %:8.3f",
                  "seconds:.1f", "peak:.4f", "published %")
    for name, problem in problems:
        measure(problem, name, arguments.budgets, arguments.solvers, arguments.time_limit,
                arguments.seed, table)
    if arguments.minimum:
        print()
        for name, problem in problems:
            print(_smallest(problem, name, arguments.seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
