"""Losses that lie in the storage of what they were reduced from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import planner
from planner._graph_capture.joint_graph.reduced_losses import in_its_storage
from tests.support.models import Case
from tests.support.training import measured_peak

pytestmark = pytest.mark.compat

Loss = Callable[..., Tensor]


def of_probabilities(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **options)


def of_signs(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.soft_margin_loss(x, y.sign(), **options)


LOSSES: list[Loss] = [F.mse_loss, F.smooth_l1_loss, of_probabilities, of_signs, F.huber_loss,
                      F.l1_loss, F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss,
                      F.hinge_embedding_loss, F.multilabel_soft_margin_loss]


class Compared(TorchDispatchMode):
    """Runs each op on fake tensors, too, and compares the storages of the results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not func.is_view:
            mode = FakeTensorMode()
            args, kwargs = tree_map(lambda leaf: mode.from_tensor(leaf)
                                    if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            with mode:
                fake = func(*args, **kwargs)
            fake = in_its_storage(func, args, kwargs, fake)
            assert fake.untyped_storage().nbytes() == result.untyped_storage().nbytes(), func
            assert (fake.shape, fake.dtype) == (result.shape, result.dtype)
        return result


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_storages_are_those_of_the_real_kernels(loss: Loss, reduction: str) -> None:
    with Compared():
        loss(torch.randn(8, 6), torch.randn(8, 6), reduction=reduction)
        loss(torch.randn(8, 6).t(), torch.randn(6, 8), reduction=reduction)


class Regression(nn.Module):
    """Layers, and the loss inside where one is given."""

    def __init__(self, loss: Loss | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(4)
                                      for part in (nn.Linear(16, 16), nn.GELU())))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return y if self.loss is None else self.loss(y, torch.ones(y.shape[-1]).expand_as(y))


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("loss", LOSSES[:5])
def test_predicted_is_measured(loss: Loss, is_inside: bool) -> None:
    case = Case(Regression(loss if is_inside else None), (torch.randn(64, 16),),
                loss_fn=None if is_inside else lambda y: loss(y, torch.ones_like(y)))
    plan = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, budget="85%")
    assert plan.resident_bytes + measured_peak(case.model, case) == plan.baseline_peak_bytes
    assert plan.resident_bytes + measured_peak(plan.apply(case.model), case) == plan.peak_bytes
