"""`planner.within` where the model returns a loss and the caller trains with another."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from tests.support.measured_loops import MeasuredLoop, Trial
from tests.support.models import LanguageModel
from tests.support.stages import record_stages
from tests.support.training import assert_same_gradients


class Scored(nn.Module):
    """A language model with its loss, and beside it the score of each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = LanguageModel(2, 32, 128, dropout=0.1)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(ids)
        scores = -F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        return {"loss": -scores.mean(), "scores": scores, "logits": logits}


LOSSES = {
    "its own": lambda output: output["loss"],
    "of what is beside it": lambda output: output["scores"].square().mean(),
    "of both": lambda output: output["loss"] + output["scores"].square().mean(),
}


@pytest.mark.parametrize("loss_of", [
    pytest.param(loss_of, id=name, marks=[pytest.mark.slow] * (name == "its own"))
    for name, loss_of in LOSSES.items()])
def test_the_loss_of_the_model_or_of_what_is_beside_it(loss_of):
    def train(loop: MeasuredLoop, budget: int | None) -> None:
        net = loop.model if budget is None else planner.within(loop.model, budget, time_limit=1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

        def run() -> None:
            for seed in range(3):
                loop.begin_step()
                ids = torch.randint(128, (8, 32), generator=torch.Generator().manual_seed(seed))
                loss = loss_of(net(ids))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loop.note_loss(loss)

        loop.run(run)

    trial = Trial.of(Scored, train, share=0.8)
    trial.check(steps=3)
    trial.check_equal()


class BySample(Scored):
    """Returns a loss for each sample, which the loop reduces."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(ids)
        losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        return {"loss": losses.view(ids.shape).mean(1), "logits": logits}


def test_a_loss_by_sample_that_the_loop_reduces():
    plain = BySample()
    net = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    for step in range(3):
        ids = torch.randint(128, (8, 32))
        for each in (plain, net):
            torch.manual_seed(step)
            each.zero_grad()
            each(ids)["loss"].mean().backward()
        assert_same_gradients(net, plain)
    with pytest.raises(planner.CaptureError, match=r"expected one element"):
        planner.plan(plain, (ids,), budget="80%")


class Recurrent(nn.Module):
    """Returns its state beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 128), nn.Linear(128, 500)
        self.layers = nn.LSTM(128, 128, 2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        hidden, state = self.layers(self.embed(ids))
        return self.head(hidden), state


def test_gradients_are_not_held_where_the_loss_leaves_out_an_output():
    torch.manual_seed(0)
    net = Recurrent()
    ids, optimizer = torch.randint(500, (16, 64)), torch.optim.SGD(net.parameters(), lr=0.01)
    resident = sum(p.nbytes for p in net.parameters()) + ids.nbytes
    planner.within(net, "65%", time_limit=1)

    def step() -> None:
        logits, _ = net(ids)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    peaks = [resident + record.peak_bytes for record in record_stages([step] * 4)]
    plan = planner.status(net).plan
    assert plan.spec.regions[0].cotangents == (True, False, False)
    assert max(peaks[2:]) <= plan.peak_bytes


def gathered(output: torch.Tensor) -> torch.Tensor:
    """As for the log-probabilities of tokens, row by row."""
    chosen = output.gather(1, torch.zeros(len(output), 1, dtype=torch.int64))[:, 0]
    return (chosen - torch.stack([row.logsumexp(0) for row in output])).sum()


@pytest.mark.parametrize("reduce", [
    torch.sum, torch.mean, lambda output: 2 * output[:, 0].sum(), gathered,
    lambda output: output.sin().sum() + output.exp().sum(),
], ids=["sum", "mean", "a part", "gathered", "used twice"])
def test_a_loss_that_the_loop_makes_itself_is_counted_to_the_byte(reduce):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 512))
    x, optimizer = torch.randn(512, 32), torch.optim.SGD(net.parameters(), lr=0.01)
    resident = sum(p.nbytes for p in net.parameters()) + x.nbytes

    def step() -> None:
        output = net(x)
        reduce(output).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = record_stages([step] * 2)[1].peak_bytes
    planner.within(net, "10MB", time_limit=1)
    peaks = [resident + record.peak_bytes for record in record_stages([step] * 3)]
    plan = planner.plan_of(net)
    assert peaks[1:] == [plan.peak_bytes] * 2
    assert plan.baseline_peak_bytes == pytest.approx(resident + plain, abs=16)


