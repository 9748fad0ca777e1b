"""The joint graph is rewritten in one place, for what is planned and for what runs."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from planner._apply import plan_backend
from planner._graph_capture.joint_graph import pipeline
from planner._graph_capture.step import regions
from tests.support.compiler import needs_compiler
from tests.support.models import Case
from tests.support.training import train

ROOT = Path(__file__).parents[2]
STEPS = {"clean_joint_graph", "lower_backward_peak", "recompute_dropout", "lower"}
HOMES = {"joint", "low_peak_backward", "recomputed_dropout", "lower"}


def test_the_steps_of_the_rewriting_are_imported_by_the_pipeline_alone():
    importers = {}
    for folder in ("graph_capture", "apply", "planner", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (isinstance(node, ast.ImportFrom) and node.module
                        and node.module.startswith("planner._graph_capture.joint_graph")
                        and node.module.rpartition(".")[2] in HOMES):
                    for alias in node.names:
                        importers.setdefault(alias.name, set()).add(path)
    here = {Path(pipeline.__file__).resolve()}
    assert {name: importers.get(name) for name in STEPS} == dict.fromkeys(STEPS, here)


@pytest.mark.parametrize("backend", [
    "eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_what_is_planned_and_what_runs_comes_from_one_call(backend, monkeypatch):
    from planner.api import capture
    from planner.search.planning import plan_within

    made = {"planned": [], "run": []}

    def noting(kind):
        def lower(*args, **kwargs):
            region = pipeline.lower_joint_graph(*args, **kwargs)
            made[kind].append([(op.name, op.digest) for op in region.ops])
            return region
        return lower

    monkeypatch.setattr(regions, "lower_joint_graph", noting("planned"))
    monkeypatch.setattr(plan_backend, "lower_joint_graph", noting("run"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    case = Case(model, (torch.randn(4, 8),), torch.sum)
    prepared = capture(case.model, case.inputs, loss_fn=case.loss_fn, backend=backend, probe=False)
    train(plan_within(prepared, None).apply(case.model), case, steps=1)
    assert made["planned"] and made["run"]
    assert all(run == made["planned"][0] for run in made["run"])
