"""The command line: results on stdout, mistakes in one line with the right exit code."""

import json
import re
import sys

import pytest

import planner
from planner.search.planning import plan_within
from tests.support.command_line import TINY_GPT2, run
from tests.support.graphs import HandMadeStep, chain, prepared


@pytest.fixture(scope="module")
def plan():
    return plan_within(prepared(HandMadeStep(chain(12), 2600)), 1900)


@pytest.fixture
def saved(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def test_show_prints_the_table_or_the_file(plan, saved):
    assert run("show", saved).stdout.strip() == str(planner.load(saved)).strip()
    assert json.loads(run("show", saved, "--json").stdout) == plan.to_dict()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 8}'])
def test_a_file_that_is_no_plan_is_an_error(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert str(path) in run("show", path, code=1).stderr


def test_a_missing_file_is_an_error(tmp_path):
    assert "none.json" in run("show", tmp_path / "none.json", code=1).stderr


@pytest.mark.parametrize("arguments", [
    ["plan", *TINY_GPT2, "--budget", "lots"],
    ["plan", *TINY_GPT2, "--budget=-8GB"],
    ["plan", *TINY_GPT2, "--budget", "8GB", "--solver", "magic"],
    ["plan", *TINY_GPT2, "--budget", "8GB", "--backend", "jax"],
    ["plan", *TINY_GPT2, "--budget", "8GB", "--cost-model", "guess"],
    ["plan", *TINY_GPT2, "--budget", "8GB", "--time-limit", "0"],
    ["plan", "no_such_module:factory", "--budget", "8GB"],
    ["plan", "hf:no_such_type", "--budget", "8GB"],
    ["plan", "gpt2", "--budget", "8GB"],
    ["plan", *TINY_GPT2, "--batch", "0"],
    ["plan", "--budget", "8GB"],
    ["plan", *TINY_GPT2, "--no-such-option"],
    ["no-such-command"],
    ["frontier", *TINY_GPT2, "--points", "1"],
])
def test_wrong_usage_exits_with_2(arguments):
    run(*arguments, code=2)


def test_a_path_that_cannot_be_written_is_told_before_the_work(tmp_path):
    result = run("plan", *TINY_GPT2, "-o", tmp_path / "missing" / "plan.json", code=1)
    assert "missing" in result.stderr
    run("plan", *TINY_GPT2, "-o", tmp_path, code=2)


def test_a_plan_is_made_shown_and_verified(tmp_path):
    path = tmp_path / "plan.json"
    made = run("plan", *TINY_GPT2, "--budget", "90%", "--optimizer", "sgd", "-o", path,
               "--time-limit", "10")
    assert made.stderr == ""
    assert "predicted peak" in made.stdout and "transformer.h.0-1" in made.stdout
    as_json = run("plan", *TINY_GPT2, "--budget", "90%", "--optimizer", "sgd", "--json",
                  "--time-limit", "10")
    assert json.loads(as_json.stdout) == planner.load(path).to_dict() == json.loads(
        path.read_text())
    verified = json.loads(run("verify", *TINY_GPT2, path, "--json").stdout)
    assert verified["ok"] and verified["peak_bytes"] <= verified["budget_bytes"]

    smaller = [argument.replace("n_embd=32", "n_embd=16") for argument in TINY_GPT2]
    assert "16" in run("verify", *smaller, path, code=4).stderr


def test_an_impossible_budget_exits_with_3():
    result = run("plan", *TINY_GPT2, "--budget", "1kB", "--time-limit", "10", code=3)
    assert "smallest budget that works" in result.stderr and "aten" in result.stderr


def test_a_model_that_cannot_be_captured_or_made_exits_with_1(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def misfit():\n    return torch.nn.Linear(3, 2), (torch.ones(4, 5),)\n"
        "def broken():\n    raise RuntimeError('out of luck')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "out of luck" in run("plan", "own:broken", code=1).stderr
    assert run("plan", "own:misfit", code=1).stderr.startswith("error: ")
    sys.modules.pop("own")


@pytest.mark.parametrize("columns", [
    60, *(pytest.param(columns, marks=pytest.mark.slow) for columns in (None, 160))])
def test_tables_fit_the_terminal(saved, tmp_path, monkeypatch, columns):
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    text = run("show", saved).stdout
    for command in ("memory", "frontier"):
        more = ["--points", "2", "--solver", "dp"] if command == "frontier" else []
        text += run(command, *TINY_GPT2, "--optimizer", "adamw", *more).stdout
    assert max(map(len, text.splitlines())) <= (columns or 80)
    assert "…" not in text


@pytest.mark.slow
def test_the_frontier_is_printed_and_drawn(tmp_path):
    result = run("frontier", *TINY_GPT2, "--points", "3", "--time-limit", "3", "--json",
                 "--plot", tmp_path / "curve.svg")
    points = json.loads(result.stdout)["points"]
    assert points[0]["overhead"] == 0 and points[0]["peak_bytes"] > points[-1]["peak_bytes"]
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_loss_head_may_run_in_pieces(tmp_path):
    """By one option, however it is written; refusals name it."""
    wide = ["hf:gpt2", *TINY_GPT2[1:], "--set", "vocab_size=3000", "--drop-output"]
    refused = run("plan", *wide, "--budget", "1B", code=3).stderr
    least = int(re.search(r"With allow=\('recompute', 'chunk'\), ([\d,]+) bytes", refused)
                .group(1).replace(",", ""))
    for written in (["chunk"], ["recompute,chunk"], ["recompute", "chunk"]):
        options = [word for choice in written for word in ("--allow", choice)]
        found = json.loads(run("plan", *wide, "--budget", least, *options, "--time-limit", "2",
                               "--json").stdout)
        assert found["chunks"] > 1
    run("plan", *wide, "--budget", least, "--allow", "fuse", code=2)
    run("plan", *wide, "--budget", least, "--allow", "offload", code=2)
