"""Steps whose caller lets the model's output go: predicted, measured, and warned of where it does
not."""

import copy
import json

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.plain_step.loss import objective
from tests.support.command_line import TINY_GPT2, run
from tests.support.models import BUILDERS, Case, causal_model
from tests.support.training import buffers_restored

BUILT = {"graph_break": {"layers": 1}, "many_outputs": {}}


class Classifier(nn.Module):
    """Its output is large, and needed by its own backward and by that of a squared error."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 512)

    def forward(self, x):
        return torch.tanh(self.last(torch.tanh(self.first(x)))), x.exp()


def squared(output):
    return (output[0] - 1).square().mean()


def summed(output):
    return output[0].sum() + output[1].sum()


def classifier(loss_fn):
    torch.manual_seed(0)
    return Case(Classifier(), (torch.randn(64, 32),), loss_fn)


def build(name):
    if name in ("squared", "summed"):
        return classifier({"squared": squared, "summed": summed}[name])
    return causal_model(vocab=1024) if name == "causal" else BUILDERS[name](**BUILT[name])


def measured(model, case, output):
    """Peak of a real step above what is there before it, with the output held or dropped."""

    def step():
        out = model(*case.args, **case.kwargs)
        goal = objective(out, case.loss_fn)
        if output == "dropped":
            del out
        goal.backward()

    with buffers_restored(case.model):
        step()
        case.model.zero_grad(set_to_none=True)
        return record_peak(step, "cpu").peak_bytes


@pytest.mark.parametrize("name", ["squared", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("summed", *BUILT))])
def test_the_peak_is_exact_whether_the_output_is_held_or_not(name):
    case = build(name)
    peaks, plain = {}, {}
    for output in ("held", "dropped"):
        free = planner.plan(
            case.model, case.inputs, loss_fn=case.loss_fn, hold_output=output == "held"
        )
        tight = planner.plan(
            case.model,
            case.inputs,
            loss_fn=case.loss_fn,
            hold_output=output == "held",
            budget=smallest(case, output),
            time_limit=1,
        )
        for plan in (free, tight):
            net = plan.peak_bytes - plan.resident_bytes
            assert measured(plan.apply(case.model), case, output) == net
        assert planner.verify(case.model, tight, case.inputs, loss_fn=case.loss_fn).ok
        peaks[output] = tight.peak_bytes
        plain[output] = free.baseline_peak_bytes - free.resident_bytes
        assert measured(case.model, case, output) == pytest.approx(plain[output], rel=0.005)
    assert peaks["dropped"] <= peaks["held"] and plain["dropped"] <= plain["held"]


def smallest(case, output):
    try:
        planner.plan(
            case.model,
            case.inputs,
            loss_fn=case.loss_fn,
            hold_output=output == "held",
            budget=1,
            time_limit=1,
        )
    except planner.InfeasibleBudget as refusal:
        return refusal.minimum_bytes
    raise AssertionError("one byte is too little")


def test_who_holds_the_output_all_the_same_is_warned_once():
    case = classifier(summed)
    plan = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, hold_output=False,
                        solver="none")
    applied = plan.apply(case.model)
    with buffers_restored(case.model):
        case.loss_fn(applied(*case.args)).backward()  # nobody holds it
        output = applied(*case.args)
        loss = case.loss_fn(output)
        # The first tensor is saved by the model's own backward, whoever holds it.
        with pytest.warns(UserWarning, match=r"let go before the backward.*and 8,192 bytes"):
            loss.backward()
        loss = case.loss_fn(output := applied(*case.args))
        loss.backward()  # warnings are errors here
    assert planner.steps_of(applied).planned == 3 and output is not None


def test_the_plan_says_what_it_counts_on(tmp_path):
    case = classifier(summed)
    arguments = {"loss_fn": case.loss_fn, "optimizer": "sgd"}
    held, dropped = (
        planner.plan(case.model, case.inputs, hold_output=output == "held", **arguments)
        for output in ("held", "dropped")
    )
    assert held.spec.holds_output and not dropped.spec.holds_output
    dropped.save(tmp_path / "plan.json")
    assert planner.load(tmp_path / "plan.json") == dropped
    assert planner.memory(case.model, case.inputs, plan=dropped, hold_output="backward",
                          **arguments).peak_bytes == dropped.peak_bytes < held.peak_bytes
    with pytest.raises(TypeError, match=r"hold_output must be True .* or False"):
        planner.plan(case.model, case.inputs, hold_output="lost")
    with pytest.raises(TypeError, match='write hold_output=False in place of output="dropped"'):
        planner.plan(case.model, case.inputs, output="dropped")
    memory = planner.memory(case.model, case.inputs, loss_fn=case.loss_fn, hold_output=False)
    assert memory.peak_bytes == dropped.baseline_peak_bytes


@pytest.mark.slow
def test_a_plan_by_blocks_says_it_where_no_region_lets_go_of_it():
    case = causal_model(vocab=1024, dropout=0.1)
    plan = planner.plan(case.model, case.inputs, regions="blocks", hold_output=False, budget="85%",
                        time_limit=1)
    assert not plan.spec.holds_output
    assert planner.verify(case.model, plan, case.inputs).peak_bytes == plan.peak_bytes
    assert planner.memory(case.model, case.inputs, plan=plan,
                          hold_output="backward").peak_bytes == plan.peak_bytes
    assert measured(plan.apply(case.model), case, "dropped") == (
        plan.peak_bytes - plan.resident_bytes)


@pytest.mark.slow
def test_the_command_line_takes_it():
    peaks = [json.loads(run("plan", *TINY_GPT2, *options, "--json").stdout)["predicted"][
        "peak_bytes"] for options in ([], ["--drop-output"])]
    assert peaks[1] < peaks[0]


@pytest.mark.slow
def test_a_compiled_step_counts_it_too():
    case = BUILDERS["language_model"](layers=1)
    plans = [
        planner.plan(
            case.model,
            case.inputs,
            loss_fn=case.loss_fn,
            hold_output=output == "held",
            backend="inductor",
            time_limit=3,
        )
        for output in ("held", "dropped")
    ]
    assert plans[1].peak_bytes <= plans[0].peak_bytes
    for plan in plans:
        assert planner.verify(case.model, plan, case.inputs, loss_fn=case.loss_fn).peak_bytes == (
            plan.peak_bytes)


def train(model, case, output, steps=4):
    """Peaks of training steps above what is there before the first, with nothing but the gradients
    left between them."""
    peaks = []

    def step():
        out = model(*case.args, **case.kwargs)
        loss = case.loss_fn(out) if case.loss_fn else out.loss
        if output == "dropped":
            del out
        loss.backward()

    for _ in range(steps):
        case.model.zero_grad(set_to_none=True)
        peaks.append(record_peak(step, "cpu").peak_bytes)
        torch.optim.SGD(case.model.parameters(), lr=1e-3).step()
    case.model.zero_grad(set_to_none=True)
    return peaks


@pytest.mark.parametrize("name", ["causal", "squared"])
@pytest.mark.slow
def test_within_sees_what_happens_to_the_output(name):
    case = build(name)
    plans = {}
    for output in ("held", "dropped"):
        model = planner.within(case.model, "1GB", time_limit=2)
        peaks = train(model, case, output)
        plan = plans[output] = planner.plan_of(model)
        assert plan.spec.holds_output == (output == "held")
        loss = model.forward.running.loss  # what of it the caller holds counts as resident, too
        resident = plan.resident_bytes - (0 if loss is None else loss.held_bytes)
        assert {resident + peak for peak in peaks[2:]} == {plan.peak_bytes}
    assert plans["dropped"].baseline_peak_bytes < plans["held"].baseline_peak_bytes


class TwoHeads(nn.Module):
    """The second head is in no loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(layer for _ in range(3) for layer in (
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))))
        self.first, self.second = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.first(hidden), self.second(hidden).tanh()


