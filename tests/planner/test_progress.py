"""What a person sees of long planning, on a terminal and in logs."""

import io
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner import progress
from planner.progress import active, watched

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS", 0.05)


@pytest.fixture
def no_logging(monkeypatch):
    """Undoes the logging that pytest has set up when the test begins."""
    def undo():
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(logging.root, "level", logging.WARNING)
    return undo


def work(seconds=0.2, what="planning a step"):
    with watched(None, what) as report:
        time.sleep(seconds)
        report.conclude(": all fits")


def test_a_terminal_shows_the_time_before_anything_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with watched(None, "planning a step") as report:
        assert "[  0.0 s] planning a step" in terminal.getvalue()
        time.sleep(0.2)
        assert "[  0.1 s] planning a step" in terminal.getvalue()
        report("searching: extra time 1.00%, gap 0.20%")
        assert terminal.getvalue().endswith("searching: extra time 1.00%, gap 0.20%")
    shown = terminal.getvalue()
    assert shown.endswith("\r\x1b[2K") and "\n" not in shown
    time.sleep(0.1)
    assert terminal.getvalue() == shown


def test_without_logging_the_start_and_the_end_are_printed(no_logging, capsys):
    no_logging()
    work()
    start, end = capsys.readouterr().err.splitlines()
    assert start == "planner: the planner is planning a step"
    assert end.startswith("planner: the planner finished planning a step after 0.")
    assert end.endswith(" s: all fits")


def test_results_are_printed_on_a_free_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with watched(None, "loading torch and the target"):
        progress.show_results()
        terminal.write("table\n")
        time.sleep(0.1)
    assert terminal.getvalue().endswith("\r\x1b[2Ktable\n\r\x1b[2K")


def test_short_work_and_work_of_other_ranks_is_silent(no_logging, capsys, monkeypatch):
    no_logging()
    work(seconds=0)
    monkeypatch.setenv("RANK", "1")
    work()
    assert capsys.readouterr() == ("", "")


def test_what_fails_is_told_to_have_stopped(no_logging, capsys):
    no_logging()
    with pytest.raises(ValueError, match="no"), watched(None, "planning a step"):
        time.sleep(0.2)
        raise ValueError("no")
    assert capsys.readouterr().err.splitlines()[1].endswith(" s: ValueError")


@pytest.mark.parametrize("quiet", [
    lambda patch: patch.setattr(logging.root, "level", logging.ERROR),
    lambda patch: patch.setattr(logging.getLogger("planner"), "level", logging.ERROR),
    lambda patch: patch.setattr(logging.root, "handlers", [logging.NullHandler()]),
    lambda patch: patch.setattr(logging.getLogger("planner"), "handlers", [logging.NullHandler()]),
    lambda patch: patch.setattr(logging.root.manager, "disable", logging.INFO),
])
def test_logging_that_was_set_up_otherwise_is_respected(no_logging, capsys, monkeypatch, quiet):
    no_logging()
    quiet(monkeypatch)
    work()
    assert capsys.readouterr() == ("", "")


def test_logging_that_was_set_up_gets_the_lines(caplog):
    with caplog.at_level(logging.INFO, "planner"):
        work()
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert {record.name for record in caplog.records} == {"planner.progress"}


def test_a_callback_gets_the_reports_and_nothing_is_shown(no_logging, capsys):
    no_logging()
    lines = []
    with watched(lines.append, "planning a step") as report:
        report("one")
        active()("two")
        with watched(None, "three") as inner:  # reports to who watches already
            inner("four")
        time.sleep(0.2)
    assert lines == ["one", "two", "three", "four"] and active() is None
    assert capsys.readouterr() == ("", "")


def test_a_command_logs_nothing(no_logging, capsys):
    no_logging()
    with watched(None, "loading", logs=False):
        work()
    assert capsys.readouterr() == ("", "")


FIRST_STEP = """
import time
import torch
import planner
from planner import progress

progress._SECONDS = 0.01
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(),
                                                  torch.nn.Linear(64, 32)) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
planner.within(model, "90%")
for _ in range(2):
    model(torch.randn(64, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_first_step_of_a_model_that_plans_itself_is_not_silent():
    result = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True,
                            cwd=ROOT)
    lines = [line for line in result.stderr.splitlines() if line.startswith("planner: ")]
    assert result.returncode == 0 and result.stdout == "", result.stderr
    assert lines[0] == "planner: the planner is planning a training step of Sequential"
    assert "the planner finished planning a training step of Sequential after" in lines[1]
    assert "predicted peak" in lines[1] and "extra time" in lines[1]
