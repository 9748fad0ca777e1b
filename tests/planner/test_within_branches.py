"""`planner.within` where a later step does more than the first: the branch is planned when it
comes, or a warning says why it is not."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from tests.support.measured_loops import MeasuredLoop
from tests.support.training import assert_same_gradients


class Gated(nn.Module):
    """A value decides, behind all that is compiled, whether there is more to do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.more = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        loss = self.first(x).square().mean()
        if gate.item() > 0:
            return loss + self.more(x).square().mean()
        return loss


class Hidden(Gated):
    """What there is more to do torch.compile may not see."""

    switched_on = False

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x), gate).square().mean()

    @torch.compiler.disable
    def rest(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.more(x) if self.switched_on else x


class HiddenByValue(Hidden):
    """A value decides in there."""

    @torch.compiler.disable
    def rest(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.more(x) if gate > 0 else x


class Sometimes(nn.Module):
    """Values decide whether it does anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand(1) > 0.3:
            x = x + self.layers(x)
        return x


class WithContext(nn.Module):
    """Values decide inside of a `with`, as all that runs under peft's models does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Sometimes() for _ in range(3))
        self.last = nn.Linear(32, 1)

    @contextlib.contextmanager
    def prepared(self):
        yield

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        with self.prepared():
            return self.run(x)


class Exiting(nn.Module):
    """Returns what each of its blocks predicts, up to one that values choose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Sometimes() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            found.append(head(x))
            if torch.rand(1) < 0.3:
                break
        return found


def train(net: nn.Module, gates: list[int]) -> list[float]:
    losses, optimizer = [], torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    for gate in gates:
        loss = net(x, torch.tensor(gate))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_values_may_decide_inside_of_a_context():
    plain = WithContext()
    net = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    torch.manual_seed(0)
    expected = train(plain, [1] * 5)
    torch.manual_seed(0)
    assert train(net, [1] * 5) == expected
    assert planner.status(net).planned_steps == 5


@pytest.mark.slow
def test_values_may_decide_how_many_outputs_there_are():
    x = torch.randn(64, 32)
    losses: dict[bool, list[float]] = {}
    for is_planned in (False, True):
        net = Exiting()
        if is_planned:
            planner.within(net, "90%", time_limit=1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses[is_planned] = []
        for step in range(8):
            torch.manual_seed(step)
            loss = torch.stack([each.square().mean() for each in net(x)]).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[is_planned].append(loss.item())
    assert losses[True] == losses[False]
    assert planner.status(net).planned_steps == 8


class Normalized(nn.Module):
    """Takes scale and shift from the first batch: a buffer, which nothing else reads, tells whether
    it has (activation normalization, codebooks that begin with a batch)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))
        self.register_buffer("is_set", torch.tensor(False))
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 1e-6))
                self.shift.copy_(-x.mean(0))
                self.is_set.fill_(True)
        x = (x + self.shift) * self.scale
        return x + self.layers(x)


@pytest.mark.slow
def test_a_buffer_may_decide_that_nothing_else_reads():
    torch.manual_seed(0)
    plain = nn.Sequential(Normalized(), Normalized())
    net = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    for step in range(3):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)) * 2 + 1
        for each in (plain, net):
            each.zero_grad()
            each(x).square().mean().backward()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs) and torch.equal(mine.grad, theirs.grad)
    for each in (plain, net):
        each[0].is_set.fill_(False)  # by the user's own code
    assert torch.equal(net(x), plain(x))