def test_the_measured_peak_has_the_workspace_of_each_kernel():
    # The gradients of input and weight come from two ops, which only their mask tells apart.
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        net(torch.randn(32, 16, 24, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    planner.within(net, "75%", time_limit=1)
    for _ in range(3):
        step()
    peak = sum(p.nbytes for p in net.parameters()) + record_stages([step])[0].peak_bytes
    assert planner.status(net).worst_peak_bytes == planner.plan_of(net).peak_bytes == peak


@pytest.mark.parametrize("loss_of, share", [
    (torch.max, 1.0), (torch.amax, 0.85), (lambda output: output.sort(1)[0][:, :5].sum(), 1.1),
    (lambda output: (output * (output > 0)).sum() / (output > 0).sum(), 0.85),
], ids=["max", "amax", "sort", "counted"])
def test_what_kernels_of_the_loss_take_for_themselves(loss_of, share):
    # A maximum, for one, counts the elements that share it, in 64 bits each, beside their gradient.
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(),
                             nn.Linear(128, 512))

    x = torch.randn(256, 32)

    def train(loop: MeasuredLoop, budget: int | None) -> None:
        net = loop.model if budget is None else planner.within(loop.model, budget, time_limit=1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def run() -> None:
            for _ in range(3):
                loop.begin_step()
                loss = loss_of(net(x))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loop.note_loss(loss)

        loop.run(run)

    plain, budgeted = MeasuredLoop(make()), MeasuredLoop(make())
    train(plain, None)
    budget = int(share * max(plain.peaks))
    train(budgeted, budget)
    assert max(budgeted.peaks) + x.nbytes <= budget
    assert budgeted.losses == plain.losses


class Centred(nn.Module):
    """Updates a buffer and reads it, and returns its loss beside its features."""

    def __init__(self, is_normed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, second = nn.Linear(32, 64), nn.Linear(64, 64)
        self.second = nn.utils.spectral_norm(second) if is_normed else second
        self.register_buffer("centre", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = torch.tanh(self.second(torch.tanh(self.first(x))))
        with torch.no_grad():
            self.centre.mul_(0.9).add_(features.mean(0), alpha=0.1)
        return {"loss": (features - self.centre).pow(4).mean(), "features": features}


@pytest.mark.parametrize("is_normed", [False, True])
def test_a_term_that_comes_later_is_of_the_buffers_as_the_forward_found_them(is_normed):
    """A gradient through an output that the plan took for one without."""
    plain = Centred(is_normed)
    net = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    for step in range(4):
        x = torch.randn(256, 32)
        for each in (plain, net):
            output = each(x)
            loss = output["loss"]
            if step > 1:
                loss = loss + output["features"].square().mean()
            each.zero_grad()
            loss.backward()
        assert_same_gradients(net, plain)
        for mine, theirs in zip(net.buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs)


class WithLogits(nn.Module):
    """Returns logits that are large beside the rest, as a language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(500, 16), nn.Linear(16, 500, bias=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.last(torch.tanh(self.first(ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("optimizer_is_given", [False, True])
def test_a_budget_is_not_refused_for_an_output_that_the_loop_lets_go(optimizer_is_given):
    given = {"optimizer": "sgd"} if optimizer_is_given else {}
    ids = torch.randint(500, (8, 64))
    least = {}
    for is_held in (False, True):
        with pytest.raises(planner.InfeasibleBudget) as refusal:
            planner.plan(WithLogits(), (ids,), budget="1%", hold_output=is_held, optimizer="sgd")
        least[is_held] = refusal.value.minimum_bytes
    budget = (least[False] + least[True]) // 2
    model = planner.within(WithLogits(), budget, time_limit=1, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(ids)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    status = planner.status(model)
    assert status.planned_steps == 3 and status.worst_peak_bytes <= budget


def test_where_the_loop_holds_the_output_the_budget_is_refused_once_that_is_seen():
    ids = torch.randint(500, (8, 64))
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        planner.plan(WithLogits(), (ids,), budget="1%", optimizer="sgd")
    model = planner.within(WithLogits(), int(0.95 * refusal.value.minimum_bytes), time_limit=1)
    with pytest.warns(UserWarning, match="still held"):
        output = model(ids)
        output["loss"].backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    with pytest.raises(planner.InfeasibleBudget):
        model(ids)


@pytest.mark.slow
def test_outputs_in_a_tuple_keep_their_places():
    """A key-value cache in a tuple is not left out: what is behind it would move."""
    transformers = pytest.importorskip("transformers")
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=1, n_head=2, n_positions=32, loss_type="ForCausalLM"))
    planner.within(net, "90%", time_limit=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for length in (24, 24, 16, 20):
        ids = torch.randint(100, (4, length))
        loss, logits, cache = net(input_ids=ids, labels=ids, return_dict=False)
        loss.backward()
        assert logits.shape == (4, length, 100) and cache.get_seq_length() == length
        optimizer.step()
        optimizer.zero_grad()
    assert planner.status(net).planned_steps == 4


class Padding(nn.Module):
    """Does more where its mask has zeros, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = self.first(x).tanh()
        if not mask.all():
            wide = wide.masked_fill(~mask[:, None], 0.0).exp()
        narrow = self.second(wide)
        return {"loss": narrow.square().mean(), "features": narrow}


@pytest.mark.parametrize("rows", [(512, 512), (512, 256)], ids=["same", "smaller"])
def test_what_a_batch_that_is_gone_decides_is_remembered(rows):
    net = Padding()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(rows: int = 512) -> None:
        # The batch goes with the step, and the features before its backward.
        loss = net(torch.randn(rows, 32), torch.ones(rows, dtype=torch.bool))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    resident = sum(p.nbytes for p in net.parameters())
    plain = record_stages([step] * 2)[1].peak_bytes
    planner.within(net, "90%", time_limit=1)
    for each in rows:
        step(each)
    # Of the largest batch, also where a smaller one is planned for it.
    assert planner.plan_of(net).baseline_peak_bytes == pytest.approx(resident + plain, rel=0.01)


def test_a_loss_may_differentiate_forward():
    """Its tangents of zeros have no memory."""
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))

    def train(net: nn.Module) -> list[float]:
        losses = []
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            output = net(torch.randn(64, 32, generator=generator))
            curvature = torch.func.hessian(lambda x: x.sin().sum())(output.detach().mean(0))
            loss = output.square().mean() * curvature.square().sum()
            loss.backward()
            losses.append(loss.item())
            net.zero_grad()
        return losses

    assert train(planner.within(make(), "90%", time_limit=1)) == train(make())


class Widening(nn.Module):
    """Some calls take a path of which nothing can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(),
                                                    nn.Linear(128, 32)) for _ in range(4)))
        self.wide = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor, is_wide: bool = False) -> torch.Tensor:
        if is_wide:
            x = x * (self.wide * torch.ones(2**20)).exp().sum()
        return self.layers(x)


def test_a_call_that_does_not_fit_a_percentage_is_said_at_once(caplog):
    net = planner.within(Widening(), "60%", time_limit=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)

    def step(is_wide: bool) -> None:
        net(torch.randn(512, 32), is_wide).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with caplog.at_level("WARNING", logger="planner"):
        for _ in range(3):
            step(False)
        assert not caplog.text
        step(True)
    assert "it runs, and may exceed the budget" in caplog.text
    with pytest.raises(planner.InfeasibleBudget, match="would do"):
        step(True)
