"""Every solver on every instance: overhead found and proven, seconds, peak.

    python -m benchmarks.solvers --instances FOLDER --budgets .9,.8,.5 --time-limit 60

Instances are networkx node-link JSON files (see `solvers.instances`).  `--models` names models that
are captured first, large ones on the meta device, and kept with `--save`; `--problems` reads these
files.  `auto` searches until the time limit; `usual` is `auto` with the default work of planning,
which stops when more work is not worth it.  Budgets are fractions of the peak of the plain order,
overheads percentages of the cost of running every op once.

    python -m benchmarks.solvers --models mamba,gpt2,t5 --budgets .8,.6,.4 --works 2,5,10,30

shows what the default search of planning misses: the extra time, and the smallest peak above the
working-set floor, that searches of so much work find.  Work is counted, in seconds of a reference
machine, so the load of this one changes nothing but the column of CPU seconds.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from benchmarks.arguments import add_names, add_numbers, benchmark_parser, parse
from benchmarks.models import WORKLOADS, Workload, gpt2, llama, mamba
from benchmarks.table import Table
from planner.solvers import SOLVERS, InfeasibleBudget, load_problem, simulate, solve
from planner.solvers.minimum import Descent, minimum_peak, working_set_floor
from planner.solvers.problem import Problem, Schedule


def save_problem(problem: Problem, path: Path) -> None:
    """Write a problem; `read_problem` returns an equal one."""
    path.write_bytes(msgspec.json.encode(problem) + b"\n")


def read_problem(path: Path) -> Problem:
    """Read a file of `save_problem`; raise `ValueError` if the file contains no problem."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Problem)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: expected a problem written by `save_problem`, got what lacks "
                         f"or misnames something ({error})") from error


class Found(NamedTuple):
    """The result of a solver; `None`: nothing was found, nothing is proven."""

    schedule: Schedule | None
    bound: float | None
    """Lower bound on the cost of every legal schedule, in the problem's unit."""


Method = Callable[[Problem, int, float, int], Found]


def _solver(solver: str, work_limit: float | None = math.inf) -> Method:
    def method(problem: Problem, budget_bytes: int, time_limit: float, seed: int) -> Found:
        try:
            result = solve(problem, budget_bytes, solver=solver, time_limit=time_limit, seed=seed,
                           work_limit=work_limit)
        except InfeasibleBudget:
            return Found(None, None)
        return Found(result.schedule, result.lower_bound)
    return method


METHODS: dict[str, Method] = {
    **{name: _solver(name) for name in SOLVERS},
    "usual": _solver("auto", None),
}
"""Everything that can be compared, by name."""


def _gpt2(layers: int) -> Workload:
    """GPT-2 medium's layers, batch 8, 1024 tokens, a small vocabulary, dropout as published."""
    with torch.device("meta"):
        return gpt2(layers=layers, sequence=1024, width=1024, heads=16, vocabulary=4096)


def _llama(layers: int, width: int, inside: int, heads: int) -> Workload:
    """Llama 3 in bfloat16, 8 sequences of 4096 tokens."""
    with torch.device("meta"):
        work = llama(layers=layers, sequence=4096, width=width, inside=inside, heads=heads,
                     groups=8, vocabulary=128256)
    return replace(work, model=work.model.to(torch.bfloat16))


STEPS: dict[str, Callable[[], Workload]] = {
    **{f"gpt2_{layers}": partial(_gpt2, layers) for layers in (12, 24, 48, 96)},
    "llama_8b": partial(_llama, 32, 4096, 14336, 32),
    "llama_70b": partial(_llama, 80, 8192, 28672, 64),
    "mamba": mamba,
    **WORKLOADS,
}
"""Steps to capture, by name; the first six are on the meta device."""


def measure(problem: Problem, instance: str, budgets: Sequence[float], solvers: Sequence[str],
            time_limit: float, seed: int, table: Table) -> None:
    """Run the solvers on one problem, and print each row as it comes."""
    plain_peak, _ = simulate(problem, problem.keep_all_schedule)

    def percent(cost: float) -> float:
        return 100 * (cost / problem.keep_all_cost - 1)

    for budget in budgets:
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
                      None if found.bound is None else percent(found.bound), seconds, peak)


def compare_works(problem: Problem, instance: str, budgets: Sequence[float],
                  works: Sequence[float], seed: int, table: Table) -> None:
    """Print what the default search finds, and what searches of so much work do."""
    plain_peak, _ = simulate(problem, problem.keep_all_schedule)

    def row(budget: float | str, find: Callable[[float | None], tuple[float | str, bool]]) -> None:
        start = time.process_time()
        found = [find(None)]
        seconds = time.process_time() - start
        for work in works:
            found.append(found[-1] if found[-1][1] else find(work))
        table.row(instance, len(problem), budget, seconds, *(value for value, _ in found))

    for budget in budgets:
        def overhead(work: float | None, budget: float = budget) -> tuple[float | str, bool]:
            try:
                result = solve(problem, int(budget * plain_peak), seed=seed, work_limit=work,
                               time_limit=1e6)
            except InfeasibleBudget:
                return "none", True
            return 100 * (result.cost / result.keep_all_cost - 1), result.status == "optimal"
        row(budget, overhead)

    def peak(work: float | None) -> tuple[float, bool]:
        descent = Descent(problem, seed, whole_work=work)
        proven = descent.reaches(descent.floor)
        return 100 * (descent.best_peak / descent.floor - 1), proven
    row("smallest", peak)


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
                        help="files that --save wrote")
    parser.add_argument("--save", type=Path, help="folder for the problems of --models")
    parser.add_argument("--models", default="",
                        help="names of models to capture, e.g. gpt2,llama_8b")
    parser.add_argument("--only", default="", help="instances whose name contains this")
    add_numbers(parser, "--budgets", (0.9, 0.8, 0.7, 0.5, 0.4, 0.3, 0.2),
                "fractions of the plain peak")
    add_names(parser, "--solvers", METHODS, ("auto", "usual"))
    parser.add_argument("--seed", type=int, default=0)
    add_numbers(parser, "--works", (), "compare searches of so much work with the default one")
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
        for name in arguments.models.split(","):
            start = time.monotonic()
            problems.append((name, STEPS[name]().prepare().base.problem))
            print(f"{name}: captured in {time.monotonic() - start:.1f} s", flush=True)
            if arguments.save is not None:
                save_problem(problems[-1][1], arguments.save / f"{name}.problem")
    problems = [(name, problem) for name, problem in problems if arguments.only in name]
    print(f"{platform.machine()}, OR-Tools {version('ortools')}")
    if arguments.works:
        table = Table("instance:10", "ops:5d", ">budget", "CPU s:.1f", "default %:.3f",
                      *(f"{work:g} %:8.3f" for work in arguments.works))
        for name, problem in problems:
            compare_works(problem, name, arguments.budgets, arguments.works, arguments.seed, table)
        return 0
    print(f"at most {arguments.time_limit:g} s per run, seed {arguments.seed}; overhead in percent "
          "of the plain cost, budget and peak as fractions of the plain peak\n")
    table = Table("instance:20", "ops:5d", "budget:g", "solver:9", "found %:8.3f", "bound %:8.3f",
                  "seconds:.1f", "peak:.4f")
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