class Codebook(nn.Module):
    """Counts how often codes are used, and replaces those that are not, through `view`s."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor], *, breaks: bool = False
                 ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.breaks = breaks
        self.encode = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.decode = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.register_buffer("codes", torch.randn(64, 32))
        self.register_buffer("counts", torch.ones(64))
        self.view = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        found = torch.cdist(z.detach(), self.codes).argmin(1)
        code = self.codes[found]
        with torch.no_grad():
            self.view(self.counts).lerp_(F.one_hot(found, 64).float().sum(0), 0.5)
            if self.breaks:
                torch._dynamo.graph_break()
            dead = self.counts < 1
            if dead.any():
                self.view(self.codes)[dead] = x[torch.randperm(len(x))[:int(dead.sum())]]
                self.view(self.counts)[dead] = 1.0
        return self.decode(z + (code - z).detach())


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("view", [
    lambda each: each.data, pytest.param(lambda each: each[:], marks=pytest.mark.slow)],
    ids=["data", "slice"])
def test_a_buffer_may_decide_that_is_written_by_a_view(view, breaks):
    plain = Codebook(view, breaks=breaks)
    net = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    for step in range(4):
        x = torch.randn(128, 32, generator=torch.Generator().manual_seed(step))
        for each in (plain, net):
            torch.manual_seed(step)
            each.zero_grad()
            each(x).square().mean().backward()
        assert all(map(torch.equal, net.buffers(), plain.buffers()))
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_a_refusal_leaves_gradients_enabled():
    with pytest.raises(planner.CaptureError, match="value"):
        planner.plan(Codebook(lambda each: each.data), torch.randn(128, 32))
    assert torch.is_grad_enabled()


class Logging(nn.Module):
    """Computes with a value behind each of its layers, which are torch's own; torch gives up on a
    loop over a generator, if `is_lazy`."""

    def __init__(self, *, is_lazy: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_lazy = is_lazy
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(4))
        self.norms: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = 0.0
        pairs = zip(self.layers, self.heads, strict=True)
        for layer, head in (pair for pair in pairs) if self.is_lazy else pairs:
            x = layer(x)
            loss = loss + head(x).square().mean()
            self.norms.append(round(x.norm().item(), 3))
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("is_lazy", [False, True])
def test_layers_of_torch_between_which_values_are_read_are_planned(is_lazy: bool):
    """By their blocks, if as a whole torch runs them as they are written."""
    losses = []
    for budget in ("", "60%"):
        net = Logging(is_lazy=is_lazy)
        if budget:
            planner.within(net, budget, time_limit=1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(step)
            loss = net(torch.randn(16, 32, 32))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    status = planner.status(net)
    assert status.plan.limited_bytes <= status.budget_bytes
    assert len(status.plan.spec.blocks) == (4 if is_lazy else 0)


class Split(nn.Module):
    """Makes views alone between two values that it reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))
        self.last = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if int(counts[0]) > 0:
            hidden = hidden + 1
        parts = hidden.chunk(4)
        if int(counts[1]) > 0:
            parts = parts[::-1]
        return self.last(torch.cat(parts))


def test_views_alone_between_values_that_are_read():
    plain = Split()
    net = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    for _ in range(3):
        x, counts = torch.randn(512, 32), torch.tensor([1, 2])
        for each in (plain, net):
            each.zero_grad()
            each(x, counts).square().mean().backward()
        assert_same_gradients(net, plain)


@pytest.mark.slow
def test_a_branch_with_nothing_to_compile_at_first_is_planned_when_it_does_more():
    plain = Gated()
    net = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    assert train(net, [-1, -1]) == train(plain, [-1, -1])
    small = planner.plan_of(net)
    assert train(net, [1, 1]) == train(plain, [1, 1])
    large = planner.plan_of(net)
    assert (len(small.spec.regions), len(large.spec.regions)) == (1, 2)
    assert planner.steps_of(net).planned == 4
    assert train(net, [-1]) == train(plain, [-1])
    assert planner.steps_of(net).planned == 5


def test_code_that_is_not_compiled_and_does_more_is_warned_of_once():
    plain = Hidden()
    net = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    found = train(net, [0, 0])
    expected = train(plain, [0, 0])
    plain.switched_on = net.switched_on = True
    with pytest.warns(UserWarning, match="did more in this step than when it was planned"):
        found += train(net, [0])
    found += train(net, [0])  # another warning would be an error
    assert found == expected + train(plain, [0, 0])
    counts = planner.steps_of(net)
    assert (counts.planned, counts.unplanned) == (2, 2)


@pytest.mark.slow
def test_such_code_that_a_value_steers_is_planned_anew():
    plain = HiddenByValue()
    net = planner.within(copy.deepcopy(plain), "1MB", time_limit=1)
    found = train(net, [-1, -1])
    small = planner.plan_of(net)
    assert found + train(net, [1, -1, 1]) == train(plain, [-1, -1]) + train(plain, [1, -1, 1])
    assert planner.plan_of(net).peak_bytes > small.peak_bytes
    assert planner.steps_of(net).planned == 5


