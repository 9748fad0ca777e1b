"""The process of a command: closed and broken streams, narrow encodings, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.plans.writing import fingerprint
from planner.search.planning import plan_within
from tests.support.graphs import HandMadeStep, chain, prepared

ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-m", "planner")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("process")
    plan_within(prepared(HandMadeStep(chain(12), 2600)), 1900).save(path / "plan.json")
    return path


def shell(script, folder, **variables):
    """Run a script in which `$plan` is the command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables,
                   "plan": f"{sys.executable} -m planner"}
    return subprocess.run(["bash", "-c", script], cwd=folder, env=environment, text=True,
                          capture_output=True)


@pytest.mark.parametrize(("script", "told"), [
    ("$plan show plan.json >&-", "stdout is closed"),
    ("$plan --help >/dev/full", "No space left"),
    # Each of these loads torch.
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ("set -o pipefail; $plan show plan.json | true", "stdout: Broken pipe"),
        ("$plan show plan.json --json >/dev/full", "stdout: No space left"))),
])
def test_results_that_cannot_be_printed_are_an_error(folder, script, told):
    result = shell(script, folder)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert told in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("script", "code"), [
    ("$plan show none.json 2>&-", 1), ("$plan show none.json 2>/dev/full", 1),
    ("$plan show plan.json 2>&- >/dev/null", 0), ("$plan show plan.json <&- >/dev/null", 0),
])
def test_the_code_tells_what_stderr_cannot(folder, script, code):
    result = shell(script, folder)
    assert (result.returncode, result.stderr) == (code, "")


@pytest.mark.slow
def test_an_encoding_without_all_characters_gets_what_it_has(folder):
    narrow = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    plan = json.loads((folder / "plan.json").read_text())
    plan["notes"] = ["größer als \N{SNOWMAN}"]
    plan["fingerprint"] = fingerprint(plan)
    (folder / "other.json").write_text(json.dumps(plan, ensure_ascii=False), encoding="utf-8")
    printed = shell("$plan show other.json --json", folder, **narrow)
    assert json.loads(printed.stdout)["notes"] == plan["notes"]
    table = shell("$plan show plan.json", folder, **narrow)
    assert table.returncode == 0 and "---" in table.stdout
    assert shell("$plan show größe.json", folder, **narrow).stderr.startswith("error: gr")


@pytest.mark.slow
def test_what_c_code_and_children_print_is_no_result(folder):
    (folder / "noisy.py").write_text(
        "import os, torch\nos.write(1, b'raw')\nos.system('echo child')\n"
        "def make(): return torch.nn.Linear(3, 2), torch.ones(4, 3)\n")
    result = shell("$plan memory noisy.py:make --json", folder)
    assert json.loads(result.stdout)["peak_bytes"] > 0
    assert "raw" in result.stderr and "child" in result.stderr


HANGS = """
import time

class Drops:
    def __del__(self):
        time.sleep(90)

def swallow():
    try:
        print("ready", flush=True)
        time.sleep(90)
    except BaseException:
        pass
    time.sleep(90)

def drop():
    print("ready", flush=True)
    Drops()
    time.sleep(90)

def convert():
    try:
        print("ready", flush=True)
        time.sleep(90)
    except BaseException:
        raise ValueError("something else") from None
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["swallow", "drop", "convert"])
def test_an_interrupt_ends_the_command_even_where_it_is_swallowed(folder, target):
    (folder / "hangs.py").write_text(HANGS)
    started = subprocess.Popen(
        [*COMMAND, "memory", f"hangs.py:{target}"], cwd=folder, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert started.stderr.readline() == "ready\n"
    time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    output, errors = started.communicate(timeout=60)
    assert (started.returncode, output, errors) == (130, "", "error: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 2.0, 4.0])
def test_an_interrupt_at_any_time_leaves_one_line(folder, seconds):
    started = subprocess.Popen(
        [*COMMAND, "plan", "hf:gpt2", "--seq", "64", "--budget", "60%"], cwd=folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    time.sleep(seconds)
    started.send_signal(signal.SIGINT)
    time.sleep(0.5)
    started.send_signal(signal.SIGINT)
    output, errors = started.communicate(timeout=60)
    assert output == ""
    if started.returncode != -signal.SIGINT:  # else Python itself was not up yet
        assert (started.returncode, errors) == (130, "error: interrupted\n")
