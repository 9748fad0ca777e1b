"""What is differentiated, and what a loss outside the model holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.fake import make_fake_copy
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.plain_step.loss import objective, trace_loss

pytestmark = pytest.mark.compat


def test_objective_follows_the_documented_rule():
    x = torch.ones(3, requires_grad=True)
    scalar = x.sum()
    assert objective({"loss": scalar, "out": x}, None).roots == (scalar,)
    assert objective(scalar, None).roots == (scalar,)
    assert objective([x], lambda out: out[0].prod()).seeds == (None,)
    several = objective((x * 2, {"more": x * 3, "count": torch.tensor(1)}), None)
    assert [tuple(seed.shape) for seed in several.seeds] == [(3,), (3,)]
    for output, loss_fn, message in (
            (x, lambda out: out * 2, r"shape \(3,\); expected one element"),
            (x, lambda out: 3.0, "is a float; expected a tensor"),
            (x, lambda out: out.detach().sum(), "needs no gradient"),
            ({"loss": scalar.detach()}, None, "needs no gradient"),
            (torch.ones(3), None, "no tensor that needs a gradient was found in what the model")):
        with pytest.raises(CaptureError, match=message):
            objective(output, loss_fn)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    unused: torch.Tensor


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.first(x), self.second(x))


def test_footprint_of_a_loss_outside_the_model():
    """Cross-entropy keeps the log-probabilities, and makes their gradient before the logits'."""
    labels = torch.zeros(6, dtype=torch.long)
    fake_copy = make_fake_copy(TwoHeads(), (torch.ones(6, 8),))
    with fake_copy.mode:
        output = fake_copy.model(*fake_copy.args)
    footprint = trace_loss(lambda out: F.cross_entropy(out.logits, labels), output, fake_copy,
                           lambda *call: 0)
    logits = 4 * 6 * 16
    assert footprint.retained_bytes == logits + 4 + 4  # log-probabilities, total weight, loss
    assert footprint.forward_peak_bytes == footprint.retained_bytes
    assert footprint.backward_peak_bytes == 3 * logits + 4 + 4
    assert [(g.flows, g.size_bytes) for g in footprint.outputs] == [(True, logits), (False, 0)]
    assert output.logits.grad_fn is not None  # the model's graph can still be used


def test_output_tensors_are_found_through_containers_and_dataclasses():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [t.numel() for t in output_tensors(({"x": a, "n": 3}, [Output(b, c)]))] == [1, 2, 3]


def test_several_outputs_have_cotangents_of_their_own_size():
    fake_copy = make_fake_copy(TwoHeads(), (torch.ones(6, 8),))
    with fake_copy.mode:
        output = fake_copy.model(*fake_copy.args)
    footprint = trace_loss(None, output, fake_copy, lambda *call: 0)
    assert [g.size_bytes for g in footprint.outputs] == [4 * 6 * 16, 4 * 6 * 4]
    assert footprint.retained_bytes == footprint.backward_peak_bytes == 4 * 6 * 20
