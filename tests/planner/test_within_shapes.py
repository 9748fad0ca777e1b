"""Batches of other sizes within a budget: one trace, peaks as predicted, gradients as plain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.module_forward import forward_override
from planner.attached import known, measuring, symbolic_graph
from planner.attached.symbolic_graph import SymbolicGraph
from tests.support.sized_models import Attending, tokens
from tests.support.training import assert_same_gradients


def allocated_peak(step: Callable[[], object]) -> int:
    return record_peak(step, "cpu").peak_bytes


def symbolic_of(model: nn.Module) -> SymbolicGraph:
    found = forward_override(model)
    return next(graph for graph in found.graphs if isinstance(graph, SymbolicGraph))


def peak_bytes_at(graph: SymbolicGraph, sizes: dict[str, tuple[int, ...]]) -> int:
    """The peak of a step whose inputs have these sizes, under the last plan."""
    return graph._peak.bytes_at(graph._named(sizes))


def step_of_both(plain: nn.Module, model: nn.Module, length: int) -> None:
    """A step of each, on tokens of this length."""
    for each in (plain, model):
        each.zero_grad()
        each(tokens(4, length)).backward()


@pytest.mark.slow
def test_other_lengths_take_one_more_trace_and_the_gradients_of_the_plain_model():
    torch.manual_seed(0)
    plain = Attending()
    model = planner.within(copy.deepcopy(plain), "70%", time_limit=1)
    for length in (64, 32, 48, 17, 63, 64):
        step_of_both(plain, model, length)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert symbolic_of(model).code.compilations == 1
    assert planner.status(model).planned_steps == 6


@pytest.mark.slow
def test_a_trace_that_takes_too_long_is_given_up_for_good(monkeypatch, caplog):
    """As torch's computations with the padding of shifted windows, which may not end."""
    monkeypatch.setattr(symbolic_graph, "_LEAST_SECONDS", 0.01)
    monkeypatch.setattr(symbolic_graph, "_TIMES_FIXED", 0.0)
    torch.manual_seed(0)
    plain = Attending()
    model = planner.within(copy.deepcopy(plain), "70%", time_limit=1)
    for length in (32, 64, 48, 64):
        step_of_both(plain, model, length)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert caplog.text.count("cannot be captured with symbolic sizes") == 1
    assert "the trace took more than 0 s of CPU time" in caplog.text
    assert planner.status(model).planned_steps == 4


