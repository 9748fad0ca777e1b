"""Calls that compute the same value become one, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse

from planner._graph_capture.joint_graph.duplicates import without_duplicates
from tests.support import models
from tests.support.regions import recorded

pytestmark = pytest.mark.compat
_aten = torch.ops.aten


@pytest.mark.parametrize(("build", "size"), [
    (models.language_model, {}), (models.resnet, {"stages": 2, "image": 16}), (models.views, {})])
def test_torch_merges_the_same_calls(build, size):
    case = build(**size)
    (call,) = recorded(case.model, *case.args, loss_fn=case.loss_fn).calls
    graph = call.region.joint.graph
    assert ([node.name for node in without_duplicates(graph).nodes]
            == [node.name for node in fx_graph_cse(graph).nodes])


def _merged(*calls) -> int:
    """How many of these calls, each with the placeholder as first argument, are left."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(4)
    for target, *rest in calls:
        node = graph.call_function(target, (x, *rest))
        node.meta["val"] = torch.zeros(4)
    graph.output(())
    return len(without_duplicates(graph).nodes) - 2


@pytest.mark.parametrize(("calls", "left"), [
    ([(_aten.exp.default,), (_aten.exp.default,)], 1),
    ([(_aten.exp.default,), (_aten.sin.default,)], 2),
    ([(_aten.mul.Tensor, 1), (_aten.mul.Tensor, 1.0), (_aten.mul.Tensor, True)], 3),
    ([(_aten.div.Tensor, 0.0), (_aten.div.Tensor, -0.0)], 2),
    ([(_aten.permute.default, [0]), (_aten.permute.default, [0])], 1),
    ([(_aten.bernoulli.p, .5), (_aten.bernoulli.p, .5)], 2),
    ([(_aten.exp.default,), (_aten.add_.Tensor, 1), (_aten.exp.default,), (_aten.exp.default,)],
     3)], ids=["equal", "functions", "types", "signs", "lists", "random", "written"])
def test_equal_calls_are_one(calls, left):
    assert _merged(*calls) == left


def test_two_outputs_stay_two_tensors():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(4)
    sums = [graph.call_function(_aten.exp.default, (x,)) for _ in range(2)]
    for node in sums:
        node.meta["val"] = torch.zeros(4)
    graph.output(tuple(sums))
    assert len(set(without_duplicates(graph).output_node().args[0])) == 2
