"""Plans on many ranks: real ones take what is predicted, with the same gradients and collectives.
"""

import pytest

import planner
from benchmarks.planned_ranks import STEPS, WRAPPERS, plan_for, run


@pytest.mark.slow
def test_two_real_ranks_under_a_plan_take_what_is_predicted():
    wrapper = "fsdp2"
    parallel = planner.DataParallel(ranks=2, **WRAPPERS[wrapper])
    workload = STEPS["vit"]()
    plain = planner.data_parallel(workload.model, workload.inputs, parallel=parallel,
                                  optimizer="adamw")
    step = workload.prepare(parallel=parallel, optimizer="adamw")
    plan = plan_for(workload, parallel, step, "70%", 5)
    seen = run("vit", wrapper, 2, {"a plan": plan})
    fullest = max(each["a plan"]["peak"] for each in seen)
    assert fullest <= plan.budget_bytes
    assert fullest == pytest.approx(plan.peak_bytes, rel=0.01)
    largest = max((each["plain"] for each in seen), key=lambda each: each["peak"])
    assert largest["peak"] == pytest.approx(plain.peak_bytes, rel=0.03)
    assert largest["resident"] == pytest.approx(plain.resident_bytes, rel=0.01)
    for rank in seen:
        assert rank["a plan"]["same"] and rank["a plan"]["off"] == 0
