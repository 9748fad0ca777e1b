"""`planner.within` in plain loops: the same losses, and every step within the budget."""

from __future__ import annotations

import copy
import logging
import pickle
import random
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.attached.forward import PlanningForward
from tests.support.models import LanguageModel, gpt2
from tests.support.stages import record_stages

VOCAB = 256
Optimizers = Callable[[Any], torch.optim.Optimizer]


def model(layers: int = 2, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(layers, 64, VOCAB, **options)


def batch(size: int = 16, seq: int = 32, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (size, seq), generator=generator)
    return ids, ids.roll(-1, 1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(net: nn.Module, batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
          optimizer: Optimizers = adamw, *, accumulation: int = 1,
          autocast: torch.dtype | None = None) -> tuple[list[float], list[int]]:
    """A plain loop: the losses, and the peak of each step, parameters and inputs included."""
    torch.manual_seed(7)
    losses: list[float] = []
    opt = optimizer(net.parameters())

    def step(number: int, ids: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            logits = net(ids)
            loss = cross_entropy(logits, labels)
        loss.backward()
        if (number + 1) % accumulation == 0:
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())

    records = record_stages([lambda number=number, pair=pair: step(number, *pair)
                             for number, pair in enumerate(batches)])
    resident = sum(p.numel() * p.element_size() for p in net.parameters())
    return losses, [resident + ids.numel() * ids.element_size() + record.peak_bytes
                    for (ids, _), record in zip(batches, records, strict=True)]


def plans_of(net: nn.Module) -> PlanningForward:
    standing = vars(net)["forward"]
    assert isinstance(standing, PlanningForward)
    return standing


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "planner"]


def budget_of(plain_peaks: Sequence[int], share: float = 0.7) -> int:
    return int(share * max(plain_peaks))


def test_every_step_is_within_the_budget_and_the_losses_are_the_same(caplog):
    batches = [batch(seed=seed) for seed in range(4)]
    losses, peaks = train(model(dropout=0.1), batches)
    budget = budget_of(peaks)
    with caplog.at_level(logging.INFO, "planner"):
        net = planner.within(model(dropout=0.1), budget, time_limit=2)
        assert planner.plan_of(net) is None
        found, measured = train(net, batches)
    assert found == losses
    assert max(measured) <= budget < peaks[0]
    plan = planner.plan_of(net)
    assert plan.peak_bytes == measured[-1] == measured[-2]
    assert plan.budget_bytes == budget
    assert abs(plan.baseline_peak_bytes - peaks[-1]) < 64
    assert len(_said(caplog)) == 2


def test_a_percentage_is_of_the_plain_step():
    batches = [batch(seed=seed) for seed in range(3)]
    _, peaks = train(model(), batches)
    net = planner.within(model(), "75%", time_limit=2)
    _, measured = train(net, batches)
    assert max(measured) <= 0.75 * peaks[-1] + 64
    assert planner.plan_of(net).peak_bytes == measured[-1]


def test_what_is_given_is_counted_from_the_first_step_on():
    ids, labels = batch()
    net = planner.within(model(), "70%", optimizer="adamw", time_limit=2,
                         loss_fn=lambda logits: cross_entropy(logits, labels))
    _, measured = train(net, [(ids, labels)] * 3)
    assert max(measured) == planner.plan_of(net).peak_bytes
    assert len(plans_of(net).graphs) == 1


@pytest.mark.slow
def test_the_loss_of_the_model_itself():
    case = gpt2(layers=1, batch=8)
    plain, net = copy.deepcopy(case.model), planner.within(case.model, "75%", time_limit=1)

    def run(module: nn.Module) -> tuple[list[float], list[int]]:
        torch.manual_seed(3)
        losses: list[float] = []
        opt = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

        def step() -> None:
            loss = module(**case.kwargs).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())

        return losses, [record.peak_bytes for record in record_stages([step] * 3)]

    losses, peaks = run(plain)
    found, measured = run(net)
    assert found == losses
    plan = planner.plan_of(net)
    assert plan.optimizer.name == "SGD"
    assert max(measured) < 0.8 * max(peaks)
    resident = sum(p.numel() * 4 for p in {id(p): p for p in net.parameters()}.values())
    assert max(measured) + resident <= plan.budget_bytes


@pytest.mark.parametrize("given", [
    {}, pytest.param({"accumulation": 3}, marks=pytest.mark.slow)])
def test_gradients_of_earlier_micro_steps_count(given):
    batches = [batch(seed=seed) for seed in range(6)]
    losses, peaks = train(model(), batches, accumulation=3)
    budget = budget_of(peaks, 0.75)
    net = planner.within(model(), budget, time_limit=2, **given)
    found, measured = train(net, batches, accumulation=3)
    assert found == losses
    assert max(measured) <= budget
    assert plans_of(net).graphs[0].known.accumulates
    plan = planner.plan_of(net)
    # Batches of watched steps count, as the loop keeps them; the load decides how many these are.
    kept_bytes = plan.memory.inputs - batches[0][0].nbytes
    assert abs(plan.baseline_peak_bytes - kept_bytes - max(peaks)) < 64


