"""The fake copy: same layout and aliasing, no memory, nothing of the original touched."""

from __future__ import annotations

import copy
import gc
import hashlib
import math
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations
from torch.profiler import ProfilerActivity, profile

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.fake import make_fake_copy

pytestmark = pytest.mark.compat


class Odd(nn.Module):
    """Tied, shared, non-contiguous, frozen, parametrized; plain and non-persistent tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.wide = nn.Parameter(torch.randn(4, 6).t())
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.register_buffer("mask", torch.ones(6, 6).tril(), persistent=False)
        self.register_buffer("row", self.mask[2:4, 1:])
        self.register_buffer("derived", self.first.weight * 2)  # not a leaf
        self.plain = torch.randn(3)
        self.held = [nn.Parameter(torch.randn(2)), {"key": self.plain}]
        self.norm = nn.BatchNorm1d(6)
        self.register_forward_pre_hook(self._hook)

    def _hook(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert module is self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.again(x) * self.frozen) + self.mask.sum() + self.derived.sum()
        return self.norm(self.normed(x)) @ self.wide + self.held[1]["key"].sum()


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name}{tensor.requires_grad}{id(tensor)}{tensor._version}".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
        digest.update(b"" if not tensor.is_leaf or tensor.grad is None
                      else tensor.grad.numpy().tobytes())
    digest.update(str([(name, m.training, sorted(vars(m))) for name, m in model.named_modules()])
                  .encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def test_layout_aliasing_and_flags_are_kept():
    model = Odd()
    model.first.eval()
    fake_copy = make_fake_copy(model, (torch.randn(5, 6),))
    copy = fake_copy.model
    assert copy.first is copy.again and copy.first.weight is copy.tied.weight
    assert copy.wide.stride() == model.wide.stride() == (1, 6)
    assert not copy.frozen.requires_grad and copy.first.weight.requires_grad
    assert copy.plain is copy.held[1]["key"] and isinstance(copy.held[0], nn.Parameter)
    assert copy.row.untyped_storage()._cdata == copy.mask.untyped_storage()._cdata
    assert copy.row.storage_offset() == model.row.storage_offset() == 13
    assert not copy.first.training and copy.norm.training
    assert "mask" not in copy.state_dict() and set(copy.state_dict()) == set(model.state_dict())
    assert fake_copy.parameters["first.weight"] is copy.first.weight
    assert fake_copy.buffers["norm.running_mean"] is copy.norm.running_mean
    assert all(tensor is not copy.plain
               for tensor in (*fake_copy.parameters.values(), *fake_copy.buffers.values()))
    assert fake_copy.fake_of[model.wide] is copy.wide
    for tensor in (
        *fake_copy.parameters.values(),
        *fake_copy.buffers.values(),
        copy.plain,
        copy.held[0],
    ):
        assert isinstance(tensor, FakeTensor) and tensor.is_leaf


def test_step_on_the_fake_copy_leaves_the_original_alone():
    model = Odd()
    batch = torch.randn(5, 6)
    model(batch).sum().backward()
    before = fingerprint(model)
    fake_copy = make_fake_copy(model, (batch,))
    with fake_copy.mode:
        fake_copy.model.train()(*fake_copy.args).sum().backward()
    assert fake_copy.parameters["first.weight"].grad.shape == (6, 6)
    assert fingerprint(model) == before


def test_resident_bytes_count_each_storage_once():
    model = Odd()
    batch = torch.randn(5, 6)
    fake_copy = make_fake_copy(
        model, (), {"x": batch, "same": batch[1:], "known": model.first.weight}
    )
    parameters = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                  for p in model.parameters()}
    buffers = 4 * (36 + 36 + 6 + 6) + 8  # mask, derived, statistics, their counter
    assert fake_copy.resident.parameters_bytes == sum(parameters.values())
    assert fake_copy.resident.buffers_bytes == buffers + 4 * (
        3 + 2
    )  # plain attributes are resident too
    assert fake_copy.resident.inputs_bytes == 4 * 5 * 6
    assert fake_copy.kwargs["known"] is fake_copy.parameters["first.weight"]
    assert (fake_copy.kwargs["same"].untyped_storage()._cdata
            == fake_copy.kwargs["x"].untyped_storage()._cdata)


def test_resident_bytes_on_cuda_are_rounded_up():
    fake_copy = make_fake_copy(nn.Linear(3, 2), (torch.randn(2, 3),), device="cuda")
    assert fake_copy.device == torch.device("cuda:0")
    assert fake_copy.resident.parameters_bytes == 1024 and fake_copy.resident.inputs_bytes == 512
    with fake_copy.mode:  # works on a machine without CUDA
        fake_copy.model(*fake_copy.args).sum().backward()


def test_meta_model_is_planned_for_the_cpu_and_takes_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(64)))  # 17 GB
    fake_copy = make_fake_copy(model, (torch.empty(4, 8192, device="meta"),))
    assert fake_copy.device == torch.device("cpu")
    assert fake_copy.resident.parameters_bytes == 64 * 4 * (8192 * 8192 + 8192)
    with fake_copy.mode:
        assert fake_copy.model(*fake_copy.args).device == torch.device("cpu")


def test_copying_allocates_nothing_of_the_size_of_a_tensor():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    batch = torch.randn(256, 512)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True,
                 acc_events=True) as profiler:
        make_fake_copy(model, (batch,))
    assert sum(max(e.self_device_memory_usage, e.self_cpu_memory_usage, 0)
               for e in profiler.key_averages()) < 1000


@dataclass
class Batch:
    tokens: torch.Tensor
    name: str
    lock: object = None


def test_inputs_of_any_shape_pass():
    data = torch.randn(2, 6, requires_grad=True)
    lock = threading.Lock()
    tokenized = pytest.importorskip("transformers").BatchEncoding(
        {"input_ids": torch.ones(2, 3, dtype=torch.long)})
    fake_copy = make_fake_copy(nn.Identity(), ((data, [3, "text", None]), Batch(data, "b"), lock),
                               {"batch": {"a": data.t()}, "encoding": tokenized})
    (copied, rest), batch, passed = fake_copy.args
    assert copied.requires_grad and rest == [3, "text", None] and passed is lock
    assert batch.tokens is copied and batch.name == "b"
    assert fake_copy.kwargs["batch"]["a"].stride() == (1, 6)
    assert isinstance(fake_copy.kwargs["encoding"]["input_ids"], FakeTensor)
    assert type(fake_copy.kwargs["encoding"]) is type(tokenized)


def test_extra_objects_share_the_models_tensors():
    model = nn.Linear(3, 3)
    loss = nn.Linear(3, 3)
    loss.weight = model.weight
    fake_copy = make_fake_copy(model, (torch.randn(1, 3),), extra=(loss, len))
    assert fake_copy.extra[0].weight is fake_copy.model.weight and fake_copy.extra[1] is len
    assert fake_copy.resident.buffers_bytes == 12


class WithGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.names = (name for name in "ab")


def test_what_cannot_be_copied_is_named():
    with pytest.raises(CaptureError, match=r"attribute `inner.names` \(generator\)"):
        make_fake_copy(WithGenerator())
    with pytest.raises(CaptureError, match="uninitialized parameters"):
        make_fake_copy(nn.LazyLinear(3))
    with pytest.raises(CaptureError, match="the model is compiled"):
        make_fake_copy(torch.compile(nn.Linear(2, 2), backend="eager"))
    with pytest.raises(ValueError, match="real device"):
        make_fake_copy(nn.Linear(2, 2), device="meta")
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got function"):
        make_fake_copy(lambda x: x)


def test_modules_of_python_and_locks_are_shared():
    model = nn.Linear(2, 2)
    model.backend, model.guard = math, [threading.Lock(), threading.RLock()]
    copied = make_fake_copy(model).model
    assert copied.backend is math
    assert copied.guard[0] is model.guard[0]
    assert copied.guard[1] is model.guard[1]
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(math)  # for others, as before


class OwnsItsOptimizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.layer.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_the_state_of_an_optimizer_that_a_module_keeps_is_no_buffer():
    model = OwnsItsOptimizer()
    model(torch.randn(2, 8)).sum().backward()
    model.optimizer.step()
    assert make_fake_copy(model).resident.buffers_bytes == 0


def test_what_hooks_keep_outside_is_there_in_the_backward_and_held_by_nobody_else():
    kept = [torch.randn(3)]
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda module, inputs, output: kept.append(output))
    fake_copy = make_fake_copy(model, (torch.randn(4, 2),))
    with fake_copy.mode:
        fake_copy.call(has_backward=True)
        assert len(kept) == 1
        with fake_copy.behind_call():
            assert len(kept) == 2
    gone = weakref.ref(kept.pop())
    gc.collect()
    assert gone() is None


class Traces(nn.Module):
    """Traces its code anew as it is copied, as those of e3nn do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.__setstate__(self.__dict__)

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "code"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        graph = fx.Graph()
        x = fx.Proxy(graph.placeholder("x"))
        graph.output(torch.cat([x, x.sin()]).node)
        self.__dict__["code"] = fx.GraphModule({}, graph)

    def forward(self, x):
        return self.code(x * self.weight)


def test_a_model_may_be_traced_as_it_is_copied():
    copied = make_fake_copy(Traces(), (torch.ones(3),))
    assert copied.call(has_backward=True).shape == (6,)
