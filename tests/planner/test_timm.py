"""Models of timm, by `planner.within` and by a plan that is applied, against the plain run.

timm imports torchvision, whose builds that are not made for the torch at hand lack the compiled
operators; no model here calls one.  Neither is installed with the tests:
docs/reference/measurements.md says what was run.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from tests.support.trained_within import STEPS, check, train

if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("timm") is None:
    pytest.skip("timm and torchvision are not installed", allow_module_level=True)

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
with contextlib.suppress(ImportError, RuntimeError):
    import torchvision  # noqa: F401
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import timm  # noqa: E402

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet": (lambda: timm.models.ResNet(
        timm.models.resnet.BasicBlock, (2, 1, 1, 1), num_classes=10, channels=(24, 24, 24, 24),
        stem_type="deep", stem_width=4), 64),
    "convnext": (lambda: timm.models.ConvNeXt(
        depths=(1, 1, 2, 1), dims=(16, 16, 16, 16), num_classes=10, drop_path_rate=0.1), 64),
    "vit": (lambda: timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=64, depth=3, num_heads=4, num_classes=10,
        proj_drop_rate=0.1), 32),
    "swin": (lambda: timm.models.SwinTransformer(
        img_size=32, patch_size=2, embed_dim=24, depths=(2, 2), num_heads=(2, 4), window_size=4,
        num_classes=10), 32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_timm(name):
    make, side = MODELS[name]
    images = torch.randn(4, 3, side, side)
    check(make, (images,), 0.7)

    torch.manual_seed(0)
    model = make().train()
    losses, peaks = train(model, (images,))
    torch.manual_seed(0)
    model = make().train()
    budget = int(0.7 * max(peaks))
    plan = planner.plan(model, (images,), budget=budget, time_limit=2,
                        loss_fn=lambda output: output.square().mean())
    found, measured = train(plan.apply(model), (images,))
    assert found == losses
    assert len(found) == STEPS
    assert max(measured) <= budget
