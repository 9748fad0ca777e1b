"""The benchmark of the whole training step: predicted and measured agree."""

import pytest

from benchmarks import step_memory
from benchmarks.models import Workload
from tests.support.loops import IDS, Network, loss_fn


@pytest.mark.slow
def test_the_benchmark_holds_on_a_small_network():
    workload = Workload("network", Network(), (IDS,), loss_fn)
    rows = list(step_memory.run(workload, ["adamw-foreach"]))
    assert len(rows) == 8
    for row in rows:
        assert abs(row.worst) < 0.2 and abs(row.worst_phase) < 0.2, row.setting
        assert row.resident_off_bytes == 0, row.setting


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), [
    ("gpt2", "momentum"), ("gpt2", "adafactor"), ("resnet", "adamw-fused")])
def test_the_benchmark_holds_on_a_part_of_its_grid(name, optimizer):
    for row in step_memory.run(step_memory.MODELS[name](), [optimizer]):
        assert abs(row.worst) < 1 and abs(row.worst_phase) < 1, row.setting
        assert row.resident_off_bytes == 0, row.setting
