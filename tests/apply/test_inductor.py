"""Plans for Inductor: the graph they are made on, the memory they predict, what they keep apart.

Most tests generate Inductor's code without compiling it; the few that compile take small models.
The oracles: the allocator's events, finite differences, eager PyTorch under `fallback_random`.
"""

import pickle
from dataclasses import replace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

import planner
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.training_graph import Phase
from planner.api import capture
from planner.plans.file import dumps, loads
from planner.search.compiled import smallest_plan
from planner.search.compiled_search import saved_buffers, schedule_saving, without_free
from planner.search.planning import plan_within
from planner.solvers.simulator import unroll
from tests.support import training
from tests.support.compiler import needs_compiler
from tests.support.inductor import (
    EFFORT,
    INPUT,
    batch,
    budget_at,
    gradient,
    loss_of,
    make_model,
    measured_peak,
    step,
)
from tests.support.models import Case

pytestmark = [pytest.mark.compat, needs_compiler]


@pytest.fixture(scope="module")
def prepared():
    return capture(make_model(), batch(), loss_fn=loss_of, backend="inductor")


@pytest.fixture(scope="module")
def default(prepared):
    return plan_within(prepared, None, EFFORT)


@pytest.fixture(scope="module")
def tight(prepared, default):
    return plan_within(prepared, budget_at(prepared, default, 0.7), EFFORT)


# --- The graph and its schedules ------------------------------------------------------------------


def test_the_plan_is_made_on_the_graph_that_inductor_partitions(prepared):
    targets = {op.target for op in prepared.base.graph.ops}
    assert "prims.inductor_random.default" in targets
    assert not any("dropout" in target for target in targets)
    assert len(prepared.variants) == 1  # nothing is concatenated


def test_random_numbers_are_drawn_once_and_computed_from_seeds_any_number_of_times(prepared):
    ops = {op.target: op for op in prepared.base.graph.ops}
    assert ops["prims.inductor_seeds.default"].pinned
    assert not ops["prims.inductor_random.default"].pinned


def test_what_inductor_saves_is_what_the_schedule_saves(prepared):
    graph, problem = prepared.base.graph, prepared.base.problem
    wanted = prepared.base.compiled.saved_by_default
    assert wanted
    schedule = schedule_saving(prepared.base, wanted)
    unroll(problem, schedule)  # raises where the schedule is not legal
    saved = saved_buffers(prepared.base, schedule)
    for b in saved - wanted:
        assert (graph.buffers[b].kept_to_end
                or not problem.ops[graph.buffers[b].producer].recomputable)


def test_saving_nothing_recomputes_everything_that_may_be(prepared):
    graph, problem = prepared.base.graph, prepared.base.problem
    schedule = schedule_saving(prepared.base, frozenset())
    for buffer in saved_buffers(prepared.base, schedule):
        op = problem.ops[graph.buffers[buffer].producer]
        assert not op.recomputable or graph.buffers[buffer].kept_to_end


def test_what_is_free_to_compute_is_not_saved(prepared):
    graph, problem = prepared.base.graph, prepared.base.problem
    everything = saved_buffers(prepared.base, problem.keep_all_schedule)
    free = {index for index, op in enumerate(graph.ops) if "gelu" in op.target
            or op.target.startswith("aten.erf")}
    leaner = without_free(graph, everything, free)
    assert leaner <= everything
    assert not any(graph.buffers[b].producer in free for b in leaner)


def test_what_a_kernel_keeps_to_itself_takes_no_memory_and_never_crosses(prepared):
    graph, problem = prepared.base.graph, prepared.base.problem
    assert [s.size_bytes for s in problem.storages] == [b.size_bytes for b in graph.buffers]
    fused = [index for index, buffer in enumerate(graph.buffers)
             if buffer.size_bytes == 0 and graph.ops[buffer.producer].digest]
    assert fused
    for buffer in fused:
        assert graph.ops[graph.buffers[buffer].producer].phase is Phase.BACKWARD
        assert not graph.buffers[buffer].kept_to_end


# --- Budgets --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_within_the_budget_or_the_smallest_that_works(prepared, default, tight):
    assert tight.peak_bytes <= tight.budget_bytes < default.peak_bytes
    assert tight.overhead >= default.overhead == 0.0
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        plan_within(prepared, prepared.resident_bytes, EFFORT)
    smallest = plan_within(prepared, refusal.value.minimum_bytes, EFFORT)
    assert smallest.peak_bytes <= refusal.value.minimum_bytes < tight.peak_bytes
    assert measured_peak(smallest.apply(make_model())) == (
        smallest.peak_bytes - smallest.resident_bytes)
    assert "activations" in str(refusal.value)


@pytest.mark.slow
def test_categories_account_for_every_byte(tight):
    assert sum(tight.memory.values()) == tight.peak_bytes


def test_a_saved_plan_is_the_same_plan(tight):
    again = loads(dumps(tight))
    assert again == tight
    assert again.spec.backend == "inductor"
    assert dumps(again) == dumps(tight)


def test_planning_changes_nothing_and_runs_no_kernel(default):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    peak = record_peak(lambda: planner.plan(
        model, batch(), loss_fn=loss_of, backend="inductor", time_limit=4.0, probe=False),
                       "cpu").peak_bytes
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert peak < (default.peak_bytes - default.resident_bytes) / 4


