"""`checkpoint-planner memory`: the breakdown on stdout, mistakes in one line with the right
code."""

import json

import pytest

from tests.support.command_line import TINY_GPT2, run


def test_the_breakdown_is_printed():
    arguments = ["memory", *TINY_GPT2, "--optimizer", "adamw", "--accumulation", "2",
                 "--set-to-zero", "--autocast", "bf16", "--hold-output", "backward"]
    result = run(*arguments)
    assert result.stderr == ""
    assert " optimizer step" in result.stdout and "set_to_none=False" in result.stdout
    document = json.loads(run(*arguments, "--json").stdout)
    assert document["accumulation"] == 2 and document["resident"]["gradients"] > 0
    assert f"{document['peak_bytes']:,} bytes" in result.stdout


@pytest.mark.slow
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
    ["--grad-clip", "0"], ["--hold-output", "ever"], ["--zero-grad", "never"]])
def test_wrong_usage_exits_with_2(arguments):
    run("memory", *TINY_GPT2, *arguments, code=2)


def test_other_mistakes_exit_with_1(tmp_path):
    assert "SparseAdam" in run("memory", *TINY_GPT2, "--optimizer", "sparseadam", code=1).stderr
    run("memory", *TINY_GPT2, "--plan", tmp_path / "none.json", code=1)
