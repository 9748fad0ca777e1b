"""Storage-less tensors: plain to all who ask, without memory, with the values that are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from planner._graph_capture.errors import DataDependentValue
from planner._graph_capture.fake_copies.fake import make_fake_copy
from planner._graph_capture.fake_copies.storage_less import (
    StorageLessMode,
    storage_less_copy,
    storage_less_storage,
)
from planner._graph_capture.torch_compat import storage_key, tensor_in_storage


class Inspecting(nn.Module):
    """Acts on what it sees of its inputs, as code does that treats tracing in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("steps", torch.tensor(7))
        self.seen: list[object] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.seen += [type(x), type(self.linear.weight), bool(mask.bool().all()),
                      int((mask.sum() + self.steps).item()), mask.nonzero().shape[0]]
        y = self.norm(self.linear(x)) * mask[:, None]
        return torch.relu_(y).t().contiguous().view(-1)


MEMORY = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "acc_events": True}

def fake_copy_of(model: nn.Module, *args: object) -> object:
    return storage_less_copy(make_fake_copy(model, args))


def test_code_sees_plain_tensors_and_the_values_of_integers():
    model, mask = Inspecting(), torch.tensor([1, 1, 0])
    fake_copy = fake_copy_of(model, torch.randn(3, 8), mask)
    with fake_copy.mode:
        out = fake_copy.model(*fake_copy.args)
        out.sum().backward()
    assert fake_copy.model.seen == [torch.Tensor, nn.Parameter, False, 9, 2] and not model.seen
    assert type(out) is torch.Tensor and out.shape == (24,) and out.requires_grad
    grad = fake_copy.model.linear.weight.grad
    assert type(grad) is torch.Tensor and grad.shape == (8, 8)
    assert model.norm.num_batches_tracked == 0 and model.linear.weight.grad is None
    assert torch.equal(mask, torch.tensor([1, 1, 0]))


def test_values_of_weights_are_not_known():
    fake_copy = fake_copy_of(nn.Linear(4, 4), torch.randn(2, 4))
    with fake_copy.mode, pytest.raises(DataDependentValue, match="looks at the value of a tensor"):
        bool(fake_copy.model(*fake_copy.args).sum() > 0)


def test_what_is_overwritten_by_an_unknown_value_is_no_longer_known():
    fake_copy = fake_copy_of(nn.Linear(4, 1), torch.randn(2, 4))
    with fake_copy.mode, torch.no_grad():
        known = torch.zeros(2, 1)
        view = known[0]
        assert view.item() == 0
        known.copy_(fake_copy.model(*fake_copy.args))
        with pytest.raises(DataDependentValue):
            view.item()


def test_code_that_writes_behind_the_dispatchers_back_leaves_no_known_values():
    mode = StorageLessMode()
    with mode:
        with mode.without_values():
            written, taken = torch.zeros(3), torch.ones(3)
            torch.add(taken, 1, out=written)
        with pytest.raises(DataDependentValue):
            written.sum().item()
        assert torch.ones(3).sum().item() == 3


def test_no_memory_is_taken_however_large():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(40_000, 40_000) for _ in range(4)))  # 26 GB
    fake_copy = fake_copy_of(model, torch.empty(1000, 40_000, device="meta"))
    with profile(**MEMORY) as profiler, fake_copy.mode:
        fake_copy.model(*fake_copy.args).sum().backward()
    assert sum(max(0, event.self_cpu_memory_usage) for event in profiler.key_averages()) < 10_000
    assert fake_copy.model[0].weight.grad.untyped_storage().nbytes() == 4 * 40_000**2


def test_an_empty_tensor_of_floats_takes_no_memory():
    with profile(**MEMORY) as profiler:
        with StorageLessMode():
            tiles = [torch.empty(1000, 1000), torch.ones(()).new_empty(1000, 1000)]
            positions = torch.empty(3, dtype=torch.int64).fill_(2)
            assert positions.tolist() == [2, 2, 2]
        assert [tile.shape for tile in tiles] == [(1000, 1000)] * 2
    assert sum(max(0, event.self_cpu_memory_usage) for event in profiler.key_averages()) < 10_000


def test_aliases_stay_aliases():
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(6, 4).t())
    model.register_buffer("part", model.weight.detach()[1:3])
    fake_copy = fake_copy_of(model, torch.randn(2))
    weight, part = fake_copy.model.weight, fake_copy.model.part
    assert weight.stride() == (1, 4) and storage_key(weight) == storage_key(part)
    with fake_copy.mode:
        flat = torch.ops.aten._unsafe_view.default(weight.detach().t(), [24])
    assert storage_key(flat) == storage_key(weight)


def test_random_ops_leave_the_random_state_alone():
    state = torch.get_rng_state()
    with StorageLessMode():
        torch.nn.functional.dropout(torch.rand(100), 0.5)
        torch.randint(0, 10, (5,))
    assert torch.equal(torch.get_rng_state(), state)


def test_reading_behind_the_dispatchers_back_yields_zeros():
    tensor = tensor_in_storage(storage_less_storage(24), torch.empty(2, 3, device="meta"))
    assert tensor.numpy().tolist() == [[0.0] * 3] * 2