# --- Steps for real -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_compiled_step_takes_what_was_predicted_and_its_gradients_are_right(tight):
    model = make_model()
    applied = tight.apply(model)
    assert applied.state_dict().keys() == model.state_dict().keys()
    assert measured_peak(applied) == tight.peak_bytes - tight.resident_bytes
    # In a later micro-batch the gradients from before are resident, and new ones are made beside
    # them until the backward returns.
    step(applied)
    assert record_peak(lambda: loss_of(applied(INPUT)).backward(), "cpu").peak_bytes <= (
        tight.peak_bytes - tight.resident_bytes)
    # Finite differences along the gradient, with the dropout masks of one seed.
    step(applied)
    slope = gradient(applied)
    direction = slope / slope.norm()
    parameters = list(model.parameters())
    losses = []
    with torch.no_grad():
        starts = [p.clone() for p in parameters]
    for sign in (1, -1):
        offset, begin = 2e-2 * sign, 0
        with torch.no_grad():
            for p, start in zip(parameters, starts, strict=True):
                part = direction[begin:begin + p.numel()].view_as(p)
                p.copy_(start + offset * part.to(p.dtype))
                begin += p.numel()
        losses.append(step(applied).double())
    found = float((losses[0] - losses[1]) / 4e-2)
    assert found == pytest.approx(float(slope.norm()), rel=2e-2)


@pytest.mark.slow
def test_with_the_random_numbers_of_eager_the_gradients_are_those_of_eager():
    model = make_model()
    with inductor_config.patch(fallback_random=True):
        prepared = capture(model, batch(), loss_fn=loss_of, backend="inductor")
        plan = plan_within(prepared, budget_at(prepared, plan_within(prepared, None, EFFORT), 0.8),
                           EFFORT)
        applied = plan.apply(model)
        for seed in (3, 4):
            loss = step(applied, seed)
            mine, state = gradient(applied), torch.get_rng_state()
            expected = step(model, seed)
            reference = gradient(model)
            assert float((mine - reference).norm() / reference.norm()) <= 1e-5
            assert float(loss) == pytest.approx(float(expected), rel=1e-5)
            assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
def test_in_half_precision_emulated_casts_keep_recomputed_values_identical():
    found = {}
    for emulated in (False, True):
        with inductor_config.patch(emulate_precision_casts=emulated):
            model, x = make_model(dropout=0.0, layers=2).bfloat16(), batch().bfloat16()
            prepared = capture(model, x, loss_fn=loss_of, backend="inductor")
            default = plan_within(prepared, None, EFFORT)
            # How near a budget can come depends on what matrix products in bfloat16 take for
            # themselves, and that on the number of threads.
            tight = smallest_plan(prepared, EFFORT)
            assert any(region.insertions for region in tight.spec.regions)
            gradients = []
            for plan in (default, tight):
                model.zero_grad(set_to_none=True)
                loss_of(plan.apply(model)(x)).backward()
                gradients.append(gradient(model))
            found[emulated] = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    assert found[True] == 0.0
    assert found[False] <= 2 ** -8  # one rounding of bfloat16


@pytest.mark.slow
def test_verify_compares_a_compiled_step_without_dropout():
    model = make_model(dropout=0.0)
    plan = planner.plan(model, batch(), loss_fn=loss_of, backend="inductor", time_limit=4.0)
    found = planner.verify(model, plan, batch(), loss_fn=loss_of)
    assert found.ok
    assert found.peak_bytes == found.predicted_peak_bytes


@pytest.mark.slow
def test_several_regions_take_what_was_predicted_and_what_compiled_them_holds_no_activation():
    class Broken(nn.Module):  # code of its own: what torch does depends on what it has compiled
        def __init__(self):
            super().__init__()
            self.first, self.second = make_model(layers=1), make_model(layers=1)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    case = Case(Broken(), (batch(),), loss_of)
    plan = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, backend="inductor")
    assert len(plan.spec.regions) == 2
    model = plan.apply(case.model)
    # The first call compiles, and what that left behind would count here.
    assert training.measured_peak(model, case) == (
        plan.forward_backward_peak_bytes - plan.resident_bytes)


# --- Refusals -------------------------------------------------------------------------------------


def test_another_model_is_refused_before_anything_is_compiled(tight):
    class Changed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).relu()

    changed = Changed(*make_model())
    with pytest.raises(planner.PlanMismatch, match="first difference"):
        tight.apply(changed)(batch())


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    from planner._graph_capture.torch_compat import inductor

    monkeypatch.setattr(inductor, "missing_compiler", lambda device: "no g++ here")
    with pytest.raises(planner.CaptureError, match="apt-get install g"):
        planner.plan(make_model(), batch(), loss_fn=loss_of, backend="inductor")


def test_caches_tell_plans_apart_and_know_them_again(default, tight):
    from planner._apply.inductor import uuid_of
    from planner._graph_capture.torch_compat.inductor import JointPartitioner

    assert uuid_of(default.spec) != uuid_of(tight.spec)
    assert uuid_of(loads(dumps(tight)).spec) == uuid_of(tight.spec)
    assert uuid_of(replace(tight.spec, training=False)) != uuid_of(tight.spec)
    pickled = pickle.dumps(JointPartitioner(lambda *_: None, uuid_of(tight.spec)))
    assert pickle.loads(pickled).uuid() == uuid_of(tight.spec)
