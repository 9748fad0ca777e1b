"""A whole `Problem` as JSON, for problems that the published node-link format cannot hold."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from solvers.problem import Op, Problem, Segment, Storage


def save_problem(problem: Problem, path: Path) -> None:
    """Write a problem; `read_problem` gives an equal one back."""
    data = {"name": problem.name, "ops": [asdict(op) for op in problem.ops],
            "storages": [asdict(storage) for storage in problem.storages],
            "segments": [asdict(segment) for segment in problem.segments]}
    path.write_text(json.dumps(data) + "\n", encoding="utf-8")


def read_problem(path: Path) -> Problem:
    """Read what `save_problem` wrote; raises `ValueError` where the file holds no problem."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Problem(
            tuple(Op(**{**op, "inputs": tuple(op["inputs"]), "outputs": tuple(op["outputs"]),
                        "inplace": tuple(op["inplace"])}) for op in data["ops"]),
            tuple(Storage(**storage) for storage in data["storages"]),
            tuple(Segment(segment["start"], tuple(segment["replays"]))
                  for segment in data["segments"]),
            name=str(data["name"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a problem written by `save_problem`, got what lacks "
                         f"or misnames something ({type(error).__name__}: {error})") from error
