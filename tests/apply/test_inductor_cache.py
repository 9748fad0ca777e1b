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
from tests.support.inductor import EFFORT, batch, gradient, loss_of, make_model, step
from planner.api import capture
from planner.plans.file import dumps, loads
from planner.search import compiled
from planner.search.compiled_search import schedule_saving
from planner.search.planning import plan_within

folder, inductor_config.fallback_random = sys.argv[1], True
model = make_model(layers=3)
if sys.argv[2] == "make":
    prepared = capture(model, batch(), loss_fn=loss_of, backend="inductor")
    searches = compiled._searches(prepared, EFFORT)
    found = searches[0].evaluate(schedule_saving(prepared.base, frozenset()))
    for name, plan in (("drawn again", compiled._make_plan(searches, searches[0], found)),
                       ("other", plan_within(prepared, None, EFFORT))):
        open(f"{folder}/{name}.json", "w").write(dumps(plan))
found = []
for name in sys.argv[3:]:
    plan = loads(open(f"{folder}/{name}.json").read())
    counters.clear()
    step(plan.apply(model))
    found.append({"hits": counters["inductor"]["fxgraph_cache_hit"],
                  "misses": counters["inductor"]["fxgraph_cache_miss"],
                  "bypasses": counters["inductor"]["fxgraph_cache_bypass"],
                  "replays": sum("dropout" in action.op for region in plan.spec.regions
                                 for again in region.insertions for action in again.actions),
                  "gradient": float(gradient(model).norm())})
print(json.dumps(found))
"""


def in_a_process(tmp_path, *arguments):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ".",
                   "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), *arguments],
                          env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_same_plan_comes_from_the_cache_and_another_does_not(tmp_path):
    """One of them draws random numbers again."""
    first, = in_a_process(tmp_path, "make", "drawn again")
    again, other = in_a_process(tmp_path, "read", "drawn again", "other")
    assert first["replays"] > 0
    assert (first["hits"], first["misses"], first["bypasses"]) == (0, 2, 0)
    assert (again["hits"], again["misses"], again["bypasses"]) == (2, 0, 0)
    assert (other["hits"], other["misses"], other["bypasses"]) == (0, 2, 0)
    assert again["gradient"] == first["gradient"]
    assert other["gradient"] == pytest.approx(first["gradient"], rel=1e-5)
