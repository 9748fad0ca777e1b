"""`planner.within` where values of tensors decide sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner._apply import plan_backend
from planner._apply.errors import PlanMismatch
from planner._graph_capture.fake_copies.data_dependent_values import with_larger_selections
from planner._graph_capture.fake_copies.storage_less import Answer
from planner._graph_capture.module_forward import forward_override
from planner.attached import known
from planner.captured_graph import with_least_memory
from tests.support.stages import record_stages
from tests.support.training import assert_same_gradients


class Sized(nn.Module):
    """Values decide the sizes of tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.second = (nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
                                   for _ in range(2))
        self.token = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "maximum":
            steps = int(x.abs().max()) + 1
            return self.second(self.first(x)) + torch.zeros(steps, 1, 32).sum()
        if self.kind == "mask of the inputs":
            return self.second(self.first(x[x[..., 0] > 0]))
        chosen = self.first(x)
        if self.kind == "nonzero":
            return self.second(chosen[(x[:, 0, 0] > -1).nonzero().squeeze(1)])
        if self.kind == "assignment":
            chosen[x[..., 0] > 0] = self.token
            return self.second(chosen)
        return self.second(chosen[chosen[..., 0] > 0])


def trained(net: nn.Module, batches: list[torch.Tensor]) -> tuple[list[float], list[int]]:
    """The losses of a step for each batch, and the peaks, with parameters and a batch."""
    losses, opt = [], torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())

    records = record_stages([lambda x=x: step(x) for x in batches])
    resident = sum(p.numel() * 4 for p in net.parameters()) + batches[0].numel() * 4
    return losses, [resident + record.peak_bytes for record in records]


@pytest.mark.parametrize("kind", [
    "assignment", *(pytest.param(kind, marks=pytest.mark.slow)
                    for kind in ("mask", "maximum", "mask of the inputs", "nonzero"))])
def test_sizes_that_values_decide(kind):
    torch.manual_seed(5)
    batches = [torch.randn(16, 32, 32) * scale for scale in (2, 3, 3, 1, 2.5)]

    losses, peaks = trained(Sized(kind), batches)
    budget = int(0.8 * max(peaks))
    net = planner.within(Sized(kind), budget, time_limit=1)
    found, measured = trained(net, batches)
    assert found == losses
    assert planner.steps_of(net).planned == len(batches)
    assert max(measured) <= budget


class Masked(nn.Module):
    """Looks at a mask unless it is captured, as models of transformers do, then selects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not mask.all():
            x = x * mask[:, None]
        x = self.second(torch.tanh(self.first(x)))
        return x[(mask >= 0).nonzero()[:, 0]]


@pytest.mark.slow
def test_what_is_asked_only_where_nothing_is_captured_is_passed_over():
    torch.manual_seed(0)
    x, mask = torch.randn(64, 8), torch.ones(64)
    model = planner.within(Masked(), "95%", time_limit=1)
    for _ in range(2):
        model(x, mask).square().mean().backward()
    assert planner.steps_of(model).planned == 2


class Convolutions(nn.Module):
    """Each layer of a loop selects by a mask, as convolutions of graphs do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            source, target = edges[:, edges[0] != edges[1]]
            x = torch.tanh(layer(x))
            x = x.index_add(0, target, x[source] * 0.1)
        return x


@pytest.mark.slow
def test_layers_in_a_loop_that_select_by_masks_are_planned_in_pieces():
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(1))
    edges = [torch.randint(0, 200, (2, 400), generator=torch.Generator().manual_seed(seed))
             for seed in range(3)]

    def run(net: nn.Module) -> tuple[list[float], list[int]]:
        losses, peaks = [], []
        for each in edges:
            net.zero_grad()

            def step(each: torch.Tensor = each) -> None:
                loss = net(x, each).square().mean()
                loss.backward()
                losses.append(loss.item())

            record, = record_stages([step])
            peaks.append(record.peak_bytes)
        return losses, peaks

    plain, net = Convolutions(), Convolutions()
    losses, plain_peaks = run(plain)
    held = x.nbytes + edges[0].nbytes + sum(parameter.nbytes for parameter in net.parameters())
    budget = held + int(0.85 * max(plain_peaks))
    planner.within(net, budget, optimizer="sgd", time_limit=1)
    found, peaks = run(net)
    assert found == losses
    assert held + max(peaks) <= budget
    assert len(planner.plan_of(net).spec.regions) == 3
    assert planner.steps_of(net).planned == 3
    assert all(torch.equal(mine.grad, other.grad) for mine, other
               in zip(net.parameters(), plain.parameters(), strict=True))


