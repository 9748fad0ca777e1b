"""The command line as a user calls it, within this process."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from planner.cli.process import run as run_command

TINY_GPT2 = ["hf:gpt2", "--set", "n_layer=2", "--set", "n_embd=32", "--set", "n_head=2",
             "--set", "vocab_size=100", "--batch", "2", "--seq", "32"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has run."""

    exit_code: int
    stdout: str
    stderr: str


def invoke(*arguments):
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        exit_code = run_command([str(argument) for argument in arguments])
    return Finished(exit_code, stdout.getvalue(), stderr.getvalue())


def run(*arguments, code=0):
    result = invoke(*arguments)
    assert result.exit_code == code, result
    if code:
        assert result.stdout == ""
        # One line; warnings of libraries may come before.
        assert result.stderr.splitlines()[-1].startswith("error: "), result.stderr
        assert "Traceback" not in result.stderr
    return result
