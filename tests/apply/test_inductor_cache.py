"""Inductor's cache on disk across processes: a plan is served from it, and never another plan's
code."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]

SCRIPT = """
import json, sys
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from tests.support.inductor import EFFORT, batch, budget_at, gradient, loss_of, make_model, step
from planner.api import capture
from planner.search.compiled import smallest_plan
from planner.plans.file import dumps, loads
from planner.search.planning import plan_within

path, fraction = sys.argv[1], float(sys.argv[2])
inductor_config.fallback_random = sys.argv[3] == "True"
model = make_model()
try:
    plan = loads(open(path).read())
except FileNotFoundError:
    prepared = capture(model, batch(), loss_fn=loss_of, backend="inductor")
    default = plan_within(prepared, None, EFFORT)
    plan = (plan_within(prepared, budget_at(prepared, default, fraction), EFFORT) if fraction
            else smallest_plan(prepared, EFFORT))
    open(path, "w").write(dumps(plan))
counters.clear()
step(plan.apply(model))
print(json.dumps({"hits": counters["inductor"]["fxgraph_cache_hit"],
                  "misses": counters["inductor"]["fxgraph_cache_miss"],
                  "bypasses": counters["inductor"]["fxgraph_cache_bypass"],
                  "replays": sum("dropout" in action.op for region in plan.spec.regions
                                 for again in region.insertions for action in again.actions),
                  "gradient": float(gradient(model).norm())}))
"""


def in_a_process(tmp_path, plan, fraction, fallback_random):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ".",
                   "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / plan), str(fraction),
                           str(fallback_random)],
                          env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_same_plan_comes_from_the_cache_and_another_does_not(tmp_path):
    """One of them draws random numbers again."""
    first, again = (in_a_process(tmp_path, "plan.json", 0, True) for _ in range(2))
    assert first["replays"] > 0
    assert (first["hits"], first["misses"], first["bypasses"]) == (0, 2, 0)
    assert (again["hits"], again["misses"], again["bypasses"]) == (2, 0, 0)
    other = in_a_process(tmp_path, "other.json", 0.6, True)
    assert (other["hits"], other["misses"], other["bypasses"]) == (0, 2, 0)
    assert again["gradient"] == first["gradient"]
    assert other["gradient"] == pytest.approx(first["gradient"], rel=1e-5)
