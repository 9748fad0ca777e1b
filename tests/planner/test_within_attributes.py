"""`planner.within` where layers leave tensors in attributes: maps of attention, their losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from tests.support.measured_loops import MeasuredLoop

_LENGTHS = (92, 98, 93, 104, 96, 95, 101)


class Attending(nn.Module):
    """A block of a transformer that calls `leave` with itself and its map of attention."""

    keeps_update = False

    def __init__(self, leave) -> None:
        super().__init__()
        self.leave, self.left, self.all = leave, None, []
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(),
                                 nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        query, key, value = self.qkv(self.norm(x)).view(rows, length, 3, 4, 16).permute(
            2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) / 4).softmax(-1)
        self.leave(self, weights)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(rows, length, 64))
        update = self.mlp(x)
        if self.keeps_update:
            self.left = update
        return x + update


def _view(block, weights):
    block.left = weights.detach()


def _mean(block, weights):
    block.left = weights.detach().mean(1)


def _with_graph(block, weights):
    block.left = weights


def _in_a_list(block, weights):
    block.all[:] = [weights.detach().clone()]


def _loss(block, weights):
    block.left = weights.square().mean(1)


class Net(nn.Module):
    def __init__(self, leave) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.Sequential(*(Attending(leave) for _ in range(3)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


def _train(net, lengths, budget=None, losses_from=None) -> MeasuredLoop:
    """Train; from step `losses_from` on, the loss has a term of what the blocks have left."""
    loop = MeasuredLoop(net)
    if budget:
        planner.within(net, budget)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def run() -> None:
        for step, length in enumerate(lengths):
            loop.begin_step()
            ids = torch.randint(100, (8, length))
            loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
            if losses_from is not None and step >= losses_from:
                loss = loss + sum(block.left.mean() for block in net.blocks)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.note_loss(loss)

    loop.run(run)
    return loop


def _check_equal(mine: MeasuredLoop, plain: MeasuredLoop) -> None:
    assert mine.losses == plain.losses
    for trained, expected in zip(mine.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(trained, expected)


@pytest.mark.parametrize("leave", [
    _view, *(pytest.param(each, marks=pytest.mark.slow)
             for each in (_mean, _with_graph, _in_a_list))])
def test_what_is_left_in_attributes_is_counted(leave):
    lengths = [96] * 4
    plain = _train(Net(leave), lengths)
    planned = _train(Net(leave), lengths, "65%")
    _check_equal(planned, plain)
    plan = planner.status(planned.model).plan
    assert plan.baseline_peak_bytes == pytest.approx(plain.peaks[-1], abs=64)
    assert planned.peaks[-1] - 64 <= plan.peak_bytes <= 1.005 * planned.peaks[-1]
    assert max(planned.peaks) <= 0.65 * max(plain.peaks)


@pytest.mark.slow
def test_what_is_left_in_attributes_by_calls_of_any_size():
    plain = _train(Net(_view), _LENGTHS)
    planned = _train(Net(_view), _LENGTHS, "65%")
    _check_equal(planned, plain)
    assert max(planned.peaks) <= 0.65 * max(plain.peaks)


@pytest.mark.slow
@pytest.mark.parametrize("losses_from", [0, 4])
def test_losses_in_attributes_of_calls_of_any_size(losses_from):
    plain = _train(Net(_loss), _LENGTHS, losses_from=losses_from)
    planned = _train(Net(_loss), _LENGTHS, "70%", losses_from)
    _check_equal(planned, plain)
    assert max(planned.peaks[losses_from + 1:]) <= 0.7 * max(plain.peaks)


@pytest.mark.slow
def test_an_activation_in_an_attribute_of_which_the_loop_makes_a_loss():
    def make() -> Net:
        net = Net(lambda block, weights: None)
        for block in net.blocks:
            block.keeps_update = True
        return net

    lengths = [96] * 4
    plain = _train(make(), lengths, losses_from=0)
    planned = _train(make(), lengths, "75%", 0)
    _check_equal(planned, plain)
    assert max(planned.peaks[1:]) <= 0.75 * max(plain.peaks)