@pytest.mark.slow
def test_a_stream_of_shapes_is_planned_only_where_it_grows():
    rng = random.Random(0)
    batches = [batch(rng.randint(1, 12), 8 * rng.randint(1, 4), seed) for seed in range(20)]
    losses, peaks = train(model(1), batches)
    budget = budget_of(peaks, 0.8)
    net = planner.within(model(1), budget, time_limit=1)
    found, measured = train(net, batches)
    assert found == losses
    assert max(measured) <= budget
    standing = plans_of(net)
    assert standing.steps.planned == 20
    assert len(standing.graphs) <= 8


@pytest.mark.slow
def test_a_layer_frozen_later_is_another_graph():
    batches = [batch(seed=seed) for seed in range(3)]

    def run(net: nn.Module) -> list[float]:
        first, _ = train(net, batches)
        for parameter in net.blocks[0].parameters():
            parameter.requires_grad_(False)
        second, _ = train(net, batches)
        return first + second

    net = planner.within(model(), "80%", time_limit=1)
    assert run(net) == run(model())
    assert len(plans_of(net).graphs) == 2


@pytest.mark.slow
def test_refusing_says_why():
    net = planner.within(model(), "80%", on_new="refuse", time_limit=1)
    train(net, [batch(8)] * 2)
    train(net, [batch(4)])
    with pytest.raises(planner.PlanMismatch, match=r"`ids` is int64\[32, .*int64\[8, 32\]"):
        train(net, [batch(32)])
    next(net.parameters()).requires_grad_(False)
    with pytest.raises(planner.PlanMismatch, match=r"`embedding\.weight` is frozen"):
        train(net, [batch(8)])


@pytest.mark.slow
def test_a_saved_plan_is_taken_where_it_fits(tmp_path, caplog):
    batches = [batch(seed=seed) for seed in range(3)]
    first = planner.within(model(), "75%", time_limit=1)
    losses, _ = train(first, batches)
    planner.plan_of(first).save(tmp_path / "plan.json")
    with caplog.at_level(logging.INFO, "planner"):
        net = planner.within(model(), "75%", plan=tmp_path / "plan.json", time_limit=1)
        found, measured = train(net, batches)
        assert found == losses
        assert planner.plan_of(net) == planner.plan_of(first)
        assert max(measured) <= planner.plan_of(net).peak_bytes
        assert not _said(caplog)
        train(net, [batch(20)] * 2)
    assert "does not fit" in _said(caplog)[0]
    assert len(plans_of(net).graphs) == 2


def test_what_is_no_training_step_runs_as_it_is_written():
    net = planner.within(model(dropout=0.1), "80%", time_limit=1)
    ids, labels = batch()
    with torch.no_grad():
        net.eval()(ids)
    assert planner.plan_of(net) is None
    assert plans_of(net).steps.planned == 0
    net.train()
    train(net, [(ids, labels)] * 2)
    net.eval()
    with torch.no_grad():
        expected = model(dropout=0.1).eval()
        expected.load_state_dict(net.state_dict())
        assert torch.equal(net(ids), expected(ids))
    assert plans_of(net).steps.planned == 2


@pytest.mark.slow
def test_called_again_it_replaces_and_none_is_no_limit():
    net = planner.within(model(), "80%", time_limit=1)
    train(net, [batch()] * 2)
    assert planner.within(net, None) is net
    assert planner.plan_of(net) is None
    train(net, [batch()] * 2)
    assert planner.plan_of(net).recompute_flops == 0


@pytest.mark.slow
def test_an_impossible_budget_names_the_smallest():
    net = planner.within(model(), 10_000, time_limit=1)
    with pytest.raises(planner.InfeasibleBudget) as caught:
        train(net, [batch()])
    assert caught.value.minimum_bytes > 10_000


def test_under_autocast():
    batches = [batch(seed=seed) for seed in range(3)]
    _, peaks = train(model(), batches, autocast=torch.bfloat16)
    budget = budget_of(peaks, 0.8)
    net = planner.within(model(), budget, time_limit=2)
    losses, measured = train(net, batches, autocast=torch.bfloat16)
    plain, _ = train(model(), batches, autocast=torch.bfloat16)
    assert losses == pytest.approx(plain, rel=1e-2)
    assert max(measured) <= budget


@pytest.mark.slow
def test_a_copy_plans_for_itself():
    net = planner.within(model(), "80%", time_limit=1)
    train(net, [batch()] * 2)
    other = copy.deepcopy(net)
    assert planner.plan_of(other) is None
    before = plans_of(net).steps.planned
    train(other, [batch()] * 2)
    assert planner.plan_of(other) is not None
    assert plans_of(net).steps.planned == before


