"""The benchmark's table and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from benchmarks.solvers import main, read_problem, save_problem
from planner.solvers.problem import Problem
from tests.support.problems import training_chain
from tests.support.strategies_small import problems


@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_a_saved_problem_comes_back_equal(
        problem: Problem, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("problem") / "problem.json"
    save_problem(problem, path)
    assert read_problem(path) == problem


@pytest.mark.parametrize("text", ["{", "{}", '{"ops": [{}], "storages": [], "segments": []}'])
def test_a_file_that_holds_no_problem_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken\.json: expected a problem"):
        read_problem(path)


def test_the_table_has_a_row_per_instance_budget_and_solver(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [{"id": i, "size": 10, "cost": 1} for i in range(5)]
    edges = [{"source": i, "target": i + 1} for i in range(4)] + [{"source": 0, "target": 4}]
    (tmp_path / "tiny.json").write_text(json.dumps(
        {"directed": True, "multigraph": False, "graph": {}, "nodes": nodes, "edges": edges}))
    saved = tmp_path / "saved.problem"
    save_problem(training_chain(3), saved)
    assert main(["--instances", str(tmp_path), "--problems", str(saved), "--budgets", "1,.7",
                 "--solvers", "none,ilp,sqrt_n,dp,auto", "--time-limit", "0.5",
                 "--minimum"]) == 0
    out = capsys.readouterr().out
    assert sum(line.startswith("| tiny ") for line in out.splitlines()) == 10
    assert sum(line.startswith("| saved ") for line in out.splitlines()) == 10
    assert "tiny: smallest peak found" in out
    assert "OR-Tools" in out


def test_more_work_is_compared_with_the_default(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved.problem"
    save_problem(training_chain(4), saved)
    assert main(["--problems", str(saved), "--budgets", "1,.01", "--works", ".1,.2"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()
            if line.startswith("| saved")]
    assert [row[3].strip() for row in rows] == ["1.0", "0.01", "smallest"]
    assert len({cell.strip() for cell in rows[0][5:-1]}) == 1 and rows[1][5].strip() == "none"


@pytest.mark.slow
def test_models_are_captured_for_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "mlp", "--budgets", "1", "--solvers", "auto"]) == 0
    assert sum(line.startswith("| mlp ") for line in capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("argv, message", [
    (["--instances", ".", "--solvers", "magic"], "expected solvers of"),
    (["--instances", ".", "--budgets", "much"], "expected budgets such as"),
    ([], "expected --instances"),
])
def test_bad_arguments_are_explained(
        argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err
