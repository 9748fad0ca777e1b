"""The command line as a user calls it, within this process."""

from typer.testing import CliRunner

from planner.cli import app

RUNNER = CliRunner()

TINY_GPT2 = ["hf:gpt2", "--set", "n_layer=2", "--set", "n_embd=32", "--set", "n_head=2",
             "--set", "vocab_size=100", "--batch", "2", "--seq", "32"]


def run(*arguments, code=0):
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    if code:
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert result.stderr.strip()
    return result
