"""`checkpoint-planner memory`: the breakdown on stdout, mistakes in one line with the right
code."""

import json
import pickle

import pytest

from tests.support.command_line import TINY_GPT2, invoke, run


def test_the_account_is_printed_and_its_snapshot_saved(tmp_path):
    path = tmp_path / "loop.pickle"
    arguments = ["memory", *TINY_GPT2, "--optimizer", "adamw", "--accumulation", "2",
                 "--set-to-zero", "--autocast", "bf16", "--hold-output", "backward"]
    result = run(*arguments, "--snapshot", path)
    assert result.stderr == ""
    assert " optimizer step" in result.stdout and "set_to_none=False" in result.stdout
    document = json.loads(run(*arguments, "--json").stdout)
    assert document["accumulation"] == 2 and document["resident"]["gradients"] > 0
    assert f"{document['peak_bytes']:,} bytes" in result.stdout
    assert pickle.loads(path.read_bytes())["segments"]


def test_a_plan_is_accounted_for(tmp_path):
    path = tmp_path / "plan.json"
    run("plan", *TINY_GPT2, "--budget", "90%", "-o", path, "--time-limit", "10")
    document = json.loads(run("memory", *TINY_GPT2, "--plan", path, "--json").stdout)
    assert document["planned"]
    assert document["peak_bytes"] == json.loads(path.read_text())["predicted"]["peak_bytes"]
    other = [argument.replace("vocab_size=100", "vocab_size=101") for argument in TINY_GPT2]
    assert "plan this model" in run("memory", *other, "--plan", path, code=4).stderr


@pytest.mark.parametrize("arguments", [
    ["--optimizer", "adamv"], ["--accumulation", "0"], ["--autocast", "int8"],
    ["--grad-clip", "0"], ["--hold-output", "ever"], ["--zero-grad", "never"],
    ["--budget", "60%"], ["--budget", "lots"]])
def test_wrong_usage_exits_with_2(arguments):
    run("memory", *TINY_GPT2, *arguments, code=2)


def test_other_mistakes_exit_with_1(tmp_path):
    assert "SparseAdam" in run("memory", *TINY_GPT2, "--optimizer", "sparseadam", code=1).stderr
    run("memory", *TINY_GPT2, "--snapshot", tmp_path / "missing" / "x.pickle", code=1)
    run("memory", *TINY_GPT2, "--plan", tmp_path / "none.json", code=1)


def test_a_budget_is_held_or_a_remedy_is_named():
    arguments = ["memory", *TINY_GPT2, "--optimizer", "adamw"]
    plain = json.loads(run(*arguments, "--json").stdout)
    peak = plain["peak_bytes"]
    assert json.loads(run(*arguments, "--budget", peak, "--json").stdout) == plain
    for budget, remedy in ((peak - 1, "recomputation could fit"),
                           (plain["floor"]["size_bytes"] - 1, "smaller micro-batch could fit"),
                           (plain["resident_bytes"] - 1, "are held between steps")):
        result = invoke(*arguments, "--budget", budget, "--json")
        assert result.exit_code == 3 and remedy in result.stderr
        assert f"{peak - budget:,} more than the budget" in result.stderr
        assert json.loads(result.stdout) == plain