@pytest.mark.slow
def test_the_peak_at_other_lengths_is_as_evaluated():
    model = planner.within(Attending(), "70%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: torch.Tensor) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for length in (64, 32):
        step(tokens(4, length))
    resident = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    for length in (20, 41, 57):
        batch = tokens(4, length)
        step(batch)
        measured = allocated_peak(lambda batch=batch: step(batch)) + resident + batch.nbytes
        predicted = peak_bytes_at(symbolic_of(model), {"tokens": (4, length)})
        assert measured == predicted


@pytest.mark.slow
def test_steps_of_smaller_sizes_are_not_watched_for_being_new(monkeypatch):
    begun: list[bool] = []
    begin = measuring.StepWatch.begin
    monkeypatch.setattr(measuring.StepWatch, "begin",
                        lambda watch: begun.append(True) or begin(watch))
    model = planner.within(Attending(), "70%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for length in (64, 32, *range(63, 33, -1)):
        model(tokens(4, length)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(begun) <= 12


@pytest.mark.slow
def test_a_larger_size_that_does_not_fit_is_planned_without_a_trace():
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters = sum(each.nbytes for each in model.parameters())
    plain = planner.plan(model, (tokens(4, 96),), optimizer="sgd").baseline_peak_bytes
    limit = parameters + int(0.7 * (plain - parameters))
    planner.within(model, limit, time_limit=1)
    for length in (32, 48, 96, 96, 40):
        batch = tokens(4, length)

        def step(batch: torch.Tensor = batch) -> None:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        peak = allocated_peak(step)
        assert parameters + batch.nbytes + peak <= limit
    assert symbolic_of(model).code.compilations == 1


def test_an_input_changed_before_the_backward_is_refused():
    model = planner.within(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), "95%",
                           time_limit=1)
    for rows in (120, 90):
        model(torch.randn(rows, 8)).sum().backward()
        loss = model(torch.randn(70, 8)).sum()
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_may_come_twice():
    model = planner.within(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), "95%",
                           time_limit=1)
    for rows in (120, 90):
        model(torch.randn(rows, 8)).sum().backward()
        model.zero_grad()
    loss = model(torch.randn(70, 8)).sum()
    with torch._functorch.config.patch(donated_buffer=False):  # as torch asks for it
        loss.backward(retain_graph=True)
        once = model[0].weight.grad.clone()
        loss.backward()
    torch.testing.assert_close(model[0].weight.grad, 2 * once)


class Encoder(nn.Module):
    """Positions from a buffer; the loss reads the first of its two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(50, 32), nn.Embedding(128, 32)
        self.register_buffer("positions", torch.arange(128))
        self.inside, self.outside = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(tokens) + self.places(self.positions[:tokens.shape[1]])
        hidden = hidden + self.outside(nn.functional.gelu(self.inside(hidden)))
        return hidden, hidden[:, 0].tanh()


def train(model: nn.Module, lengths: list[tuple[int, ...]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in lengths:
        sum(model(tokens(4, length))[0].square().mean() for length in step).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_two_calls_of_two_lengths_before_one_backward():
    plain = Encoder()
    model = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    lengths = [(64, 48), (50, 60)]
    for each in (plain, model):
        train(each, lengths)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "more"), [((16, 32), 2), ((16, 16), 80)],
                         ids=["batches of two sizes", "short and long"])
def test_two_calls_of_other_sizes_are_each_counted_at_its_own(rows, more):
    model = planner.within(Encoder(), "80%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    resident = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))

    def step(batches: list[torch.Tensor]) -> None:
        outputs = [model(batch) for batch in batches]
        torch.cat([summary for _, summary in outputs]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for length in (20, 24, 30, 36, 40):
        batches = [tokens(rows[0], length), tokens(rows[1], length + more)]
        peak = resident + sum(batch.nbytes for batch in batches) + allocated_peak(
            lambda batches=batches: step(batches))
    graphs = [graph for graph in forward_override(model).graphs
              if isinstance(graph, SymbolicGraph)]
    assert [graph.code.compilations for graph in graphs] == [1, 1]
    assert peak <= planner.plan_of(model).budget_bytes
    second = graphs[0]
    assert peak == pytest.approx(peak_bytes_at(second, {"tokens": batches[1].shape}), rel=0.005)
    assert second.held_bytes < 10_000  # what the first call keeps is counted as such


@dataclass
class Cache:
    hidden: torch.Tensor
    summary: torch.Tensor
    past_key_values: list[torch.Tensor] | None

    def __getitem__(self, place: int) -> torch.Tensor:
        return (self.hidden, self.summary)[place]


class Cached(Encoder):
    """As transformers' decoders, it returns a cache that training does not ask for."""

    config = SimpleNamespace(use_cache=True)

    def forward(self, tokens: torch.Tensor, use_cache: bool | None = None) -> Cache:
        hidden, summary = super().forward(tokens)
        keeps = self.config.use_cache if use_cache is None else use_cache
        return Cache(hidden, summary, [hidden.exp(), hidden.sin()] if keeps else None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Encoder, Cached])
def test_a_larger_size_is_planned_once_as_the_loss_is_known(kind):
    model = planner.within(kind(), "90%", time_limit=1)
    train(model, [(64,), (48,), (48,), (80,), (70,), (100,)])
    assert planner.status(model).plans == 4  # for 64 with fixed sizes; for 64, 80 and 100


@pytest.mark.slow
def test_a_schedule_that_leaves_little_is_taken_at_larger_sizes(monkeypatch):
    searches = []
    search = known.plan_within
    monkeypatch.setattr(known, "plan_within",
                        lambda *args, **kwargs: (searches.append(args), search(*args, **kwargs))[1])
    model = planner.within(Encoder(), "90%", time_limit=1)
    train(model, [(64,), (48,), (48,)])
    monkeypatch.setattr(known, "_LITTLE", 1.0)
    searches.clear()
    train(model, [(80,), (100,)])
    assert symbolic_of(model).plan.peak_bytes <= symbolic_of(model).plan.budget_bytes
    assert not searches


def train_attending(model: nn.Module, shapes: list[tuple[int, int]]) -> list[int]:
    optimizer = torch.optim.AdamW(model.parameters())
    budgets = []
    for shape in shapes:
        model(tokens(*shape)).backward()
        optimizer.step()
        optimizer.zero_grad()
        plan = planner.plan_of(model)
        assert plan.peak_bytes <= plan.budget_bytes
        budgets.append(plan.budget_bytes)
    return budgets


