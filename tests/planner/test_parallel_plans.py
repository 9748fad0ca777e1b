"""Plans of one rank: accounts that agree, units and blocks, what is refused."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.data_parallel.fully_sharded import Sharded
from planner.api import capture
from tests.support.command_line import TINY_GPT2, run
from tests.support.models import causal_model

RANKS = {
    "ddp": planner.DataParallel("ddp", 2),
    "zero1": planner.DataParallel("zero1", 2),
    "zero2": planner.DataParallel("zero2", 4),
    "fsdp2": planner.DataParallel("fsdp2", 2),
    "mixed": planner.DataParallel("fsdp2", 2, param_dtype="bf16", reduce_dtype="fp32"),
}


@pytest.fixture(scope="module")
def case():
    return causal_model(batch=4, width=32, dropout=0.1)


@pytest.fixture(scope="module")
def of_fsdp2(case):
    return plan_of(case, RANKS["fsdp2"])


def plan_of(case, parallel, budget="80%", **arguments):
    return planner.plan(case.model, case.inputs, budget=budget, optimizer="adamw",
                        parallel=parallel, time_limit=2, **arguments)


@pytest.mark.parametrize("kind", ["ddp", *(
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("zero1", "mixed"))])
def test_three_accounts_of_a_rank_agree(case, kind):
    """The plan's, the report's (traced hooks) and the loop's (composed of parts)."""
    parallel = RANKS[kind]
    plan = plan_of(case, parallel)
    assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    assert sum(plan.memory.values()) == plan.peak_bytes
    assert plan.spec.blocks == ("blocks.0", "blocks.1")
    plain = planner.data_parallel(case.model, case.inputs, parallel=parallel, optimizer="adamw")
    loop = planner.memory(case.model, case.inputs, parallel=parallel, optimizer="adamw")
    assert plan.baseline_peak_bytes == plain.peak_bytes == loop.steady.peak_bytes
    assert plan.resident_bytes == plain.resident_bytes
    planned = planner.data_parallel(case.model, case.inputs, parallel=parallel, optimizer="adamw",
                                    plan=plan)
    assert planned.peak_bytes == plan.peak_bytes == sum(planned.memory.values())
    assert planned.memory["unsharded_parameters"] + planned.memory["parameters"] == (
        plan.memory["parameters"])
    with_plan = planner.memory(case.model, case.inputs, parallel=parallel, optimizer="adamw",
                               plan=plan)
    assert with_plan.steady.peak_bytes == plan.peak_bytes


def test_what_kernels_of_an_optimizer_allocate_counts_on_ranks():
    """Muon multiplies matrices in bfloat16, for which a CPU makes copies."""
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False))
    step = model, torch.ones(2, 64)
    report = planner.data_parallel(*step, parallel=RANKS["ddp"], optimizer="muon")
    rank, alone = (capture(*step, optimizer="muon", parallel=parallel).budget
                   for parallel in (RANKS["ddp"], None))
    assert rank.optimizer == alone.optimizer
    assert report.optimizer_step_peak_bytes == rank.optimizer_step_bytes


