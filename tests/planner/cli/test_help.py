"""What the command line shows before it works: the help, and every argument of planning."""

import subprocess
import sys

import pytest

from planner.cli.commands import COMMANDS
from tests.support.command_line import run


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["advise", "--help"]])
def test_the_help_needs_neither_torch_nor_a_solver(arguments):
    code = f"""
import sys
from planner.cli.process import run
code = run({arguments!r})
for heavy in ("torch", "ortools", "numpy", "planner.public", "planner.solvers.solve"):
    assert heavy not in sys.modules, heavy
sys.exit(code)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


def test_every_command_explains_itself():
    overview = run("--help").stdout
    for command in COMMANDS:
        assert command in overview
        assert "--json" in run(command, "--help").stdout


def test_commands_that_plan_take_the_same_options():
    own = {command: {word for word in run(command, "--help").stdout.split()
                     if word.startswith("--")} for command in COMMANDS}
    shared = {"--solver", "--gpu", "--regions", "--keep", "--no-probe", "--cost-model"}
    for command in ("plan", "frontier", "max-batch", "max-seq", "advise"):
        assert shared <= own[command]
    assert "--accumulation" in own["plan"] and "--accumulation" not in own["advise"]
    assert "--device" in own["memory"] and "--solver" not in own["memory"]


@pytest.mark.parametrize(("options", "told"), [
    (["--gpu", "H101"], "known: B200"), (["--gpu", "H100"], "device='cuda'")])
def test_a_gpu_that_cannot_be_meant_is_wrong_usage(options, told):
    assert told in run("plan", "hf:gpt2", "--set", "n_layer=1", "--set", "n_embd=8", "--set",
                       "n_head=2", "--seq", "8", *options, code=2).stderr
