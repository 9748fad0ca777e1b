"""Optimizer footprints against real steps on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.fake import make_fake_copy
from planner._graph_capture.memory.allocator import AllocationRecord, record_peak_of_op
from planner._graph_capture.optimizer.named import OPTIMIZERS
from planner._graph_capture.optimizer.step import trace_optimizer_steps
from planner._graph_capture.torch_compat import optimizers_as_on

pytestmark = pytest.mark.compat


def record(fn) -> AllocationRecord:
    return record_peak_of_op(fn, torch.device("cpu"))


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64),
                          nn.Linear(64, 8))
    model[2].requires_grad_(False)
    return model


def measured(model: nn.Module, optimizer: torch.optim.Optimizer, state_bytes: int = 0,
             ) -> tuple[int, int]:
    """State and temporaries of real steps."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    first, second = record(optimizer.step), record(optimizer.step)
    state = state_bytes + first.end_bytes
    return state, max(first.peak_bytes - first.end_bytes, second.peak_bytes)


CONFIGURATIONS = [
    ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("RMSprop", {}), ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adam", {}), ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {}), ("AdamW", {"foreach": True}), ("AdamW", {"fused": True}),
    ("AdamW", {"lr": torch.tensor(1e-3), "foreach": False}),
    ("Adamax", {}), ("NAdam", {}), ("RAdam", {}), ("ASGD", {}), ("Rprop", {}), ("Adadelta", {}),
    ("Adagrad", {}), ("Adafactor", {}), ("Adafactor", {"foreach": True})]


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS,
                         ids=[f"{n}-{'-'.join(o)}" for n, o in CONFIGURATIONS])
def test_footprint_equals_a_real_step(name, options):
    model = network()
    held = []
    made = record(lambda: held.append(getattr(torch.optim, name)(
        [p for p in model.parameters() if p.requires_grad], **options)))
    optimizer = held[0]
    fake_copy = make_fake_copy(model)
    before = copy.deepcopy(optimizer.state_dict())
    footprint = trace_optimizer_steps(optimizer, fake_copy)
    assert str(optimizer.state_dict()) == str(before)  # untouched
    assert footprint.name == name
    state, temporaries = measured(model, optimizer, made.end_bytes)
    assert footprint.state_bytes == pytest.approx(state, abs=128)  # a few scalars
    assert footprint.step_peak_bytes == pytest.approx(temporaries, rel=0.01, abs=128)
    # And with its state at hand, from a later step on.
    again = trace_optimizer_steps(optimizer, fake_copy)
    assert again.state_bytes == pytest.approx(footprint.state_bytes, abs=128)
    assert again.step_peak_bytes == pytest.approx(footprint.step_peak_bytes, abs=128)
    assert all(parameter.grad is None for parameter in fake_copy.model.parameters())


def test_every_class_of_torch_is_compared_with_real_steps():
    """Here, or in `test_closures_and_several_optimizers`."""
    elsewhere = {"lbfgs", "muon", "sparseadam"}
    assert {name.lower() for name, _ in CONFIGURATIONS} | elsewhere == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"lbfgs"}))
def test_every_name_is_traced_or_refused_clearly(name):
    """L-BFGS takes some seconds with its default history."""
    fake_copy = make_fake_copy(network())
    try:
        footprint = trace_optimizer_steps(name, fake_copy)
    except CaptureError as error:
        assert name == "sparseadam"
        assert "cannot trace a step of the optimizer" in str(error)
    else:
        assert footprint == trace_optimizer_steps(OPTIMIZERS[name], fake_copy)
        assert (footprint.state_bytes > 0) == (name != "sgd")


def test_adam_holds_two_numbers_per_trainable_parameter():
    model = network()
    footprint = trace_optimizer_steps("adamw", make_fake_copy(model))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert footprint.state_bytes == pytest.approx(8 * trainable, abs=64)


def test_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    assert trace_optimizer_steps("adam", make_fake_copy(model)).state_bytes == pytest.approx(
        8 * (32 * 32 + 64), abs=64)


def test_groups_and_a_scheduler():
    model = network()
    optimizer = torch.optim.SGD([
        {"params": model[0].parameters(), "momentum": 0.9},
        {"params": model[1].parameters(), "lr": 1.0}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    footprint = trace_optimizer_steps(optimizer, make_fake_copy(model))
    assert footprint.state_bytes == 4 * (64 * 128 + 128)
    assert scheduler.last_epoch == 0 and not optimizer.state


class Heavy(torch.optim.Optimizer):
    """An optimizer that torch does not know, with a hook."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["history"] = torch.zeros(3, *p.shape)
                state["history"][0] = p.grad * 2
                p.sub_(state["history"].mean(0), alpha=group["lr"])


def test_a_custom_optimizer():
    model = network()
    optimizer = Heavy([p for p in model.parameters() if p.requires_grad])
    called = []
    optimizer.register_step_post_hook(lambda *args: called.append(1))
    footprint = trace_optimizer_steps(optimizer, make_fake_copy(model))
    assert not called
    state, temporaries = measured(model, optimizer)
    assert footprint.state_bytes == state
    assert footprint.step_peak_bytes == pytest.approx(temporaries, abs=64)


def test_on_a_gpu_all_parameters_are_updated_at_once():
    """Torch's default there; a trace on the CPU must not hide its temporaries."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    one = 4 * 64 * 64
    for chosen in ("adam", torch.optim.Adam(model.parameters())):
        assert trace_optimizer_steps(chosen, make_fake_copy(model)).step_peak_bytes == 3 * one
        on_gpu = trace_optimizer_steps(chosen, make_fake_copy(model, device="cuda"))
        assert on_gpu.step_peak_bytes == pytest.approx(6 * one, abs=1024)


def test_nothing_and_nonsense():
    fake_copy = make_fake_copy(network())
    frozen = make_fake_copy(network().requires_grad_(False))
    assert trace_optimizer_steps("adam", frozen).state_bytes == 0
    with pytest.raises(ValueError, match="unknown optimizer 'adamv'; expected one of adadelta"):
        trace_optimizer_steps("adamv", fake_copy)
    with pytest.raises(TypeError, match="got int"):
        trace_optimizer_steps(3, fake_copy)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}])
def test_capturable_on_a_gpu_that_is_not_there(options):
    """Against real steps on the CPU, in which torch takes its tensors for a GPU's, too."""
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True, **options)
    fake_copy = make_fake_copy(model, device=torch.device("cuda"))
    footprint = trace_optimizer_steps(optimizer, fake_copy)
    with optimizers_as_on(torch.device("cuda")):
        state, temporaries = measured(model, optimizer)
    rounding = 512 * 4 * 8  # of each small tensor
    assert footprint.state_bytes == pytest.approx(state, abs=rounding)
    assert footprint.step_peak_bytes == pytest.approx(temporaries, abs=rounding)
    with pytest.warns(UserWarning, match="capturable.*its state is counted as it is"):
        assert trace_optimizer_steps(optimizer, make_fake_copy(model)).memory.state_bytes == state
    optimizer.state.clear()
    with pytest.raises(CaptureError, match="capturable"):
        trace_optimizer_steps(optimizer, make_fake_copy(model))
