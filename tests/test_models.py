"""The tests' models: each takes a step, and a repeated build gives the same one."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import BUILDERS, step


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_step_is_finite_and_reproducible(name: str):
    losses = []
    for _ in range(2):
        case = BUILDERS[name]()
        torch.manual_seed(1)
        losses.append(step(case))
        trained = [p for p in case.model.parameters() if p.requires_grad]
        assert sum(p.grad is not None for p in trained) >= len(trained) - 2  # an unused output
    assert torch.isfinite(losses[0]) and torch.equal(*losses)
