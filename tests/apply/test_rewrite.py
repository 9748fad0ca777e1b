"""The rewriter emits the actions that it knows, and no others."""

import pytest
import torch
from torch import nn

from planner._apply.rewrite import rewrite
from planner._apply.rewrite_spec import Insertion, RunAgain
from tests.support.regions import lowered


def test_an_action_that_the_rewriter_does_not_know_is_refused():
    region = lowered(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(3, 2))
    first, backward = region.ops[0].name, region.ops[region.num_forward].name
    rewrite(region, (Insertion(backward, (RunAgain(first),)),))
    with pytest.raises(ValueError, match=r"'offload' is no action .* it knows RunAgain"):
        rewrite(region, (Insertion(backward, ("offload",)),))
