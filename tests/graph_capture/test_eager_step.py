"""The traced plain step against the real one, measured by the allocator's events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.fake import make_fake_copy
from planner._graph_capture.memory.allocator import AllocationRecord, record_peak
from planner._graph_capture.op_costs.probe import OpProbe
from planner._graph_capture.plain_step import micro_batch
from planner._graph_capture.plain_step.loss import objective
from planner._graph_capture.plain_step.micro_batch import EagerStep, trace_eager_step
from tests.support import models
from tests.support.models import BUILDERS, Case

pytestmark = pytest.mark.compat

DEFAULT_SIZE = {"layers": 2, "batch": 4, "seq": 96, "width": 64}
SIZES = {
    "vit": {"layers": 2, "batch": 8, "width": 64}, "unet": {"batch": 2, "image": 32},
    "resnet": {"batch": 4, "image": 32},
    "views": {"batch": 8, "seq": 64, "width": 64}, "many_outputs": {"batch": 512, "width": 128},
    "mlp_huge": {}}


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> OpProbe:
    return OpProbe("cpu", directory=Path(tmp_path_factory.mktemp("ops")))


def build(name: str) -> Case:
    return BUILDERS[name](**SIZES.get(name, DEFAULT_SIZE))


def measure(case: Case, context: Callable[[], Any] = nullcontext) -> AllocationRecord:
    def run() -> None:
        with context():
            output = case.model(*case.args, **case.kwargs)
            goal = objective(output, case.loss_fn)
        goal.backward()

    run()  # what is made once per process is made here
    case.model.zero_grad(set_to_none=True)
    record = record_peak(run, "cpu")
    case.model.zero_grad(set_to_none=True)
    return record


def trace(case: Case, probe: OpProbe, autocast: torch.dtype | None = None) -> EagerStep:
    fake_copy = dataclasses.replace(
        make_fake_copy(case.model, case.args, case.kwargs), autocast=autocast
    )
    return trace_eager_step(fake_copy, case.loss_fn, workspace=probe.workspace_bytes)


def end_bytes(step: EagerStep) -> int:
    """Memory left when the step ends and its output is released: the gradients."""
    left = (*step.blocks.gradients, *step.blocks.left_blocks)
    return sum(step.blocks.trace.blocks[block].size_bytes for block in left)


def by_category(step: EagerStep) -> dict[str, int]:
    trace = step.blocks.trace
    found = trace.by_category(trace.alive_at_peak())
    return {category.value: size for category, size in found.items() if size}


def figures(step: EagerStep) -> tuple[object, ...]:
    return (step.peak_bytes, by_category(step), step.forward_peak_bytes, end_bytes(step),
            step.with_gradient, step.loss)


@pytest.mark.parametrize("name", BUILDERS)
def test_peak_and_end_equal_the_real_step(name: str, probe: OpProbe):
    case = build(name)
    step, real = trace(case, probe), measure(case)
    tolerance = 0.02 if name in models.CONVOLUTIONAL else 0.001
    assert step.blocks.storage_less
    assert step.peak_bytes == pytest.approx(real.peak_bytes, rel=tolerance)
    assert end_bytes(step) == pytest.approx(real.end_bytes, abs=256)
    assert sum(by_category(step).values()) == step.peak_bytes >= step.forward_peak_bytes
    trainable = {id(p): p for p in case.model.parameters() if p.requires_grad}
    assert by_category(step).get("gradients", 0) <= 4 * sum(p.numel() for p in trainable.values())


@pytest.mark.parametrize("name", ["block_twice", "views", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5", "unet", "autocast"))])
def test_fake_tensors_give_the_same_where_code_does_not_ask(name, probe, monkeypatch):
    """The way taken where storage-less tensors cannot be: sums of gradients are the same."""
    case = build(name)
    storage_less = trace(case, probe)
    monkeypatch.setattr(micro_batch, "storage_less_copy", None)
    fake = trace(case, probe)
    assert not fake.blocks.storage_less
    assert figures(fake) == figures(storage_less)


def test_the_gradient_of_what_was_gathered_is_scattered_in_place(probe):
    index = torch.randint(512, (256, 1))
    case = Case(nn.Linear(64, 512), (torch.randn(256, 64),), lambda out: out.gather(1, index).sum())
    peak_bytes = trace(case, probe).peak_bytes
    assert peak_bytes == pytest.approx(measure(case).peak_bytes, rel=0.001)


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_ones_is_dropped_as_in_the_real_step(padded, probe):
    case = build("bert")
    case.kwargs["attention_mask"].fill_(1)
    if padded:
        case.kwargs["attention_mask"][0, 50:] = 0
    assert trace(case, probe).peak_bytes == pytest.approx(measure(case).peak_bytes, rel=0.001)


@pytest.mark.parametrize("name", ["language_model", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "unet", "tied"))])
def test_autocast_around_the_call(name, probe):
    case = build(name)

    def context() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    real = measure(case, context)
    assert trace(case, probe, autocast=torch.bfloat16).peak_bytes == pytest.approx(
        real.peak_bytes, rel=0.02 if name == "unet" else 0.005)
    with context():  # active at the time of the call
        assert trace(case, probe).peak_bytes == pytest.approx(
            real.peak_bytes, rel=0.02 if name == "unet" else 0.005)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_activation_checkpointing_of_the_user_is_seen(probe):
    case = build("dropout_everywhere")
    before = trace(case, probe)
    case.model.blocks = nn.ModuleList(map(Checkpointed, case.model.blocks))
    step = trace(case, probe)
    assert step.peak_bytes < 0.8 * before.peak_bytes
    # Beside them, a checkpoint keeps the random state, which autograd's ops do not show.
    kept = torch.get_rng_state().numel()
    assert step.peak_bytes == pytest.approx(measure(case).peak_bytes, abs=3 * kept)


def test_nothing_of_the_model_or_the_random_state_changes(probe):
    case = build("dropout_everywhere")
    state = {name: (id(t), t._version, t.clone()) for name, t in case.model.state_dict().items()}
    random = torch.get_rng_state()
    fake_copy = make_fake_copy(case.model, case.args, case.kwargs)
    first = trace_eager_step(fake_copy, case.loss_fn, workspace=probe.workspace_bytes)
    assert trace_eager_step(fake_copy, case.loss_fn, workspace=probe.workspace_bytes) == first
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in (*case.model.parameters(), *fake_copy.model.parameters()))
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(tensor, state[name][2])


def test_linear_layer_by_hand():
    """The caller holds the output and its cotangent to the end."""
    layer = nn.Linear(32, 16)
    fake_copy = make_fake_copy(layer, (torch.ones(8, 32),))
    step = trace_eager_step(fake_copy, workspace=lambda *call: 0)
    output, weight, bias = 4 * 8 * 16, 4 * 32 * 16, 4 * 16
    assert step.peak_bytes == 2 * output + weight + bias
    assert by_category(step) == {"activations": output, "gradients": weight + bias,
                                 "temporaries": output}
    assert (step.forward_peak_bytes, end_bytes(step)) == (2 * output, weight + bias)


class Gate(nn.Module):
    """Looks at the values of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x if x.sum() > 0 else -x


def test_control_flow_on_unknown_values_is_an_error(probe):
    fake_copy = make_fake_copy(Gate(), (torch.ones(2, 4),))
    with pytest.raises(CaptureError, match="the model's code asks for the value"):
        trace_eager_step(fake_copy, workspace=probe.workspace_bytes)


def test_footprint_of_a_loss_inside_the_model_is_its_cotangent(probe):
    step = trace(build("gpt2"), probe)
    assert (step.loss.retained_bytes, step.loss.backward_peak_bytes) == (0, 4)
    assert [g.flows for g in step.loss.outputs] == [True, False]
