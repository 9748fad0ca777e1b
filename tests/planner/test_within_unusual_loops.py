"""Loops that hold or raise what others do not: each goes on as the plain one, or says why not."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import planner
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.plain_step.observed_loss import StepWatch
from planner.attached import measuring
from tests.support.stages import record_stages
from tests.support.training import assert_same_gradients

Batch = Callable[[torch.Tensor], torch.Tensor]


def layers(count: int = 3, width: int = 32) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                         nn.Linear(4 * width, width)) for _ in range(count)))


class Tokens(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32, sparse=sparse)
        self.body = layers(2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(ids))


@pytest.mark.parametrize("view", [
    lambda ids: ids[:, :-1],
    lambda ids: ids[:1].expand(8, -1),
    lambda ids: ids[:, ::2],
    lambda ids: ids[2:, 1:].T,
], ids=["shifted", "expanded", "every_second", "transposed"])
def test_integer_inputs_that_are_views(view: Batch):
    plain = Tokens()
    net = planner.within(copy.deepcopy(plain), "1MB", time_limit=1)
    ids = torch.randint(64, (8, 9))
    for each in (plain, net):
        each(view(ids)).square().mean().backward()
    assert_same_gradients(net, plain)
    assert planner.status(net).planned_steps == 1


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fails = layers(2), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("of the model")
        return self.body(x)


def test_what_the_model_raises_reaches_the_caller():
    net = planner.within(Fails(), "1MB", time_limit=1)
    for fails in (True, False, True, False):
        net.fails = fails
        if fails:
            with pytest.raises(ValueError, match="of the model"):
                net(torch.randn(8, 32))
        else:
            net(torch.randn(8, 32)).sum().backward()
    assert planner.status(net).calls == 2


class Perturbed(torch.optim.Optimizer):
    """Sharpness-aware minimization: it evaluates the model at another place, by a closure."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        for each in parameters:
            self.state[each]["before"] = each.clone()
            each += 0.01 * each.grad
        with torch.enable_grad():
            closure()
        for each in parameters:
            each.copy_(self.state[each]["before"] - 0.1 * each.grad)


def test_an_optimizer_that_evaluates_the_model_again_is_counted_to_the_byte():
    plain = layers()
    net = copy.deepcopy(plain)
    own = sum(each.nbytes for each in plain.parameters())

    def steps_of(model: nn.Module) -> Callable[[], None]:
        optimizer = Perturbed(model.parameters())

        def step() -> None:
            x = torch.randn(64, 32)

            def evaluate() -> None:
                optimizer.zero_grad()
                model(x).square().mean().backward()

            evaluate()
            optimizer.step(evaluate)

        return step

    torch.manual_seed(0)
    record_stages([steps_of(plain)] * 3)
    planner.within(net, "80%", time_limit=1)
    torch.manual_seed(0)
    *_, last = record_stages([steps_of(net)] * 3)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    plan = planner.plan_of(net)
    assert plan.optimizer.state_bytes == pytest.approx(own, abs=128)
    assert planner.status(net).steps == 3
    assert own + last.peak_bytes == pytest.approx(plan.peak_bytes, rel=1e-3)