@pytest.mark.parametrize(("backend", "sizes"), [
    ("eager", (64, 64, 64)), ("eager", (64, 48, 32, 80)),
    pytest.param("inductor", (64, 48, 32, 80), marks=pytest.mark.slow)])
def test_parameters_that_the_loss_does_not_reach_get_no_gradient(backend, sizes):
    """Weight decay and momentum change a parameter whose gradient is zero, but not one without."""
    plain, net = TwoHeads(), planner.within(TwoHeads(), "90%", backend=backend, time_limit=1)
    optimizers = [torch.optim.AdamW(each.parameters(), weight_decay=0.1) for each in (plain, net)]
    before = plain.second.weight.detach().clone()
    for size in sizes:
        x = torch.randn(size, 32)
        for each, opt in zip((plain, net), optimizers, strict=True):
            each(x)[0].square().mean().backward()
            assert each.second.weight.grad is each.second.bias.grad is None
            opt.step()
            opt.zero_grad()
    assert torch.equal(net.second.weight, before)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_applied_plan_gives_parameters_that_the_loss_does_not_reach_no_gradient():
    net, x = TwoHeads(), torch.randn(64, 32)
    applied = planner.plan(net, (x,), loss_fn=lambda out: out[0].sum() + out[1].sum()).apply(net)
    applied(x)[0].sum().backward()
    assert net.first.weight.grad is not None
    assert net.second.weight.grad is net.second.bias.grad is None


@pytest.mark.slow
def test_a_cache_that_the_planned_step_does_not_make_is_missed_aloud():
    """A call without its prefix would go on, with another loss."""
    transformers = pytest.importorskip("transformers")
    prefix, ids = torch.randint(128, (2, 2, 24), generator=torch.Generator().manual_seed(0))
    prefix = prefix[:, :16]

    def make():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=128, attn_pdrop=0.0, resid_pdrop=0.0,
            embd_pdrop=0.0))

    def loss(model, **kwargs):
        cache = model(prefix, **kwargs).past_key_values
        return model(ids, labels=ids, past_key_values=cache).loss

    net, plain = planner.within(make(), "1GB"), make()
    with pytest.raises(AttributeError, match="call the model with use_cache=True"):
        loss(net)
    found, expected = loss(net, use_cache=True), loss(plain)
    assert torch.equal(found, expected)
    found.backward(), expected.backward()
    with torch.no_grad():
        cache = plain(prefix).past_key_values
    given, own = (each(ids, labels=ids, past_key_values=copy.deepcopy(cache)).loss
                  for each in (net, plain))
    assert torch.equal(given, own)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