@pytest.mark.slow
def test_what_a_rank_holds_falls_with_the_ranks(case):
    peaks = [capture(case.model, case.inputs, optimizer="adamw",
                     parallel=planner.DataParallel("fsdp2", ranks)).resident_bytes
             for ranks in (1, 2, 8)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 3 * peaks[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_plan_of_one_device_on_ranks(case, kind):
    plan = planner.plan(case.model, case.inputs, budget="70%", regions="blocks", time_limit=2)
    found = planner.data_parallel(case.model, case.inputs, parallel=RANKS[kind],
                                  optimizer="adamw", plan=plan)
    plain = planner.data_parallel(case.model, case.inputs, parallel=RANKS[kind],
                                  optimizer="adamw")
    assert found.peak_bytes < plain.peak_bytes
    with pytest.raises(planner.PlanMismatch, match="another step"):
        planner.data_parallel(case.model, {name: ids[:2] for name, ids in case.inputs.items()},
                              parallel=RANKS[kind], plan=plan)


@pytest.mark.slow
def test_the_head_of_a_rank_runs_in_chunks():
    """It stands outside of the blocks, and is planned all the same."""
    wide = causal_model(batch=4, seq=64, width=32, vocab=8192)
    with pytest.raises(planner.InfeasibleBudget):
        plan_of(wide, RANKS["fsdp2"], "50%")
    plan = plan_of(wide, RANKS["fsdp2"], "50%", allow="chunk")
    assert plan.peak_bytes <= plan.budget_bytes and plan.spec.regions[-1].block == ""


def test_nothing_of_a_captured_step_stays(case):
    """Autograd's nodes of the captured step refer to the wrapper, where the garbage collector does
    not see it."""
    plan_of(case, RANKS["fsdp2"])
    gc.collect()
    assert not [found for found in gc.get_objects() if isinstance(found, Sharded)]


def test_the_file_says_of_which_run_the_plan_is(of_fsdp2, tmp_path):
    of_fsdp2.save(tmp_path / "rank.json")
    assert planner.load(tmp_path / "rank.json") == of_fsdp2
    assert of_fsdp2.parallel == RANKS["fsdp2"] and "one of 2 ranks under fsdp2" in str(of_fsdp2)


def test_gradients_are_those_of_the_model(case, of_fsdp2):
    """On one device: nothing of the wrapper is in the graphs."""
    assert of_fsdp2.recompute_flops
    applied = of_fsdp2.apply(case.model)
    torch.manual_seed(0)
    applied(**case.inputs).loss.backward()
    found = {name: p.grad for name, p in case.model.named_parameters()}
    case.model.zero_grad()
    torch.manual_seed(0)
    case.model(**case.inputs).loss.backward()
    for name, parameter in case.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-7)
    case.model.zero_grad()


@pytest.mark.slow
def test_an_impossible_budget_names_one_that_works(case):
    with pytest.raises(planner.InfeasibleBudget) as caught:
        plan_of(case, RANKS["fsdp2"], 1000)
    assert plan_of(case, RANKS["fsdp2"], caught.value.minimum_bytes).peak_bytes <= (
        caught.value.minimum_bytes)


@pytest.mark.slow
def test_advice_is_for_a_ranks_part_of_the_batch():
    case = causal_model(seq=16, width=32)

    def inputs(batch):
        ids = torch.zeros(batch, 16, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    advice = planner.advise(case.model, inputs, effective_batch=8, budget="2MB", time_limit=1,
                            parallel=RANKS["zero2"], optimizer="sgd")
    assert "4 ranks under zero2" in str(advice)
    for choice in advice.choices:
        assert choice.micro_batch * choice.accumulation * choice.parallel.ranks == 8
    with pytest.raises(ValueError, match="dealt out evenly to 3"):
        planner.advise(case.model, inputs, effective_batch=8, budget="2MB",
                       parallel=planner.DataParallel("ddp", 3))


def test_units_and_blocks_that_do_not_go_together(case):
    inside = planner.DataParallel("fsdp2", 2, units=("blocks.*.up",))
    with pytest.raises(ValueError, match=r"blocks\.0\.up lies inside"):
        plan_of(case, inside)
    with pytest.raises(ValueError, match="leave out regions"):
        plan_of(case, RANKS["fsdp2"], regions="model")
    with pytest.raises(ValueError, match=r"layers\.\*"):
        plan_of(case, planner.DataParallel("fsdp2", 2, units=("layers.*",)))
    # One unit, the model itself: there is nothing that is gathered in between.
    whole = plan_of(case, planner.DataParallel("fsdp2", 2, units=()), regions="model")
    assert whole.spec.blocks == () and whole.peak_bytes <= whole.budget_bytes


def test_without_repeated_blocks_units_are_compiled():
    case = causal_model(layers=1, batch=4)
    parallel = planner.DataParallel("fsdp2", 2, units=("blocks.0", "embedding"))
    plan = plan_of(case, parallel, "90%")
    assert plan.spec.blocks == ("blocks.0",)
    loop = planner.data_parallel(case.model, case.inputs, parallel=parallel, optimizer="adamw",
                                 plan=plan)
    assert loop.peak_bytes == plan.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize(("settings", "message"), [
    ({"param_dtype": "bf32"}, "param_dtype must be one of bf16"),
    ({"kind": "ddp", "param_dtype": "bf16"}, "settings of fsdp2"),
    ({"kind": "zero3", "offloads": True}, "settings of fsdp2"),
    ({"kind": "zero1", "requires_gradient_sync": False}, "whole in every micro-batch"),
])
def test_settings_that_do_not_belong_together(settings, message):
    with pytest.raises(ValueError, match=message):
        planner.DataParallel(**{"kind": "fsdp2", "ranks": 2, **settings})


def test_arguments_that_do_not_belong_together(case, of_fsdp2):
    with pytest.raises(TypeError, match=r"planner\.DataParallel"):
        plan_of(case, "fsdp2")
    with pytest.raises(ValueError, match="follows plans that run op by op"):
        planner.data_parallel(case.model, case.inputs, parallel=RANKS["fsdp2"],
                              plan=replace(of_fsdp2, backend="inductor"))
    with pytest.raises(ValueError, match="accumulation=2"):
        planner.memory(case.model, case.inputs, parallel=RANKS["fsdp2"], accumulation=2)


@pytest.mark.parametrize("is_reduced", [True, False])
def test_gradients_that_wait_for_the_last_micro_step(case, is_reduced):
    parallel = replace(RANKS["fsdp2"], requires_gradient_sync=is_reduced)
    step = capture(case.model, case.inputs, parallel=parallel, accumulation=2)
    whole = sum(p.nbytes for p in case.model.parameters())
    shards = step.budget.resident["parameters"]
    assert step.budget.resident["gradients"] == (shards if is_reduced else whole) and shards < whole


def test_a_plan_of_a_rank_is_not_verified_on_one_device(case, of_fsdp2):
    with pytest.raises(ValueError, match="one of 2 ranks under fsdp2, and this model is on"):
        planner.verify(case.model, of_fsdp2, case.inputs)


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    ranks = ("--parallel", "fsdp2", "--ranks", "4", "--unit", "transformer.h.*")
    made = run("plan", *TINY_GPT2, "--budget", "90%", *ranks, "-o", tmp_path / "rank.json")
    assert "one of 4 ranks under fsdp2" in made.stdout
    plan = planner.load(tmp_path / "rank.json")
    assert plan.parallel.units == ("transformer.h.*",)
    assert "parameters" in run("memory", *TINY_GPT2, *ranks, "--optimizer", "adamw").stdout
    assert "--ranks 8" in run("plan", *TINY_GPT2, "--parallel", "fsdp2", code=2).stderr
    assert "--parallel" in run("plan", *TINY_GPT2, "--ranks", 4, code=2).stderr
    wrong = run("plan", *TINY_GPT2, "--parallel", "fsdp3", "--ranks", 4, code=2)
    assert "known: ddp" in wrong.stderr


def test_a_wrapped_model_is_refused_with_the_way_out(case, of_fsdp2):
    class DistributedDataParallel(nn.parallel.DistributedDataParallel):
        def __init__(self, module):  # without a process group
            nn.Module.__init__(self)
            self.module = module

    with pytest.raises(planner.PlanMismatch, match=r"planner\.within\(model, plan=plan\)"):
        of_fsdp2.apply(DistributedDataParallel(case.model))
