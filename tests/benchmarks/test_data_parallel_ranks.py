"""The benchmark of data-parallel training: real ranks take what is predicted."""

import math

import pytest

import planner
from benchmarks.data_parallel import CASES, SMALL_STEPS, measure


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ddp", "ddp, bucket views", "zero2", "fsdp2"])
def test_two_real_ranks_take_what_is_predicted(case):
    workload = SMALL_STEPS["vit"]()
    predicted = planner.data_parallel(workload.model, workload.inputs, parallel=CASES[case],
                                      optimizer="adamw")
    found = measure("vit", case, "adamw")
    assert found.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.03)
    assert math.isclose(found.resident_bytes, predicted.resident_bytes, rel_tol=0.01)
