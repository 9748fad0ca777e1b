"""Models as other people write them, trained by `planner.within`: the losses of the plain run,
every step within the budget; or an error that says the way out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import planner
from tests.support.trained_within import check, train
from tests.support.training import assert_same_gradients


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = getattr(nn, kind)(32, 64, batch_first=True, **options)
        self.head = nn.Linear(64, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(ids))[0]))


@pytest.mark.parametrize("kind", [
    pytest.param("GRU", marks=pytest.mark.slow), "RNN", "LSTM"])
def test_recurrent_layers(kind):
    check(lambda: Recurrent(kind, num_layers=2), (torch.arange(192).view(32, 6) % 50,), 0.85)


class Unrolled(nn.Module):
    """A cell whose gates are slices of one product, which the schema of their op does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x
        for _ in range(3):
            state = self.cell(torch.relu(state), state)
        return state


@pytest.mark.slow
def test_the_gates_of_a_cell_are_counted_once():
    check(Unrolled, (torch.linspace(-1, 1, 512 * 64).view(512, 64),), 0.46)


class Rotated(nn.Module):
    """Layers with a rotation by Cayley's formula; torch checks the solution of its equations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 256), nn.Linear(256, 64)
        self.matrix = nn.Parameter(0.1 * torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skew, one = self.matrix - self.matrix.T, torch.eye(64)
        return self.last(torch.tanh(self.first(x))) @ torch.linalg.solve(one + skew, one - skew)


@pytest.mark.parametrize("rows", [(512,) * 3, (512, 400, 256, 300)], ids=["same", "any"])
def test_ops_with_effects(rows):
    nets = [Rotated()]
    nets.append(planner.within(copy.deepcopy(nets[0]), "90%", time_limit=1))
    for count in rows:
        x = torch.randn(count, 32)
        for net in nets:
            net.zero_grad()
            net(x).square().mean().backward()
        assert_same_gradients(nets[1], nets[0])
    assert planner.steps_of(nets[1]).unplanned == 0


class Packed(Recurrent):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True)
        return self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


def test_a_packed_sequence_is_refused_with_the_way_out():
    inputs = torch.arange(24).view(4, 6), torch.tensor([6, 5, 3, 2])
    model = planner.within(Packed("GRU"), "80%", time_limit=1)
    with pytest.raises(planner.CaptureError, match=r"test_ordinary_models\.py:\d+ "
                       r"\(`packed = pack_padded_sequence.*give the layer"):
        model(*inputs)
    with pytest.raises(planner.CaptureError, match=r"test_ordinary_models\.py:\d+ \(`packed = "):
        planner.plan(model, inputs, budget="80%", loss_fn=lambda out: out.sum())


class Padded(Recurrent):
    """The way out of a packed sequence: what lies behind the end of each is masked."""

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        is_there = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
        hidden = self.layer(self.embedding(ids))[0] * is_there[..., None]
        return self.head(torch.tanh(hidden))


@pytest.mark.slow
def test_the_way_out_of_a_packed_sequence():
    check(lambda: Padded("GRU"), (torch.arange(32 * 6).view(32, 6) % 50,
                                  torch.arange(32) % 6 + 1), 0.85)


class PreNorm(nn.Module):
    """Its normalized input goes three times into the attention of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norms[0](x)
        x = x + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return x + self.wide(self.norms[1](x))


def test_gradients_of_the_first_step_which_is_watched():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(100, 32), *(PreNorm() for _ in range(3)), nn.Linear(32, 100))
    model = planner.within(copy.deepcopy(plain), "60%", time_limit=1)
    ids = torch.randint(100, (16, 32))
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            nn.functional.cross_entropy(each(ids).flatten(0, 1), ids.flatten()).backward()
        assert_same_gradients(model, plain)


class Messages(nn.Module):
    """A network on a graph that gathers from and adds to nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(),
                                                  nn.Linear(128, 32)) for _ in range(3))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for layer in self.layers:
            messages = layer(torch.cat([nodes[source], nodes[target]], dim=1))
            nodes = nodes + torch.zeros_like(nodes).index_add(0, target, messages)
        return nodes


def test_messages_on_a_graph():
    check(Messages, (torch.randn(40, 32), torch.randint(40, (2, 200))))


class MovingAverage(nn.Module):
    """Keeps averages of what it sees in buffers, as a codebook does, and normalizes images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16),
                                  nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 1))
        self.register_buffer("average", torch.zeros(16))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
        return x + self.body(x - self.average[:, None, None])


def test_buffers_that_are_updated_inside():
    images = torch.randn(4, 3, 16, 16)
    model = check(MovingAverage, (images,), 0.85)
    torch.manual_seed(0)
    plain = MovingAverage().train()
    train(plain, (images,))
    for (name, expected), found in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(found, expected), name


class Hooked(nn.Module):
    """Logs values in hooks, of a layer and of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
                                   for _ in range(2))
        self.log: list[float] = []
        for module in (self.first, self):
            module.register_forward_hook(self.note)

    def note(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.log.append(output.abs().max().item())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 never captures the code of "
                    "nn.Sequential by itself, where a hook has broken the graph before it")
def test_hooks_that_log_values():
    check(Hooked, (torch.randn(64, 32),), 0.85)


def mixture(kind: str, **options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 64, "use_cache": False, **options}
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(
            intermediate_size=32, num_local_experts=4, **sizes))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        intermediate_size=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        head_dim=16, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_mixtures_of_experts_in_float32(kind):
    ids = torch.arange(4 * 32).view(4, 32) % 64
    check(lambda: mixture(kind), {"input_ids": ids, "labels": ids.clone()})


@pytest.mark.slow
def test_a_plan_of_a_new_model_that_registers_hooks_when_it_is_called():
    """The hooks that collect the routers' logits, before which the graph breaks once."""
    ids = torch.arange(4 * 32).view(4, 32) % 64
    batch = {"input_ids": ids, "labels": ids.clone()}
    model = mixture("mixtral", output_router_logits=True)
    plan = planner.plan(model, batch, budget="90%")
    planned = plan.apply(model)
    for _ in range(2):
        planned(**batch).loss.backward()
    assert planner.steps_of(planned).planned == 2
    report = planner.verify(model, plan, batch)
    assert report.ok and report.peak_bytes == plan.peak_bytes
