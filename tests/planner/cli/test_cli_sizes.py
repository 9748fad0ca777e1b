"""The commands that vary the size of the step: results on stdout, mistakes with the right code."""

import json
import sys

import pytest

import planner
from tests.support.command_line import run

TINY_GPT2 = ["hf:gpt2", "--set", "n_layer=1", "--set", "n_embd=32", "--set", "n_head=2",
             "--set", "vocab_size=100", "--set", "n_positions=64", "--solver", "dp",
             "--time-limit", "1"]
FACTORY = """
import torch

def sized(batch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    return model, (torch.zeros(batch, 8),)

def fixed():
    return sized(3)

def lone(batch):
    return sized(batch)[0]

def unmoved(batch):
    return sized(3)

def with_loss(batch):
    labels = torch.ones(batch, 1)
    return (*sized(batch), lambda output: torch.nn.functional.mse_loss(output, labels))
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "sized_factories.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "sized_factories"
    sys.modules.pop("sized_factories", None)


@pytest.mark.slow
def test_the_largest_batch_of_an_hf_target(tmp_path):
    path = tmp_path / "plan.json"
    result = run("max-batch", *TINY_GPT2, "--seq", "32", "--budget", "2MB", "--optimizer", "sgd",
                 "--json", "-o", path)
    found = json.loads(result.stdout)
    assert result.stderr == "" and found["what"] == "batch"
    assert found["planned"]["largest"] >= found["plain"]["largest"] >= 1
    assert found["plain"]["next_peak_bytes"] > 2_000_000 >= found["plain"]["peak_bytes"]
    assert planner.load(path).budget_bytes == 2_000_000


@pytest.mark.slow
def test_the_longest_sequence_of_an_hf_target():
    found = json.loads(run("max-seq", *TINY_GPT2, "--batch", "2", "--budget", "900MB", "--no-plan",
                           "--smallest", "60", "--json").stdout)
    assert found["what"] == "sequence" and found["planned"]["largest"] is None
    assert found["plain"]["largest"] == 64  # the model has no more positions


@pytest.mark.slow
def test_advice_on_an_hf_target():
    result = run("advise", *TINY_GPT2, "--seq", "32", "--budget", "2MB", "--effective-batch", "4")
    assert "micro-batch" in result.stdout and result.stderr == ""


def test_a_factory_is_called_with_the_size(factories):
    found = json.loads(run("max-batch", f"{factories}:sized", "--budget", "20kB", "--no-plan",
                           "--json").stdout)
    assert found["plain"]["next"] == found["plain"]["largest"] + 1
    advice = json.loads(run("advise", f"{factories}:sized", "--budget", "20kB",
                            "--effective-batch", "8", "--solver", "dp", "--json").stdout)
    assert advice["effective_batch"] == 8 and advice["choices"]


@pytest.mark.slow
def test_the_loss_of_a_factory_is_made_for_each_size(factories):
    arguments = ["--budget", "20kB", "--no-plan", "--json"]
    own, none, named = (
        json.loads(run("max-batch", f"{factories}.py:{target}", *arguments, *loss).stdout)["plain"]
        for target, loss in (("with_loss", []), ("sized", []), ("sized", ["--loss", "mse_loss"]))
    )
    assert own["largest"] and named["largest"]
    # Without a loss a gradient of the output's own size is held by the caller.
    assert own["peak_bytes"] / own["largest"] != none["peak_bytes"] / none["largest"]


@pytest.mark.parametrize(("target", "code", "message"), [
    ("fixed", 2, "must take the batch size"),
    ("lone", 1, "(model, inputs)"),
    ("unmoved", 2, "same shapes"),
    ("none", 2, "has no 'none'"),
])
def test_a_factory_that_takes_or_returns_something_else(factories, target, code, message):
    assert message in run("max-batch", f"{factories}:{target}", "--budget", "20kB",
                          code=code).stderr


@pytest.mark.parametrize("arguments", [
    ["max-batch", *TINY_GPT2],
    ["max-batch", *TINY_GPT2, "--budget", "60%"],
    ["max-batch", *TINY_GPT2, "--budget", "lots"],
    ["max-batch", *TINY_GPT2, "--budget", "1MB", "--overhead", "some"],
    ["max-batch", *TINY_GPT2, "--budget", "1MB", "--overhead=-5%"],
    ["max-batch", *TINY_GPT2, "--budget", "1MB", "--smallest", "9", "--largest", "3"],
    ["max-batch", "hf:no_such_type", "--budget", "1MB"],
    ["max-seq", "hf:vit", "--budget", "1MB"],
    ["advise", *TINY_GPT2, "--budget", "1MB"],
    ["advise", *TINY_GPT2, "--budget", "1MB", "--effective-batch", "0"],
])
def test_wrong_usage_exits_with_2(arguments):
    run(*arguments, code=2)


@pytest.mark.slow
def test_what_is_impossible_exits_with_3():
    result = run("max-batch", *TINY_GPT2, "--seq", "32", "--budget", "10kB", code=3)
    assert "no batch from 1 on fits" in result.stderr
    result = run("advise", *TINY_GPT2, "--seq", "32", "--budget", "10kB", "--effective-batch", "2",
                 code=3)
    assert "not even micro-batches of 1" in result.stderr


def test_a_path_that_cannot_be_written_is_told_before_the_work(tmp_path):
    assert "missing" in run("max-batch", *TINY_GPT2, "--budget", "1MB", "-o",
                            tmp_path / "missing" / "plan.json", code=1).stderr
