"""Every solver on every instance: overhead found and proven, seconds, peak, published figures.

    python -m benchmarks.solvers --instances FOLDER --budgets .9,.8,.5 --time-limit 60

Instances are networkx node-link JSON files (see `solvers.instances`); `--models` names models that
are captured first (see `benchmarks.captured`), and `--problems` takes files that it wrote.
Budgets are fractions of the peak of the plain order.  Overheads are percentages of the cost of
running every op once.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.baselines import checkmate, moccasin
from benchmarks.problem_file import read_problem
from benchmarks.published import PUBLISHED
from solvers import SOLVERS, Algorithm, InfeasibleBudget, load_problem, simulate, solve
from solvers.lazy import cheapest_walk
from solvers.local_search import improve, repair
from solvers.minimum import minimum_peak, working_set_floor
from solvers.problem import Problem, Schedule


class Row(NamedTuple):
    """One line of the table; None: nothing was found, nothing is proven."""

    instance: str
    ops: int
    budget: float
    solver: str
    schedule: Schedule | None
    bound: float | None
    """Lower bound on the cost of every legal schedule, in the problem's unit."""
    seconds: float


class Found(NamedTuple):
    """What a solver hands back."""

    schedule: Schedule | None
    bound: float | None


Method = Callable[[Problem, int, float, int], Found]


def lazy(problem: Problem, budget_bytes: int, time_limit: float, seed: int) -> Found:
    """Lazy walks alone."""
    deadline = time.monotonic() + time_limit
    return Found(cheapest_walk(problem, budget_bytes, deadline=deadline, seed=seed), None)


def local(problem: Problem, budget_bytes: int, time_limit: float, seed: int) -> Found:
    """Annealing alone, from lazy walks or, where they fail, from the plain order."""
    begin = time.monotonic()
    deadline = begin + time_limit
    start = cheapest_walk(
        problem, budget_bytes, deadline=begin + time_limit / 10, seed=seed,
    ) or repair(problem, budget_bytes, problem.keep_all_schedule, time_limit=time_limit / 2,
                seed=seed)
    if start is None:
        return Found(None, None)
    return Found(improve(problem, budget_bytes, start, time_limit=time_limit, deadline=deadline,
                         seed=seed), None)


def _solver(solver: str | Algorithm) -> Method:
    def method(problem: Problem, budget_bytes: int, time_limit: float, seed: int) -> Found:
        try:
            result = solve(problem, budget_bytes, solver=solver, time_limit=time_limit, seed=seed)
        except InfeasibleBudget:
            return Found(None, None)
        return Found(result.schedule, result.lower_bound)
    return method


METHODS: dict[str, Method] = {
    "lazy": lazy, "local": local,
    "checkmate": _solver(checkmate), "moccasin": _solver(moccasin),
    **{name: _solver(name) for name in SOLVERS},
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
            time_limit: float, seed: int) -> list[Row]:
    """Run the solvers on one problem, printing each row as it comes."""
    plain_peak, _ = simulate(problem, problem.keep_all_schedule)
    rows = []
    for budget in budgets:
        for name in solvers:
            start = time.monotonic()
            found = METHODS[name](problem, int(budget * plain_peak), time_limit, seed)
            row = Row(instance, len(problem), budget, name, found.schedule, found.bound,
                      time.monotonic() - start)
            rows.append(row)
            print(_line(problem, row, plain_peak), flush=True)
    return rows


HEADER = (f"| {'instance':<20} | {'ops':>5} | {'budget':>6} | {'solver':<9} | {'found %':>8} | "
          f"{'bound %':>8} | {'seconds':>7} | {'peak':>6} | published %\n"
          f"|{'-' * 22}|{'-' * 6}:|{'-' * 7}:|{'-' * 11}|{'-' * 9}:|{'-' * 9}:|{'-' * 8}:|"
          f"{'-' * 7}:|---")