@pytest.mark.slow
def test_in_data_parallel_of_one_process():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1,
                                         store=torch.distributed.HashStore())
    try:
        batches = [batch(seed=seed) for seed in range(2)]
        plain, _ = train(nn.parallel.DistributedDataParallel(model(1)), batches)
        net = nn.parallel.DistributedDataParallel(model(1))
        assert planner.within(net, "80%", time_limit=1) is net
        found, _ = train(net, batches)
        assert found == plain
        assert planner.plan_of(net).recompute_flops > 0
        assert plans_of(net.module).steps.planned == 2
    finally:
        torch.distributed.destroy_process_group()


class Steered(nn.Module):
    """A model whose code looks at values: to log one, and to choose a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model(dropout=0.1)
        self.log: list[float] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.body(ids)
        self.log.append(x.max().item())
        return x * 2 if x.square().sum() > 0 else x


@pytest.mark.slow
def test_code_that_asks_for_values_is_planned_in_pieces():
    batches = [batch(seed=seed) for seed in range(3)]
    losses, peaks = train(Steered(), batches)
    budget = budget_of(peaks, 0.8)
    net = planner.within(Steered(), budget, time_limit=1)
    found, measured = train(net, batches)
    assert found == losses
    assert max(measured) <= budget
    assert plans_of(net).steps.planned == 3
    assert len(planner.plan_of(net).spec.regions) == 2


class Branching(nn.Module):
    """Takes another branch, and draws random numbers in it, where the first token is even."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = model(1, dropout=0.1), nn.Linear(VOCAB, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.body(ids)
        if ids[0, 0].item() % 2 == 0:
            return x + F.dropout(torch.tanh(self.extra(torch.tanh(x))), 0.2)
        return torch.tanh(x)


@pytest.mark.slow
def test_each_branch_is_planned_once():
    batches = [batch(seed=seed) for seed in range(4)]
    for (ids, _), first in zip(batches, (1, 2, 1, 2), strict=True):
        ids[0, 0] = first
    losses, peaks = train(Branching(), batches)
    net = planner.within(Branching(), budget_of(peaks, 0.8), time_limit=1)
    found, measured = train(net, batches)
    assert found == losses
    assert max(measured) <= budget_of(peaks, 0.8)
    assert len(plans_of(net).graphs) == 2


@pytest.mark.slow
def test_a_wrapper_that_rebinds_forward_as_accelerate_does():
    def wrap(module: nn.Module) -> nn.Module:
        cast = torch.autocast("cpu", torch.bfloat16)(module.forward.__func__)
        module.forward = types.MethodType(cast, module)
        return module

    batches = [batch(seed=seed) for seed in range(3)]
    losses, peaks = train(wrap(model(1)), batches)
    budget = budget_of(peaks, 0.8)
    before = planner.within(wrap(model(1)), budget, time_limit=1)
    after = wrap(planner.within(model(1), budget, time_limit=1))
    for net in (before, after):
        found, measured = train(net, batches)
        assert found == pytest.approx(losses, rel=1e-2)
        assert max(measured) <= budget
        assert planner.plan_of(net).recompute_flops > 0


def test_a_pickle_keeps_what_was_asked_for():
    net = planner.within(model(), "80%", loss_fn=lambda out: out.sum(), time_limit=1)
    with pytest.warns(UserWarning, match="loss_fn .* cannot be pickled"):
        text = pickle.dumps(net)
    loaded = pickle.loads(text)
    train(loaded, [batch()] * 2)
    assert planner.plan_of(loaded).recompute_flops > 0


@pytest.mark.slow
def test_by_blocks():
    batches = [batch(size, seed=size) for size in (16, 8, 20, 16)]
    plain, plain_peaks = train(model(), batches)
    budget = budget_of(plain_peaks, 0.8)
    net = planner.within(model(), budget, time_limit=1, regions="blocks")
    found, peaks = train(net, batches)
    assert found == plain
    assert max(peaks) <= budget < max(plain_peaks)
    plan = planner.plan_of(net)
    assert len(plan.spec.blocks) == 2 and plan.recompute_flops > 0
    assert plans_of(net).steps.planned == 4


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"budget": "8 apples"}, ValueError, "unknown unit"),
    ({"budget": 1, "budget_gb": 1}, ValueError, "not both"),
    ({"on_new": "guess"}, ValueError, "replan"),
    ({"time_limit": -1}, ValueError, "time_limit"),
    ({"plan": 3}, TypeError, "planner.Plan"),
    ({"wat": 3}, TypeError, "wat"),
])
def test_arguments_are_checked_at_once(arguments, error, words):
    with pytest.raises(error, match=words):
        planner.within(model(), **arguments)
