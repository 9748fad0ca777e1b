"""`allow="chunk"` in bfloat16, plain and under autocast, and in float16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.api import capture
from tests.support.loss_head import (
    ALLOW,
    VOCAB,
    WIDTH,
    Head,
    batch,
    distance,
    gradients,
    peak_of,
)
from tests.support.training import apply_schedule

WEIGHT = f"[{VOCAB}, {WIDTH}]"


class Autocast(nn.Module):
    """A model under autocast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**inputs)


class WithoutDropout(Head):
    """Its gradients can be compared across dtypes; the loss is made in float32 at least."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()
        self.loss = lambda logits, labels, weight: F.cross_entropy(
            logits if logits.dtype is torch.float64 else logits.float(), labels)


@pytest.mark.parametrize("is_autocast", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_in_bfloat16_are_as_near_to_the_exact_ones(is_autocast):
    plain = WithoutDropout()
    plain = Autocast(plain) if is_autocast else plain.bfloat16()
    exact = gradients(copy.deepcopy(plain.model if is_autocast else plain).double(), batch())
    of_plain = distance(gradients(plain, batch()).double(), exact)
    assert of_plain > 1e-3
    step = capture(plain, batch(), allow=ALLOW, hold_output=False)
    for variant in step.variants[1:]:
        planned, timeline = apply_schedule(
            type("Of", (), {"model": plain, "inputs": batch()}), step,
            variant.problem.keep_all_schedule, variant)
        assert peak_of(planned, batch(), held=False) == timeline.peak_bytes
        found = distance(gradients(planned, batch()).double(), exact)
        assert found < 1.01 * of_plain


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "autocast"])
def test_products_add_themselves_to_a_total(kind):
    """In float32, over what they are added to, without a chunk as large as the weight."""
    model = Autocast(Head()) if kind == "autocast" else Head().to(getattr(torch, kind))
    variant = capture(model, batch(), allow=ALLOW).variants[2]
    assert variant.chunks == 8
    of_weight = [op for op in variant.graph.ops if "head/" in op.name and WEIGHT in op.result]
    products = [op for op in of_weight if "mm" in op.target]
    assert [op.target for op in products] == ["aten.mm.default"] + 7 * ["aten.addmm.default"]
    assert all(op.result.startswith("float32") for op in products)
    assert all(op.inplace for op in products[1:])
    assert not any("add.Tensor" in op.target for op in of_weight)


@pytest.mark.slow
def test_products_that_read_more_than_they_make_stay_as_they_are():
    """Of a few long chunks: to read them in float32 would take more than the chunk of the sum."""
    inputs = {key: value.repeat(16, 1) for key, value in batch().items()}
    model = Head().bfloat16()
    variant = capture(model, inputs, allow=ALLOW).variants[1]
    assert variant.chunks == 4
    sums = [op for op in variant.graph.ops if op.target == "aten.add.Tensor"
            and op.result.startswith(f"float32{WEIGHT}")]
    assert len(sums) == 3 and all(op.inplace for op in sums)