@pytest.mark.slow
def test_a_percentage_that_a_last_batch_of_one_cannot_meet_is_one_of_the_largest_step():
    model = planner.within(Attending(), "75%", time_limit=1)
    budgets = train_attending(model, [(8, 64), (8, 48), (1, 8)])
    assert budgets[1] == budgets[2]


@pytest.mark.slow
def test_rows_are_symbolic_with_the_first_length_that_varies():
    model = planner.within(Attending(), "75%", time_limit=1)
    train_attending(model, [(8, 64), (8, 48), (3, 20), (5, 60), (8, 63)])
    assert symbolic_of(model).code.compilations == 1
    assert planner.status(model).plans == 2


@pytest.mark.slow
def test_another_symbol_is_planned_for_the_largest_sizes_so_far():
    model = planner.within(nn.Sequential(*(
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU()) for _ in range(4))), "85%",
        time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, height, width in ((4, 32, 32), (4, 24, 32), (2, 16, 20), (4, 30, 24), (3, 32, 31)):
        model(torch.randn(rows, 4, height, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert symbolic_of(model).code.compilations == 2
    assert planner.status(model).planned_steps == 5


class Masked(nn.Module):
    """Layers on the tokens that a mask leaves; the mask is as long as the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * mask[..., None]
        return hidden.square().mean()


@pytest.mark.slow
def test_sizes_that_are_always_equal_are_planned_for_the_largest_so_far():
    model = planner.within(Masked(), "75%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plans = []
    for batch, length in ((16, 64), (12, 48), (14, 56), (16, 64)):
        model(tokens(batch, length), torch.ones(batch, length)).backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(planner.plan_of(model))
    assert len({plan.budget_bytes for plan in plans[1:]}) == 1
    assert planner.status(model).plans == 2
    assert plans[1].ranges == plans[2].ranges == {"tokens_0": (2, 16), "tokens_1": (2, 64)}


class Skipping(Masked):
    """Uses the mask only where it leaves something out, and positions only where they are not as
    usual."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        usual = torch.arange(hidden.shape[1]).diff()
        if not (usual == 1).all():
            hidden = hidden.cos()
        if not mask.all():
            hidden = hidden * mask[..., None]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden.square().mean()


def padded(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(16, length)
    mask[1, length // 2:] = 0
    return tokens(16, length), mask.long()


@pytest.mark.slow
def test_paths_that_values_of_inputs_decide_are_traced_once_each():
    torch.manual_seed(0)
    plain = Skipping()
    model = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    whole = [(tokens(16, length), torch.ones(16, length).long()) for length in (64, 48, 40, 30)]
    for batch in (*whole[:3], padded(40), padded(50), whole[3], padded(64), whole[0]):
        for each in (plain, model):
            each.zero_grad()
            each(*batch).backward()
        assert_same_gradients(model, plain)
    code = symbolic_of(model).code
    assert code.compilations == 2
    assert not any("cos" in op.name or "diff" in op.name for graph in code.backend.graphs
                   for op in graph.region.variants[False].ops)
    assert planner.status(model).planned_steps == 8


class Placed(nn.Module):
    """A class token before the rows of an image, with places that are resized to it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 17, 16))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found = self.patches(image)
        rows = torch.cat([self.first.expand(image.shape[0], -1, -1), found.flatten(2).mT], 1)
        grid = self.places[:, 1:].reshape(1, 4, 4, 16).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, size=found.shape[2:], mode="bicubic")
        grid = grid.permute(0, 2, 3, 1).reshape(1, -1, 16)
        return torch.tanh(rows + torch.cat([self.places[:, :1], grid], 1)).square().mean()


@pytest.mark.slow
def test_images_of_other_sizes_with_resized_places_are_captured_with_symbols():
    model = planner.within(Placed(), "95%", time_limit=1)
    for size in (32, 48, 40):
        model(torch.randn(8, 3, size, size)).backward()
        model.zero_grad()
    assert symbolic_of(model).has_run


@pytest.mark.slow
def test_an_output_that_the_loop_lets_go_is_let_go_at_other_lengths_too():
    """Also where the plain step returns more than the captured one, here its cache."""
    transformers = pytest.importorskip("transformers")
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=200, n_embd=32, n_layer=1, n_head=2, n_positions=32, loss_type="ForCausalLM"))
    planner.within(net, "80%", time_limit=1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    for length in (24, 24, 16, 20):
        ids = torch.randint(200, (8, length))
        net(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fixed = next(each for each in forward_override(net).graphs
                 if not isinstance(each, SymbolicGraph))
    symbolic = symbolic_of(net)
    assert not fixed.plan.spec.holds_output and not symbolic.plan.spec.holds_output
    assert symbolic.plan.baseline_peak_bytes == fixed.plan.baseline_peak_bytes


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                                 nn.Linear(64, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows + self.net(rows)).square().mean()


SLICES: dict[str, Callable[[int], torch.Tensor]] = {
    "all but the last": lambda length: torch.randn(4, length, 8)[:, :-1],
    "all but the first": lambda length: torch.randn(4, length, 8)[:, 1:],
    "the begin of a longer tensor": lambda length: torch.randn(4, 99, 8)[:, :length],
    "rows from anywhere": lambda length: torch.randn(5000, 1, 8)[length * 7:length * 8],
    "every second": lambda length: torch.randn(4, 2 * length, 8)[:, ::2],
}


@pytest.mark.parametrize("part", SLICES)
def test_slices_of_other_lengths_are_captured_once(part):
    plain = Rows()
    model = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for length in (32, 48, 37, 40, 44):
        rows = SLICES[part](length)
        for each in (plain, model):
            each.zero_grad()
            each(rows).backward()
        optimizer.step()
        assert_same_gradients(model, plain)
    assert symbolic_of(model).code.compilations == 1
    assert len(forward_override(model).graphs) == 2


def test_the_peak_of_a_slice_at_other_lengths_is_as_evaluated():
    model = planner.within(Rows(), "80%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(rows).backward()
        optimizer.step()

    for length in (65, 81, 73):
        step(torch.randn(16, length, 8)[:, :-1])
    fixed = sum(each.nbytes for each in model.parameters())
    for length in (81, 95):
        whole = torch.randn(16, length, 8)
        step(whole[:, :-1])
        optimizer.zero_grad()
        measured = allocated_peak(lambda whole=whole: step(whole[:, :-1])) + fixed + whole.nbytes
        predicted = peak_bytes_at(symbolic_of(model), {"rows": (16, length - 1, 8)})
        assert measured == predicted


class Unrolled(nn.Module):
    """A loop over time, so that each length is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(32, 128), nn.Linear(128, 128), nn.Linear(
            128, 32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        given, state, states = self.first(rows), rows.new_zeros(rows.shape[0], 128), []
        for place in range(rows.shape[1]):
            state = (torch.tanh(self.again(state) + given[:, place])
                     * torch.sigmoid(given[:, place]) + state)
            states.append(state)
        return self.last(torch.stack(states, 1)).square().mean()


@pytest.mark.slow
def test_a_step_is_compared_with_the_budget_of_its_own_sizes(caplog):
    model = planner.within(Unrolled(), "80%", time_limit=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch, length in ((64, 12), (64, 16), (64, 16), (48, 20), (64, 8)):
        model(torch.randn(batch, length, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "exceeded" not in caplog.text


def test_a_small_excess_is_told_in_bytes(caplog):
    measuring._report([], 17_612_345, 17_600_000, 17_600_001, "by a little")
    assert "budget of 17,600,001 bytes" in caplog.text
    assert "measured 17,612,345 bytes, by a little" in caplog.text


@pytest.mark.slow
def test_micro_batches_of_two_lengths_take_a_percentage_of_the_plain_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 64), *(
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        for _ in range(6)), nn.Linear(64, 300, bias=False))
    planner.within(model, "65%", time_limit=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        for length in (64, 61):
            ids = torch.randint(300, (8, length))
            logits = model(ids)
            nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = planner.plan_of(model)
    assert plan.budget_bytes <= 0.65 * plan.baseline_peak_bytes + 1
    assert planner.status(model).worst_peak_bytes <= plan.budget_bytes


def test_slices_of_one_long_tensor_are_counted_with_all_of_it():
    long = torch.randn(8, 400, 8)
    model = planner.within(Rows(), "80%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plain = []
    for batch, length in ((8, 50), (8, 60), (6, 55), (8, 60)):
        model(long[:batch, 30:30 + length]).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(planner.plan_of(model).baseline_peak_bytes)
    assert plain[0] < plain[1] == plain[2] == plain[3]
    assert planner.status(model).worst_peak_bytes <= planner.plan_of(model).budget_bytes


def test_a_plan_serves_smaller_slices_of_the_same_tensor():
    plain, long = Rows(), torch.randn(8, 100, 8)
    model = planner.plan(plain, (long[:, :50],), budget="90%").apply(copy.deepcopy(plain))
    for rows in (long[:, 40:90], long[:, :30], long[:4, :30]):
        for each in (plain, model):
            each.zero_grad()
            each(rows).backward()
        assert_same_gradients(model, plain)
    with pytest.raises(planner.PlanMismatch, match="serves inputs up to the size"):
        model(torch.randn(8, 200, 8)[:, :50])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.last = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(rows)[0]).square().mean()


@pytest.mark.slow
def test_an_lstm_is_one_op_at_any_length():
    torch.manual_seed(0)
    plain = Recurrent()
    model = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(rows).backward()
        optimizer.step()

    for length in (200, 320, 250, 300):
        rows = torch.randn(8, length, 8)
        step(rows)
        plain.zero_grad()
        plain(rows).backward()
        assert_same_gradients(model, plain)
    assert symbolic_of(model).code.compilations == 1
    beside = 2 * sum(each.nbytes for each in model.parameters())  # and the plain model's gradients
    rows = torch.randn(8, 290, 8)
    step(rows)
    optimizer.zero_grad()
    measured = allocated_peak(lambda: step(rows)) + beside + rows.nbytes
    predicted = peak_bytes_at(symbolic_of(model), {"rows": (8, 290, 8)})
    assert measured == pytest.approx(predicted, rel=0.002)  # the reserve is rounded to pages


def test_a_smaller_last_batch_after_lengths_have_varied_is_not_compiled():
    net = planner.within(nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(),
                                                       nn.Linear(64, 32)) for _ in range(3))),
                         "80%", time_limit=1)
    optimizer, compiled = torch.optim.SGD(net.parameters(), lr=0.1), []
    for rows, length in ((16, 60), (16, 64), (16, 58), (6, 63), (16, 61)):
        net(torch.randn(rows, length, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        compiled.append(sum(graph.code.compilations for graph in forward_override(net).graphs))
    assert len(set(compiled[1:])) == 1


class Broken(Attending):
    """Its graph breaks between the layers."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        hidden = first(self.embed(ids))
        torch._dynamo.graph_break()
        logits = self.head(second(hidden)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids.flatten())


@pytest.mark.slow
def test_regions_of_smaller_sizes_are_compiled_once():
    torch.manual_seed(0)
    plain = Broken()
    model = planner.within(copy.deepcopy(plain), "70%", time_limit=1)
    for length in (64, 32, 48, 17, 63, 64):
        with torch._dynamo.config.patch(error_on_recompile=length in (48, 17, 63)):
            step_of_both(plain, model, length)
        assert_same_gradients(model, plain)
    status = planner.status(model)
    assert (status.planned_steps, status.plans) == (6, 2)


@pytest.mark.slow
def test_regions_of_larger_sizes_run_by_the_code_of_smaller_ones():
    torch.manual_seed(0)
    plain = Broken()
    model = planner.within(copy.deepcopy(plain), "70%", time_limit=1)
    compiled = []
    for length in (32, 48, 40, 64, 56, 80, 17, 80):
        step_of_both(plain, model, length)
        assert_same_gradients(model, plain)
        graph, = forward_override(model).graphs
        compiled.append(graph.code.compilations)
    assert len(set(compiled[1:])) == 1
    status = planner.status(model)
    assert status.planned_steps == 8
    assert status.plan.limited_bytes <= status.budget_bytes


class InChunks(nn.Module):
    """Pools a sequence of any length in chunks."""

    def __init__(self, chunk: int | None) -> None:
        super().__init__()
        self.chunk = chunk
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                                 nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.net(x)
        size = self.chunk or x.shape[1]
        pooled = x.new_zeros(len(x), 8)
        for begin in range(0, x.shape[1], size):
            pooled = torch.maximum(pooled, x[:, begin:begin + size].amax(1))
        return pooled.square().mean()


@pytest.mark.parametrize("chunk", [None, pytest.param(16, marks=pytest.mark.slow)])
def test_a_loop_over_chunks_is_traced_once_for_each_number_of_them(chunk):
    plain = InChunks(chunk)
    model = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    for length in (48, 35, 47, 38, 34, 41):
        x = torch.randn(4, length, 8)
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
        assert_same_gradients(model, plain)
    assert symbolic_of(model).code.compilations == 1


def noise_by_size(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    """Adds noise whose bounds follow from the sizes, as NEFTune does."""
    bound = 5 / torch.sqrt(torch.tensor(output.shape[1] * output.shape[2]))
    return output + torch.zeros_like(output).uniform_(-bound, bound)


@pytest.mark.slow
def test_bounds_of_noise_that_follow_from_sizes_are_no_constants():
    torch.manual_seed(0)
    plain = Attending()
    model = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    for each in (plain, model):
        each.embed.register_forward_hook(noise_by_size)
    for number, length in enumerate((48, 32, 37, 20)):
        for each in (plain, model):
            torch.manual_seed(number)
            each.zero_grad()
            each(tokens(4, length)).backward()
        assert_same_gradients(model, plain)
    assert len(forward_override(model).graphs) == 1


class Masking(nn.Module):
    """Masks a fraction of the tokens, and keeps a fraction of what follows from them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.Sequential(*(nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        masked = torch.rand(ids.shape).topk(max(1, int(0.15 * length)), dim=-1).indices
        x = self.embed(ids.scatter(1, masked, 0))[:, :length - int(length * 0.3)]
        logits = self.head(self.layers(x))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, :x.shape[1]].flatten())


@pytest.mark.slow
def test_sizes_may_be_rounded_fractions_of_sizes():
    plain = Masking()
    model = planner.within(copy.deepcopy(plain), "75%", time_limit=1)
    for number, length in enumerate((100, 75, 110, 50, 93)):
        peaks = []
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(number)
            ids = torch.randint(64, (8, length))
            peaks.append(allocated_peak(lambda each=each, ids=ids: each(ids).backward()))
        assert_same_gradients(model, plain)
        if number > 2:  # all is planned by now
            own = sum(each.nbytes for each in model.parameters())
            assert peaks[1] + own + ids.nbytes <= planner.status(model).budget_bytes
    assert symbolic_of(model).code.compilations == 1


def test_values_at_larger_sizes_are_the_last_ones():
    # A mask of ones stays one, sorted places stay sorted, and a mark in front is not repeated.
    ids = torch.tensor([[7, 1, 1], [7, 2, 2]])
    call = SimpleNamespace(sizes={"ids": (3, 5)})
    (found,), _ = symbolic_graph.enlarged_arguments({"ids": ids}, call, (ids,), {})
    assert found.tolist() == [[7, 1, 1, 1, 1], [7, 2, 2, 2, 2], [7, 2, 2, 2, 2]]


class Noisy(nn.Module):
    """Random numbers written into memory that is laid out as a transposed tensor is."""

    def __init__(self, noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.noise = nn.Embedding(50, 32), noise
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.embed(tokens).transpose(0, 1)).transpose(0, 1)
        return self.outer(self.noise(hidden)).float().tanh()


def drawn_for_nothing(x: torch.Tensor) -> torch.Tensor:
    F.dropout(x.exp(), 0.5)
    torch.empty_like(x).exponential_()
    torch.randperm(7)
    return F.dropout(x, 0.1)


@pytest.mark.parametrize(("noise", "dtype"), [
    pytest.param(lambda x: F.dropout(x, 0.1), torch.float32, id="dropout"),
    pytest.param(drawn_for_nothing, torch.float32, id="drawn for nothing"),
    *(pytest.param(noise, torch.bfloat16, marks=pytest.mark.slow, id=name) for name, noise in {
        "dropout in bf16": lambda x: F.dropout(x, 0.1),
        "bernoulli_ in bf16": lambda x: x * torch.empty_like(x).bernoulli_(0.9),
        "normal_ in bf16": lambda x: x + torch.empty_like(x, dtype=torch.float32).normal_(),
        "uniform_ in bf16": lambda x: x * torch.empty_like(x).uniform_(0.5, 1.5)}.items())])
def test_random_numbers_are_those_of_the_plain_step_at_any_length(noise, dtype):
    torch.manual_seed(0)
    plain = Noisy(noise)
    model = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    for seed, length in enumerate((24, 20, 28)):
        batch, outputs, states = tokens(8, length), [], []
        for each in (plain, model):
            torch.manual_seed(seed)
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                outputs.append(each(batch))
            outputs[-1].square().mean().backward()
            states.append(torch.get_rng_state())
        assert torch.equal(*outputs) and torch.equal(*states)
        assert_same_gradients(model, plain)
    assert any(isinstance(graph, SymbolicGraph) for graph in forward_override(model).graphs)