def _line(problem: Problem, row: Row, plain_peak: int) -> str:
    def percent(cost: float) -> str:
        return f"{100 * (cost / problem.keep_all_cost - 1):.3f}"

    found, peak, bound = "none", "", ""
    if row.schedule is not None:
        simulation = simulate(problem, row.schedule)
        if simulation.peak_bytes > row.budget * plain_peak:
            raise AssertionError(f"{row.solver} on {row.instance} at {row.budget} is over budget")
        found, peak = percent(simulation.cost), f"{simulation.peak_bytes / plain_peak:.4f}"
    if row.bound is not None:
        bound = percent(row.bound)
    published = ", ".join(map(str, PUBLISHED.get((row.instance, round(row.budget, 6)), ())))
    return (f"| {row.instance:<20} | {row.ops:>5} | {row.budget:>6g} | {row.solver:<9} | "
            f"{found:>8} | {bound:>8} | {row.seconds:>7.1f} | {peak:>6} | {published}")


def _smallest(problem: Problem, instance: str, seed: int) -> str:
    plain_peak, _ = simulate(problem, problem.keep_all_schedule)
    start = time.monotonic()
    peak, cost = simulate(problem, minimum_peak(problem, seed=seed))
    return (f"{instance}: smallest peak found {peak / plain_peak:.4f} of the plain peak "
            f"(floor {working_set_floor(problem) / plain_peak:.4f}) at "
            f"{100 * (cost / problem.keep_all_cost - 1):.1f}% in {time.monotonic() - start:.1f} s")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", type=Path, help="folder of node-link JSON instances")
    parser.add_argument("--problems", type=Path, nargs="*", default=[],
                        help="files written by benchmarks.problem_file.save_problem")
    parser.add_argument("--models", default="",
                        help="names of models to capture, e.g. gpt2,llama_8b")
    parser.add_argument("--only", default="", help="instances whose name contains this")
    parser.add_argument("--budgets", default=".9,.8,.7,.5,.4,.3,.2",
                        help="fractions of the plain peak")
    parser.add_argument("--solvers", default="auto,local",
                        help=f"of {', '.join(METHODS)}; 'all' for each")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minimum", action="store_true", help="also the smallest peak of each")
    arguments = parser.parse_args(argv)
    arguments.solvers = list(METHODS) if arguments.solvers == "all" else (
        arguments.solvers.split(","))
    unknown = [name for name in arguments.solvers if name not in METHODS]
    if unknown:
        parser.error(f"expected solvers of {', '.join(METHODS)}; got {', '.join(unknown)}")
    try:
        arguments.budgets = [float(part) for part in arguments.budgets.split(",")]
    except ValueError:
        parser.error(f"expected budgets such as .9,.8; got {arguments.budgets}")
    if arguments.instances is None and not arguments.problems and not arguments.models:
        parser.error("expected --instances FOLDER, --models NAMES or --problems FILE; got none")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments = _arguments(argv)
    problems: list[tuple[str, Problem]] = []
    if arguments.instances is not None:
        problems += [(path.stem, load_problem(path))
                     for path in sorted(arguments.instances.glob("*.json"))]
    problems += [(path.stem, read_problem(path)) for path in arguments.problems]
    if arguments.models:
        from benchmarks.captured import captured

        problems += [(name, captured(name).problem) for name in arguments.models.split(",")]
    problems = [(name, problem) for name, problem in problems if arguments.only in name]
    print(machine())
    print(f"at most {arguments.time_limit:g} s per run, seed {arguments.seed}; overhead in percent "
          "of the plain cost, budget and peak as fractions of the plain peak\n")
    print(HEADER)
    for name, problem in problems:
        measure(problem, name, arguments.budgets, arguments.solvers, arguments.time_limit,
                arguments.seed)
    if arguments.minimum:
        print()
        for name, problem in problems:
            print(_smallest(problem, name, arguments.seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