@pytest.mark.slow
def test_gradients_that_frozen_layers_have_kept_count():
    net = planner.within(layers(4), "90%", time_limit=1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step() -> None:
        loss = net(torch.randn(64, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(2):
        step()
    net[0].requires_grad_(False)  # its gradients stay
    optimizer = torch.optim.SGD(net[1:].parameters(), 0.1)
    for _ in range(2):
        step()
    (record,) = record_stages([step])
    held = sum(each.nbytes for p in net.parameters() for each in (p, p.grad) if each is not None)
    assert held + record.peak_bytes <= planner.status(net).budget_bytes


def test_sparse_gradients_are_refused_and_the_modules_behind_them_planned():
    net = Tokens(sparse=True)
    ids = torch.randint(64, (8, 9))
    planner.within(net, "1MB", time_limit=1)
    with pytest.raises(planner.CaptureError, match=r"coordinate form.*within\(model\.body"):
        F.mse_loss(net(ids), torch.zeros(8, 9, 32)).backward()
    net = Tokens(sparse=True)
    planner.within(net.body, "1MB", time_limit=1)
    optimizers = (torch.optim.SparseAdam(net.embed.parameters()),
                  torch.optim.AdamW(net.body.parameters()))
    for _ in range(3):
        net.zero_grad()
        F.mse_loss(net(ids), torch.zeros(8, 9, 32)).backward()
        for each in optimizers:
            each.step()
    assert planner.status(net.body).planned_steps == 3


_lock = threading.Lock()


def _doubled(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class SetsUp(nn.Module):
    """Its first call registers hooks, as in transformers those that collect outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.is_set_up = layers(2), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set_up:
            with _lock:
                for each in self.body:
                    each.register_forward_hook(_doubled)
                self.is_set_up = True
        return self.body(x)


def test_a_model_may_set_itself_up_in_its_first_call():
    plain = SetsUp()
    net = planner.within(copy.deepcopy(plain), "1MB", time_limit=1)
    for _ in range(2):
        x = torch.randn(8, 32)
        for each in (plain, net):
            each.zero_grad()
            each(x).square().mean().backward()
        assert_same_gradients(net, plain)
    assert planner.status(net).planned_steps == 2


@pytest.mark.slow
def test_logits_of_a_model_that_makes_a_cache_may_have_a_loss_outside():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2)).train()
    net = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    ids = torch.randint(64, (4, 16))
    for _ in range(2):
        for each in (plain, net):
            each.zero_grad()
            F.cross_entropy(each(input_ids=ids).logits.flatten(0, 1), ids.flatten()).backward()
    assert_same_gradients(net, plain)


class MasksAfterBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)
        self.mask = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x) + x  # written over a view of the product
        torch._dynamo.graph_break()
        hidden[where] = self.mask
        return self.after(hidden).square().mean()


def test_what_a_region_returns_may_be_changed_behind_it():
    plain = MasksAfterBreak()
    net = planner.within(copy.deepcopy(plain), "1MB", time_limit=1)
    x, where = torch.randn(4, 32, 16), torch.rand(4, 32) > 0.5
    for each in (plain, net):
        each(x, where).backward()
    assert_same_gradients(net, plain)


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.body, self.drop, self.head = layers(3), nn.Dropout(0.2), nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.drop(self.body(self.embed(ids)))
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "hidden": hidden}


@pytest.mark.slow
@pytest.mark.parametrize("is_held", [True, False], ids=["batch held", "batch let go"])
def test_a_loss_of_more_than_the_loss_that_the_model_returns(caplog, is_held):
    """As in distillation."""
    plain = Labelled()
    net = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    peaks, plain_peak = [], 0

    def train(model: nn.Module, ids: torch.Tensor, seed: int) -> None:
        model.zero_grad()
        torch.manual_seed(seed)
        output = model(ids, ids) if is_held else model(batch := ids.clone(), batch)
        batch = None
        loss = output["loss"] + output["logits"].square().mean() + output["hidden"].abs().mean()
        del output
        if model is net:
            peaks.append(planner.plan_of(net).peak_bytes)
        loss.backward()

    for step in range(5):
        ids = torch.randint(64, (128,), generator=torch.Generator().manual_seed(step))
        plain_peak = record_peak(lambda ids=ids, step=step: train(plain, ids, step),
                                 "cpu").peak_bytes
        train(net, ids, step)
        assert_same_gradients(net, plain)
    status, plan = planner.status(net), planner.plan_of(net)
    assert status.planned_steps == 5 and peaks[-1] <= status.budget_bytes
    assert peaks[-1] == peaks[-2] == plan.peak_bytes
    assert peaks[-2] > peaks[0]
    parameters = sum(each.nbytes for each in net.parameters())
    assert plan.baseline_peak_bytes == pytest.approx(2 * parameters + plain_peak, rel=0.05)
    warning, = (each for each in caplog.records if each.levelname == "WARNING")
    assert "differentiates more of its outputs than its loss" in warning.getMessage()


class Augmented(nn.Module):
    """Masks its input at random by NumPy, drops layers at random by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = layers(4, 64), nn.Linear(64, 64)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            if torch.rand([]) < .3:
                continue
            x = x + layer(x)
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = np.zeros(64, dtype=bool)
        masked = int(20 * np.random.rand(1).item())
        mask[:masked] = True
        x[:, torch.tensor(mask)] = 0
        return self.encode(x).square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:To copy construct")  # torch's, of `torch.tensor(mask)`
def test_random_numbers_of_numpy_and_torch_in_one_forward():
    torch.manual_seed(0)
    plain = Augmented()
    net = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    for seed in range(3):
        left = []
        for each in (plain, net):
            torch.manual_seed(seed)
            np.random.seed(seed)
            each.zero_grad()
            loss = each(torch.randn(1024, 64))
            loss.backward()
            left.append((loss.item(), torch.rand(1).item(), np.random.rand()))
        assert left[0] == left[1]
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


def contrast(net: nn.Module, teacher: nn.Module, queue: torch.Tensor) -> torch.Tensor:
    """Momentum contrast: the target comes from a call without gradients."""
    keys = F.normalize(net(torch.randn(256, 32)), dim=1)
    with torch.no_grad():
        queue[:256] = F.normalize(net(torch.randn(256, 32)), dim=1)
    return F.cross_entropy(keys @ queue.T / 0.1, torch.arange(256))


def distillation(net: nn.Module, teacher: nn.Module, queue: torch.Tensor) -> torch.Tensor:
    x = torch.randn(256, 32)
    return F.mse_loss(net(x), teacher(x))


@pytest.mark.parametrize("loss_of", [
    contrast, pytest.param(distillation, marks=pytest.mark.slow)])
def test_a_loss_that_calls_a_planned_model_for_its_target(loss_of):
    net = planner.within(layers(4), "80%", time_limit=1)
    teacher, queue = copy.deepcopy(net).requires_grad_(False), torch.randn(1024, 32)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        loss = loss_of(net, teacher, queue)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    own = sum(each.nbytes for each in (*net.parameters(), *teacher.parameters(), queue))
    *_, last = record_stages([step] * 4)
    plan = planner.plan_of(net)
    assert plan.limited_bytes <= plan.budget_bytes
    assert own + last.peak_bytes == pytest.approx(plan.peak_bytes, rel=1e-3)


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def forward(self, x: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        return self.body(x) / temperature


def test_a_number_that_needs_a_gradient_may_be_an_argument():
    torch.manual_seed(0)
    plain, exponent = Tempered(), nn.Parameter(torch.tensor(0.5))
    net = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    x, found = torch.randn(64, 32), []
    for each in (plain, net, net):
        exponent.grad = None
        each.zero_grad()
        each(x, exponent.exp()).square().mean().backward()
        found.append([exponent.grad, *(parameter.grad for parameter in each.parameters())])
    for mine, again, theirs in zip(found[1], found[2], found[0], strict=True):
        assert torch.equal(mine, theirs) and torch.equal(again, theirs)
    assert planner.status(net).planned_steps == 2


class Scattered(nn.Module):
    """Writes rows into a padded tensor and returns a part of it, as `to_dense_batch` of
    torch_geometric."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = layers(), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(91, 32)
        padded[rows] = self.last(self.body(x))
        return padded[:90].view(3, 30, 32)


def test_a_view_of_a_tensor_that_was_written_into_may_be_returned():
    torch.manual_seed(0)
    model, x, rows = Scattered(), torch.randn(60, 32), torch.randperm(90)[:60]
    model(x, rows).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    plan = planner.plan(model, (x, rows), loss_fn=lambda out: out.square().mean(), budget="80%",
                        time_limit=1)
    assert planner.verify(model, plan, (x, rows), loss_fn=lambda out: out.square().mean()).ok
    planned = plan.apply(model)
    planned(x, rows).square().mean().backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(
        planned.parameters(), expected, strict=True))


@pytest.mark.slow
def test_training_that_is_resumed_has_its_optimizer_from_the_first_step_on():
    def run(budget: int | None) -> list[int]:
        torch.manual_seed(0)
        net, x = layers(6, 64), torch.randn(256, 64)
        optimizer = torch.optim.AdamW(net.parameters())

        def step(number: int) -> None:
            if number == 2 and budget is not None:
                planner.within(net, budget, time_limit=1)
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        records = record_stages([lambda number=number: step(number) for number in range(5)])
        resident = sum(p.numel() * p.element_size() for p in net.parameters())
        return [resident + record.peak_bytes for record in records]

    budget = int(0.66 * max(run(None)))
    assert max(run(budget)[2:]) <= budget


def reloaded(width: int) -> Reloads:
    return Reloads(width)


class Reloads(nn.Module):
    """A module that is pickled as keras' are: what is loaded has tensors of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.body = width, layers(3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def __reduce__(self) -> tuple[Callable[[int], Reloads], tuple[int]]:
        return reloaded, (self.width,)


def test_a_module_that_defines_how_it_is_pickled():
    torch.manual_seed(0)
    net, x = nn.Sequential(Reloads(32), nn.Linear(32, 4)), torch.randn(64, 32)
    net(x).square().mean().backward()
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    planner.within(net, "80%", time_limit=1)
    net(x).square().mean().backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(
        net.parameters(), expected, strict=True))
    assert planner.status(net).planned_steps == 1


@pytest.mark.slow
def test_the_optimizer_state_of_a_critic_that_is_frozen_meanwhile_counts():
    torch.manual_seed(0)
    actor, critic, x = layers(), layers(4, 64), torch.randn(512, 32)
    critic[0] = nn.Linear(32, 64)
    of_actor, of_critic = (torch.optim.Adam(each.parameters()) for each in (actor, critic))
    for each in (actor, critic):
        planner.within(each, "75%", time_limit=1)

    def train_critic() -> None:
        of_critic.zero_grad()
        critic(x).square().mean().backward()
        of_critic.step()

    def train_actor() -> None:
        critic.requires_grad_(False)
        of_actor.zero_grad()
        critic(actor(x).tanh()).mean().backward()
        of_actor.step()
        critic.requires_grad_(True)

    records = record_stages([train_critic, train_actor] * 5)
    resident = sum(p.nbytes for each in (actor, critic) for p in each.parameters()) + x.nbytes
    status = planner.status(critic)
    assert status.plan is not None and status.last_reason is None
    peak = resident + records[-1].peak_bytes
    assert 0.95 * status.plan.peak_bytes <= peak <= status.plan.peak_bytes <= status.budget_bytes


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers(6, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def test_a_budget_that_the_optimizer_does_not_leave_is_refused_in_the_first_step():
    torch.manual_seed(0)
    net, x = WithLoss(), torch.randn(64, 64)
    optimizer = torch.optim.AdamW(net.parameters())
    planner.within(net, "70%", time_limit=1)
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        net(x)
    assert "optimizer" in str(refusal.value) and not optimizer.state
    planner.within(net, refusal.value.minimum_bytes, time_limit=1)
    for _ in range(3):
        net(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    status = planner.status(net)
    assert status.plans == 1 and status.worst_peak_bytes <= refusal.value.minimum_bytes


class Halves(nn.Module):
    """A generator and a critic in one module, as Lightning's examples have them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 64))
        self.critic = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
        self.is_scaled = False

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        made = self.generator(noise)
        return self.critic(made) if self.is_scaled else made


def test_a_call_that_returns_nothing_to_differentiate_runs_as_written():
    model = planner.within(Halves(), "90%", time_limit=1)
    plain = Halves()
    plain.load_state_dict(model.state_dict())
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            noise = torch.randn(256, 16, generator=torch.Generator().manual_seed(step))
            each.critic.requires_grad_(False)
            each.critic(each(noise)).mean().backward()
            each.critic.requires_grad_(True)
            each.generator.requires_grad_(False)
            each.critic(each(noise)).mean().backward()
            each.generator.requires_grad_(True)
        assert_same_gradients(model, plain)
    assert planner.status(model).calls == 3
    model.is_scaled = True
    model.generator.requires_grad_(False)
    with pytest.warns(UserWarning, match="this call ran as it is written"):
        assert model(noise).requires_grad


def test_lazy_parameters_are_made_in_a_first_call_that_runs_as_written():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.LazyLinear(32), nn.GELU())
    model = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    with pytest.raises(planner.CaptureError, match="uninitialized parameters"):
        planner.plan(plain, torch.randn(64, 16))
    for step in range(3):
        for each in (plain, model):
            torch.manual_seed(step)
            x = torch.randn(64, 16)
            each.zero_grad()
            with (pytest.warns(UserWarning, match="lazy parameters") if each is model and not step
                  else contextlib.nullcontext()):
                each(x).square().mean().backward()
        assert_same_gradients(model, plain)
    assert planner.status(model).planned_steps


def test_a_backward_hook_logs_what_it_makes_of_what_a_forward_hook_has_kept():
    torch.manual_seed(0)
    plain = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(32, 32), nn.GELU())))
    model = copy.deepcopy(plain)
    kept: dict[nn.Module, torch.Tensor] = {}
    norms: dict[nn.Module, float] = {}

    def keep(module, inputs, output):
        kept[module] = inputs[0].detach()

    def measure(module, gradients, cotangents):
        norms[module] = (kept[module].T @ cotangents[0]).norm().item()

    for layer in (*plain, *model):
        layer.register_forward_hook(keep)
        layer.register_full_backward_hook(measure)
    planner.within(model, "200%", time_limit=1)
    for _ in range(3):
        x = torch.randn(64, 32, requires_grad=True)
        for each in (plain, model):
            each.zero_grad()
            each(x).square().mean().backward()
        assert_same_gradients(model, plain)
        assert [norms[layer] for layer in model] == [norms[layer] for layer in plain]
        assert kept.keys() == norms.keys() == {*plain, *model}  # no copies of planning's
        kept.clear()
        norms.clear()


def test_calls_in_a_hook_of_a_backward_serve_any_size():
    """As in losses whose second forward runs once the gradients of the first are known."""
    plain = Tokens()
    net = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    optimizers = {each: torch.optim.SGD(each.parameters(), 0.01) for each in (plain, net)}

    def step(each: nn.Module, length: int) -> None:
        ids = torch.randint(64, (8, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            known = each(ids)
        known.requires_grad_()
        loss = known.square().mean()

        def again(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                each(ids).backward(gradient)

        known.register_hook(again)
        loss.backward()
        optimizers[each].step()
        optimizers[each].zero_grad()

    for length in (9, 8, 12, 7, 10, 11):
        for each in (plain, net):
            step(each, length)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    before = planner.status(net).plans
    for length in (6, 5, 4):
        step(net, length)
    status = planner.status(net)
    assert status.plans == before <= 6
    assert status.planned_steps == status.steps


@pytest.mark.parametrize("compiled", [
    lambda model: torch.compile(model, backend="eager"),
    lambda model: (model.compile(backend="eager"), model)[1]], ids=["wrapped", "in place"])
def test_a_compiled_model_is_told_that_its_code_is_not_used(compiled, caplog):
    planner.within(compiled(nn.Sequential(nn.Linear(4, 4))), "50%")
    assert 'backend="inductor" compiles the planned step' in caplog.text


@pytest.mark.filterwarnings("ignore:.*differentiated again")
def test_calls_that_run_as_written_are_not_watched_for_ever(monkeypatch):
    # Meta learning: each gradient of the inner step is differentiated again.
    watched = []
    monkeypatch.setattr(measuring, "StepWatch", lambda *args, **kwargs: watched.append(1) or
                        StepWatch(*args, **kwargs))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    planner.within(net, "90%", time_limit=1)
    for _ in range(12):
        named = dict(net.named_parameters())
        loss = functional_call(net, named, (torch.randn(64, 32),)).square().mean()
        gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        inner = {name: value - 0.1 * gradient for (name, value), gradient
                 in zip(named.items(), gradients, strict=True)}
        functional_call(net, inner, (torch.randn(64, 32),)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert planner.status(net).planned_steps == 0
    assert len(watched) < 8


def test_an_optimizer_that_is_made_for_each_task_makes_no_plan_of_its_own():
    """As in first-order meta-learning: the outer optimizer steps with gradients of inner ones."""
    def train(net: nn.Module) -> Iterator[int]:
        outer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for seed in range(6):
            torch.manual_seed(seed)
            before = copy.deepcopy(net.state_dict())
            for _ in range(2):
                inner = torch.optim.SGD(net.parameters(), lr=0.01)
                for _ in range(2):
                    inner.zero_grad()
                    net(torch.randn(128, 32)).square().mean().backward()
                    inner.step()
            net.load_state_dict(before)
            outer.step()
            outer.zero_grad()
            yield 0 if net is plain else planner.status(net).plans

    plain = layers()
    net = planner.within(copy.deepcopy(plain), "85%", time_limit=1)
    list(train(plain))
    plans = list(train(net))
    assert plans[1] == plans[-1]
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class WithPositions(nn.Module):
    """Reads a slice of a table that is larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = layers()
        self.register_buffer("positions", torch.randn(2 ** 15, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x + self.positions[:x.shape[1], :32])


def test_planning_takes_no_copy_of_a_large_buffer():
    net = planner.within(WithPositions(), "9MB", time_limit=1)
    own = sum(each.nbytes for each in (*net.parameters(), *net.buffers()))
    assert own > 8_000_000
    batch = torch.randn(4, 32, 32)
    records = record_stages([lambda: net(batch).square().mean().backward()] * 2)
    assert max(record.peak_bytes for record in records) + own + batch.nbytes < 9_000_000


def test_a_rollout_beyond_the_budget_is_said_once(caplog):
    net = planner.within(layers(6), "85%", time_limit=1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    own, small, large = sum(each.nbytes for each in net.parameters()), [], []

    def step() -> None:
        with torch.no_grad():
            (record,) = record_stages([lambda: net(torch.zeros(2048, 32))])
        large.append(record.peak_bytes + own)
        net(torch.ones(256, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        small.append(planner.status(net).budget_bytes)

    for _ in range(4):
        step()
    assert large[1] > small[1]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert "a call without gradients took" in said[0]
    assert planner.status(net).worst_peak_bytes == large[1]


def test_objects_of_the_profiler_and_storages_in_a_watched_step():
    net = planner.within(layers(), "1GB", time_limit=1)
    loss = net(torch.ones(64, 32)).square().mean()
    ops = torch.ops.profiler
    begun = ops._record_function_enter_new("named by the loop", None)
    for _ in range(2):  # it cannot be compared with itself
        ops._record_function_exit._RecordFunction(begun)
    copied = copy.deepcopy(torch.zeros(2 ** 18))
    loss.backward()
    assert copied.sum() == 0
    assert planner.status(net).planned_steps == 1


def test_a_watch_keeps_no_storage_alive():
    watch = StepWatch(torch.device("cpu"), [])
    assert watch.begin()
    copied = copy.deepcopy(torch.zeros(2 ** 18))
    copied_bytes = watch.live_bytes
    del copied
    left_bytes = watch.live_bytes
    watch.end()
    assert (copied_bytes, left_bytes) == (4 * 2 ** 18, 0)
