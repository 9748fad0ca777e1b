"""The child process of `graph_capture.op_costs.isolated`, which measures the ops sent to it."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
from typing import Any

import torch

from planner._graph_capture.op_costs.probe import OpProbe


def answer_questions() -> None:
    """Measure the ops on standard input until its end."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of a library must not mix with answers
    device, threads, mkldnn, deterministic = pickle.load(questions)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = mkldnn
    torch.use_deterministic_algorithms(deterministic)
    probe = OpProbe(device, directory=None)
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        pickle.dump(_answer(probe, question), answers)
        answers.flush()


def _answer(probe: OpProbe, question: bytes) -> float | None:
    """The quantity asked for; `None` for an op or an argument that this process cannot make."""
    try:
        name, args, kwargs, quantity = pickle.loads(question)
    except Exception:  # of the class of an argument
        return None
    if (namespace := name.split(".")[0]) not in ("aten", "prims"):
        with contextlib.suppress(ImportError):
            importlib.import_module(namespace)  # registers the op
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part, None)
    return target and probe.run_alone(lambda: target, args, kwargs, quantity)


if __name__ == "__main__":
    answer_questions()
