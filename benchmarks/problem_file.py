"""A whole `Problem` as JSON, for problems that the published node-link format cannot hold."""

from __future__ import annotations

from pathlib import Path

import msgspec

from solvers.problem import Problem


def save_problem(problem: Problem, path: Path) -> None:
    """Write a problem; `read_problem` gives an equal one back."""
    path.write_bytes(msgspec.json.encode(problem) + b"\n")


def read_problem(path: Path) -> Problem:
    """Read what `save_problem` wrote; raises `ValueError` where the file holds no problem."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Problem)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: expected a problem written by `save_problem`, got what lacks "
                         f"or misnames something ({error})") from error