class Selecting(Gated):
    """Rows are selected by their values."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.more(h[h.sum(-1) > gate]).sum() + h.square().mean()


def test_an_empty_selection_is_planned():
    gates = [1_000, 1_000, 0]
    expected, net = train(Selecting(), gates), Selecting()
    planner.within(net, "100%")
    assert train(net, gates) == expected
    assert planner.status(net).planned_steps == 3


class ScheduledSampling(nn.Module):
    """Each step reads the target before it, or its own guess, as the dice decide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell = nn.Embedding(16, 16), nn.GRUCell(16, 16)
        self.head = nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state, token, losses = torch.zeros(len(tokens), 16), tokens[:, 0], []
        for target in tokens[:, 1:].unbind(1):
            state = self.cell(self.embed(token), state)
            logits = self.head(state)
            losses.append(F.cross_entropy(logits, target))
            token = target if torch.rand(()) < 0.5 else logits.argmax(-1)
        return torch.stack(losses).mean()


@pytest.mark.slow
def test_another_path_may_give_gradients_to_other_outputs_of_a_region():
    plain, tokens = ScheduledSampling(), torch.randint(16, (4, 4))
    net = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    losses: list[list[float]] = []
    for model in (plain, net):
        torch.manual_seed(0)
        losses.append([])
        for _ in range(3):
            loss = model(tokens)
            loss.backward()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    assert planner.steps_of(net).planned == 3


class Momentum(nn.Module):
    """An encoder with a moving average and a queue of what that has computed, all of which the
    forward updates."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.average = copy.deepcopy(self.encoder).requires_grad_(False)
        self.queue = nn.Buffer(torch.randn(64, 16))
        self.place = nn.Buffer(torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _update(self) -> None:
        for mine, other in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
            if self.how == "assigned":
                mine.data = mine.data * 0.5 + other.data * 0.5
            else:
                mine.data.mul_(0.5).add_(other.data, alpha=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.encoder(x)
        with torch.no_grad():
            self._update()
            wanted = self.average(x)
        loss = (found @ self.queue.clone().T).square().mean() + (found - wanted).square().mean()
        self._enqueue(wanted)
        return loss

    @torch.no_grad()
    def _enqueue(self, keys: torch.Tensor) -> None:
        place = int(self.place)
        self.queue[place:place + len(keys)] = keys
        self.place[0] = (place + len(keys)) % 64


@pytest.mark.slow
@pytest.mark.parametrize("how", ["assigned", "in place"])
def test_what_the_forward_writes_is_written_once(how):
    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1)
        losses = []
        for seed in range(2):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss = model(torch.randn(16, 32))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain, model = Momentum(how), planner.within(Momentum(how), "1MB")
    assert train(model) == train(plain)
    trained = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(trained[name], value), name
    assert planner.status(model).planned_steps == 2


class Causal(nn.Module):
    """`nn.Transformer` with a causal mask, which compares it with one of its own to see that."""

    def __init__(self, given: str) -> None:
        super().__init__()
        self.given = given
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.body = nn.Transformer(32, 4, 1, 2, 64, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        length = x.shape[1]
        if self.given == "buffer":
            mask = self.mask[:length, :length]
        if self.given == "made inside":
            mask = nn.Transformer.generate_square_subsequent_mask(length)
        embedded = self.embedding(x)
        return self.head(self.body(embedded, embedded, tgt_mask=mask)).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("given", ["argument", "buffer", "made inside"])
def test_masks_of_floats_are_looked_at_as_in_the_plain_step(given):
    torch.manual_seed(0)
    plain, mask = Causal(given), nn.Transformer.generate_square_subsequent_mask(16)
    net = planner.within(copy.deepcopy(plain), "60%", time_limit=1)
    found: list[list[torch.Tensor | None]] = []
    for each in (plain, net):
        torch.manual_seed(1)
        for length in (16, 12) if given == "argument" else (16, 16):
            each.zero_grad()
            each(torch.randint(0, 50, (8, length)), mask[:length, :length]).backward()
        found.append([parameter.grad for parameter in each.parameters()])
    for mine, theirs in zip(*found, strict=True):
        assert mine is not None and theirs is not None and torch.equal(mine, theirs)
    assert planner.status(net).planned_steps == 2


class ScaledByItsNorm(nn.Module):
    """The code takes the exponential of a number of a tensor, which is a constant for torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        scale = math.exp(hidden.norm().item() / 100)
        return self.last(hidden / scale).square().mean()