class Convolution(nn.Module):
    """A layer that selects edges and adds loops of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        nodes = torch.arange(len(x))
        source, target = torch.cat([edges[:, edges[0] != edges[1]], nodes.expand(2, -1)], 1)
        x = self.linear(x)
        return torch.zeros_like(x).index_add(0, target, x[source])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Convolution() for _ in range(3))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, edges))
        return x


@pytest.mark.slow
def test_layers_that_select_inside_of_themselves_are_planned_with_the_sizes_of_the_call():
    x = torch.randn(100, 32, generator=torch.Generator().manual_seed(1))
    edges = torch.randint(0, 100, (2, 400), generator=torch.Generator().manual_seed(2))

    def run(net: nn.Module) -> list[int]:
        def step() -> None:
            net.zero_grad()
            net(x, edges).square().mean().backward()

        return [record.peak_bytes for record in record_stages([step] * 3)]

    plain, net = Layers(), Layers()
    held = x.nbytes + edges.nbytes + sum(parameter.nbytes for parameter in net.parameters())
    budget = held + int(0.95 * max(run(plain)))
    planner.within(net, budget, optimizer="sgd", time_limit=1)
    assert held + max(run(net)) <= budget
    assert planner.steps_of(net).planned == 3
    assert all(torch.equal(mine.grad, other.grad) for mine, other
               in zip(net.parameters(), plain.parameters(), strict=True))


def train_on_graphs_of(net: nn.Module, sizes: list[int]) -> list[int]:
    """Numbers of graphs compiled after each step on so many nodes."""
    generator, compilations = torch.Generator().manual_seed(1), []
    for nodes in sizes:
        x = torch.randn(nodes, 32, generator=generator)
        edges = torch.randint(0, nodes, (2, 4 * nodes), generator=generator)
        net(x, edges).square().mean().backward()
        found = forward_override(net)
        compilations.append(sum(graph.code.compilations for graph in found.graphs) if found else 0)
    return compilations


@pytest.mark.slow
@pytest.mark.parametrize("has_other_ops", [False, True])
def test_smaller_sizes_are_compiled_once_unless_their_graphs_have_other_ops(
        has_other_ops, monkeypatch):
    choose = plan_backend.PlanBackend._choose_schedule

    def refuse(self: Any, traced: Any, values: tuple[int, ...], args: Any) -> None:
        if values:
            raise PlanMismatch("other ops")
        choose(self, traced, values, args)

    if has_other_ops:
        monkeypatch.setattr(plan_backend.PlanBackend, "_choose_schedule", refuse)
    sizes = [100, 60, 80, 43, 99]
    plain, net = Layers(), planner.within(Layers(), "95%", optimizer="sgd", time_limit=1)
    train_on_graphs_of(plain, sizes)
    compilations = train_on_graphs_of(net, sizes)
    assert planner.steps_of(net).planned == len(sizes)
    assert (len({*compilations[1:]}) == 1) is not has_other_ops
    assert all(torch.equal(mine.grad, other.grad) for mine, other
               in zip(net.parameters(), plain.parameters(), strict=True))


@pytest.mark.slow
def test_it_is_said_once_that_learning_the_values_took_more_than_the_budget(monkeypatch, caplog):
    learn = known.data_dependent_values

    def wasteful(model: nn.Module, call: Callable[[], object]) -> object:
        torch.zeros(4_000_000).sum()
        return learn(model, call)

    monkeypatch.setattr(known, "data_dependent_values", wasteful)
    net = planner.within(Layers(), "95%", optimizer="sgd", time_limit=1)
    train_on_graphs_of(net, [60, 80])
    assert planner.status(net).plans > 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "called without gradients as it is written, which took 16." in said[0]


class Detector(nn.Module):
    """Classes are assigned to the points that are chosen, by two indices, and then the same points
    are selected."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, x: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        losses = []
        for found, target in zip(self.body(x), targets, strict=True):
            overlap, nearest = target["overlaps"].max(0)
            chosen, goal = overlap >= .4, torch.zeros_like(found)
            goal[chosen, target["labels"][nearest[chosen]]] = 1.0
            count = max(1, int(chosen.sum()))
            losses.append((found - goal).square().sum() / count)
            losses.append((found[chosen][:, :4] - target["boxes"][nearest[chosen]]).abs().sum()
                          / count)
        return torch.stack(losses).sum()


@pytest.mark.slow
def test_masks_that_assign_and_select():
    plain, net = Detector(), planner.within(Detector(), "90%", optimizer="sgd", time_limit=1)
    for module in (plain, net):
        torch.manual_seed(1)
        for _ in range(3):
            module(torch.randn(2, 300, 8), [
                {"overlaps": torch.rand(n, 300), "labels": torch.randint(0, 5, (n,)),
                 "boxes": torch.rand(n, 4)} for n in (2, 3)]).backward()
    assert planner.steps_of(net).planned == 3
    assert all(torch.equal(mine.grad, other.grad) for mine, other
               in zip(net.parameters(), plain.parameters(), strict=True))