def test_code_that_is_compiled_in_each_call_is_warned_of_once():
    net = planner.within(ScaledByItsNorm(), "95%", time_limit=1)
    x, optimizer = torch.randn(64, 32), torch.optim.SGD(net.parameters(), lr=0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            net(x).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(3)
    with pytest.warns(UserWarning, match="compiled anew in each call") as warned:
        train(7)
    assert len(warned) == 1


class ForceField(nn.Module):
    """The forward takes a gradient that the loss differentiates again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        positions.requires_grad_()
        energy = self.net(positions).sum()
        return torch.autograd.grad(energy, positions, create_graph=True)[0]


def test_a_forward_that_takes_gradients_to_differentiate_them_runs_as_it_is_written():
    def train(net: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.ones(16, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in net.parameters()]

    net = planner.within(ForceField(), "95%")
    with pytest.warns(UserWarning) as warned:
        ours = train(net)
    assert ["create_graph" in str(each.message) for each in warned] == [True]
    assert all(map(torch.equal, ours, train(ForceField())))


class Adaptive(nn.Module):
    """Solves a differential equation in steps whose size follows from the error of the last: values
    decide, and of a step that is refused nothing reaches the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.slope = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time, step = torch.zeros(()), torch.tensor(0.25)
        while float(time) < 1:
            step = torch.minimum(step, 1 - time)
            first = self.slope(x)
            second = self.slope(x + step * first)
            error = ((second - first) * step / 2).abs().max()
            if error.item() < 0.05:
                x, time = x + step * (first + second) / 2, time + step
            step = step.detach() * torch.clamp(0.9 * (0.05 / error.detach()).sqrt(), 0.3, 2.0)
        return x


@pytest.mark.slow
def test_the_step_size_of_a_differential_equation_may_follow_from_values():
    plain = Adaptive()
    net = planner.within(copy.deepcopy(plain), "70%", time_limit=1)
    for step in range(3):
        x = torch.randn(128, 32, generator=torch.Generator().manual_seed(step)) * 3
        for each in (plain, net):
            each.zero_grad()
            each(x).square().mean().backward()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


class Noised(nn.Module):
    """Noise whose bounds are values (NEFTune, arXiv:2310.05914); an output that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(100, 32), nn.Embedding(64, 32)
        self.first, self.norm, self.pooler = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)
        self.layers = nn.Sequential(*(nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)))
        self.embed.register_forward_hook(self.noise)

    @staticmethod
    def noise(module: nn.Module, args: tuple[torch.Tensor], made: torch.Tensor) -> torch.Tensor:
        bound = 5 / torch.sqrt(torch.tensor(made.size(1) * made.size(2)))
        return made + torch.zeros_like(made).uniform_(-bound, bound)

    def embedded(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.first(self.embed(ids)) + self.position.weight[:ids.shape[1]])
        torch._dynamo.graph_break()
        return x, torch.tanh(self.pooler(x))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _ = self.embedded(ids)
        torch._dynamo.graph_break()
        x = self.layers(x)
        return x, torch.tanh(self.pooler(x))


def test_inputs_of_regions_whose_gradients_are_all_planned_are_let_go():
    loops = []
    for budget in (None, "70%"):
        loop = MeasuredLoop(Noised())
        net = loop.model if budget is None else planner.within(loop.model, budget, time_limit=1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def run(loop=loop, net=net, optimizer=optimizer) -> None:
            for _ in range(4):
                loop.begin_step()
                loss = net(torch.randint(100, (16, 64)))[0].square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loop.note_loss(loss)

        loop.run(run)
        loops.append(loop)
    plain, planned = loops
    assert planned.losses == plain.losses
    assert max(planned.peaks) <= 0.7 * max(plain.peaks)
    assert planned.peaks[-1] - 256 <= planner.status(planned.model).plan.peak_bytes


class Heads(nn.Module):
    """A text decides which head runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
                                    for _ in range(3)))
        self.heads = nn.ModuleDict({"narrow": nn.Linear(32, 2), "wide": nn.Linear(32, 400)})

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return self.heads[head](self.body(x))


def test_a_percentage_is_not_of_another_step_whose_graph_was_tried():
    net = planner.within(Heads(), "75%", time_limit=1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    budgets: dict[str, int] = {}
    for head in ["narrow", "wide"] * 3:
        net(torch.randn(256, 32), head).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plan = planner.plan_of(net)
        budgets[head] = plan.budget_bytes
        assert plan.budget_bytes == pytest.approx(0.75 * plan.baseline_peak_bytes, rel=0.01)
    assert budgets["wide"] > 1.1 * budgets["narrow"]