class Adds(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y.sin()).square()


def test_a_graph_that_writes_into_an_operand_runs_as_written_where_it_is_not_the_planned_one():
    leaf, y = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    with pytest.warns(UserWarning, match="runs as it is written"):
        with_least_memory(torch.fx.symbolic_trace(Adds()))(leaf * 1, y).sum().backward()
    assert torch.equal(leaf.grad, 2 * (leaf + y.sin()))


class _Block(nn.Module):
    """The gradients of what three layers read are added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(96, 96) for _ in range(4))
        self.inside = nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96))
        self.first, self.last = nn.LayerNorm(96), nn.LayerNorm(96)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(rows).view(rows.shape[0], -1, 4, 24).transpose(1, 2)
            for layer in (self.query, self.key, self.value))
        found = nn.functional.scaled_dot_product_attention(query, key, value)
        rows = self.first(rows + self.out(found.transpose(1, 2).reshape(rows.shape)))
        return self.last(rows + self.inside(rows))


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 96)
        self.layers = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for layer in self.layers:
            if not torch.rand([]) < 0.0:
                rows = layer(rows)
        return rows.square().mean()


@pytest.mark.slow
def test_a_size_that_torch_fixes_in_a_graph_that_others_vary_in():
    torch.manual_seed(0)
    plain = _Dropping()
    model = planner.within(copy.deepcopy(plain), "75%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for length in (100, 100, 120, 110):
        rows = torch.randn(4, length, 8)
        for each in (plain, model):
            each.zero_grad()
            each(rows).backward()
        optimizer.step()
        assert_same_gradients(model, plain)


class Experts(nn.Module):
    """A residual mixture of experts, which reads how many tokens each expert gets."""

    def __init__(self, read: Callable[[torch.Tensor], list[int]]) -> None:
        super().__init__()
        self.read = read
        self.router = nn.Linear(32, 3)
        self.weights = nn.Parameter(torch.randn(3, 32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        gate, choice = self.router(tokens).softmax(-1).max(-1)
        counts = self.read(nn.functional.one_hot(choice, 3).sum(0))
        order = choice.sort()[1]
        parts = [part @ self.weights[number]
                 for number, part in enumerate(tokens[order].split(counts))]
        return x + (torch.cat(parts) * gate[order][:, None]).view_as(x)


class TwoMixtures(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], list[int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Experts(read), Experts(read)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.slow
@pytest.mark.parametrize("read", [
    lambda counts: counts.tolist(), lambda counts: [count.item() for count in counts]],
    ids=["tolist", "item"])
def test_experts_that_count_their_tokens(read):
    plain = TwoMixtures(read)
    net = planner.within(TwoMixtures(read), "90%", time_limit=1)
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(8, 16, 32)
        for each in (plain, net):
            each.zero_grad()
            each(x).square().mean().backward()
        # Code that breaks adds gradients in another order, also under backend="aot_eager".
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


class Padded(nn.Module):
    """A convolution that keeps how much it pads in a buffer, as those of audio codecs do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(inputs, outputs, 3)
        self.register_buffer("padding", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1] + self.padding
        return self.convolution(nn.functional.pad(x, (int(length - x.shape[-1]), 0)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.ModuleList([nn.ELU(), Padded(width, width // 2),
                                    nn.ELU(), Padded(width // 2, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.block:
            y = layer(y)
        return x + y


class Codec(nn.Module):
    """No gradient reaches the layers before the codes, which share code with later ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.ModuleList([Padded(1, 8), Residual(8), Padded(8, 16), Residual(16)])
        self.embed = nn.Embedding(16, 16)
        self.decoder = nn.ModuleList([Residual(16), Padded(16, 8), Residual(8), Padded(8, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            x = layer(x)
        x = self.embed(x.argmax(1)).transpose(1, 2)
        for layer in self.decoder:
            x = layer(x)
        return x


@pytest.mark.slow
def test_code_that_torch_shares_between_blocks_of_other_widths():
    plain = Codec()
    model = planner.within(copy.deepcopy(plain), "110%", time_limit=1)
    for step in range(4):
        x = torch.randn(4, 1, 512, generator=torch.Generator().manual_seed(step))
        for each in (plain, model):
            each.zero_grad()
            each(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)
    status = planner.status(model)
    assert status.planned_steps == 4 and status.plans == 2


class Valid(nn.Module):
    """Attention of each sample over its valid tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key = (layer(x).unflatten(2, (4, 16)).transpose(1, 2)
                      for layer in (self.query, self.key))
        rows = []
        for number in range(8):
            valid = key[number:number + 1, :, torch.nonzero(mask[number]).flatten()]
            rows.append(nn.functional.scaled_dot_product_attention(
                query[number:number + 1], valid, valid))
        return self.out(torch.cat(rows).transpose(1, 2).reshape(x.shape))


@pytest.mark.slow
def test_gradients_of_a_tensor_that_many_regions_read_are_added_as_they_come():
    """They were counted as if all eight were there at once: at twice the plain step's peak."""
    x, mask = torch.randn(8, 192, 64), torch.ones(8, 192).bool()
    net, plain = planner.within(Valid(), "100%", time_limit=1), Valid()
    plain.load_state_dict(net.state_dict())

    def step(each: nn.Module) -> None:
        each.zero_grad()
        each(x, mask).square().mean().backward()

    peaks = [max(record.peak_bytes for record in record_stages(
        [lambda each=each: step(each)] * 3)[1:]) for each in (plain, net)]
    assert_same_gradients(plain, net)
    assert peaks[1] <= peaks[0]
    resident = sum(p.numel() * 4 for p in net.parameters()) + x.nbytes + mask.nbytes
    assert planner.status(net).plan.peak_bytes <= 1.05 * (resident + peaks[0])


class Mixture(nn.Module):
    """A mixture of experts as it is written by hand."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate = kind, nn.Linear(32, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        if self.kind == "where":
            for number, expert in enumerate(self.experts):
                token, rank = torch.where(chosen == number)
                if token.numel():
                    out[token] += weights[token, rank, None] * expert(x[token])
        elif self.kind == "hit":
            is_chosen = nn.functional.one_hot(chosen, 4).permute(2, 1, 0)
            for number in is_chosen.sum((-1, -2)).gt(0).nonzero().squeeze(1):
                rank, token = torch.where(is_chosen[number])
                out.index_add_(0, token,
                               self.experts[number](x[token]) * weights[token, rank, None])
        else:
            for number, expert in enumerate(self.experts):
                mask = chosen[:, 0] == number
                out[mask] = expert(x[mask]) * weights[mask, :1]
        return x + out


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), [("where", 8), ("mask", 8), ("hit", 2)])
def test_experts_that_get_more_tokens_in_later_steps(kind, steps):
    batches = [torch.randn(512, 32, generator=torch.Generator().manual_seed(seed))
               for seed in range(steps)]

    def mixtures() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Mixture(kind) for _ in range(2)))

    losses, peaks = trained(mixtures(), batches)
    budget = int(0.97 * max(peaks))
    net = planner.within(mixtures(), budget, time_limit=1)
    found, measured = trained(net, batches)
    assert found == losses
    assert max(measured) <= budget
    if steps > 2:
        graphs = forward_override(net).graphs
        assert graphs[0].planner.selects_more
        assert not graphs[0].takes_larger
        assert len(graphs) <= 3


def test_selections_that_differed_between_calls_are_planned_larger():
    nonzero, item = torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default
    mask = torch.zeros(2, 100, dtype=torch.bool)

    def answers(*rows: int) -> tuple[Answer, ...]:
        return (Answer.of(item, (mask[0, 0],), 3),
                *(Answer.of(nonzero, (mask,), torch.empty(2, count, device="meta").t())
                  for count in rows))

    first = answers(10, 20, 190)
    assert with_larger_selections(first, []) is None
    assert with_larger_selections(first, [first, answers(10, 20)]) is None
    found = with_larger_selections(first, [answers(12, 20, 180), answers(8, 20, 195)])
    assert found[0] is first[0]
    assert found[2] is first[2]
    assert [each.value.shape for each in found[1:]] == [(15, 2), (20, 2), (200, 2)]
    assert [each.value.stride() for each in found[1:]] == [(1, 15), (1, 20), (1, 200)]


class Cutting(nn.Module):
    """A block that cuts each row to its length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = zip(self.layers(x), lengths.tolist(), strict=True)
        return x + torch.stack([torch.cat([row[:length], 0 * row[length:]])
                                for row, length in rows])


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Cutting() for _ in range(3))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, lengths)
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a part of this step is not the planned one")
def test_rows_that_are_cut_to_their_lengths():
    """What takes another path than planned is planned by itself, with the sizes of its inputs."""
    plain = Ragged()
    net = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    for seed in range(6):
        torch.manual_seed(seed)
        x, lengths = torch.randn(4, 96, 32), torch.randint(48, 96, (4,))
        for each in (plain, net):
            each.zero_grad()
            each(x, lengths).square().mean().backward()
        assert_same_gradients(net, plain)
