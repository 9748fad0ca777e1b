"""Results of dropouts that the backward makes anew: the same values, and nothing of it is saved."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from planner._graph_capture.joint_graph.lower import last_forward_node, lower
from planner._graph_capture.joint_graph.recomputed_dropout import recompute_dropout
from tests.support.regions import joint_graph

pytestmark = pytest.mark.compat

DROPOUT = torch.ops.aten.native_dropout.default


class Viewed(nn.Module):
    """Dropouts whose results are read as they are, transposed, in chunks, and by no product."""

    def __init__(self, probability=0.3):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 8)
        self.probability = probability

    def forward(self, x):
        y = F.dropout(self.first(x).tanh(), self.probability)
        y = y.transpose(0, 1).unflatten(0, (2, 4)).permute(2, 0, 1) + y.view(-1, 2, 4)
        z = self.second(F.dropout(y, self.probability))
        return F.dropout(z, self.probability).sum(1) * y.sum(1).sum(1, True)


def given(joint):
    torch.manual_seed(0)
    return [torch.randn(node.meta["val"].shape) for node in (*joint.primals, *joint.cotangents)]


def values(joint):
    """What the joint graph returns for numbers of one seed."""
    inputs = given(joint)
    torch.manual_seed(1)
    return [value for value in fx.Interpreter(joint.copy()).run(*inputs) if value is not None]


def read_in_backward(joint):
    """For each dropout, which of its results the backward reads."""
    region = lower(joint, [f"input {index}" for index in range(len(joint.primals))])
    read = {storage for op in region.ops[region.num_forward:] for storage in op.inputs}
    return [tuple(storage in read for storage in op.outputs)
            for op in region.ops if op.node.target is DROPOUT]


def test_the_backward_reads_operands_and_masks_and_gives_the_same_gradients():
    joint = joint_graph(Viewed(), torch.rand(8, 8), loss_fn=torch.sum)
    expected = values(joint)
    assert any(result for result, _ in read_in_backward(joint))
    recompute_dropout(joint)
    joint.graph.lint()
    assert read_in_backward(joint) == [(False, True)] * 3
    for found, value in zip(values(joint), expected, strict=True):
        assert torch.equal(found, value)


def test_the_forward_is_as_it_was():
    joint = joint_graph(Viewed(), torch.rand(8, 8), loss_fn=torch.sum)

    def forward():
        nodes = list(joint.graph.nodes)
        return [str(node) for node in nodes[:nodes.index(last_forward_node(joint)) + 1]]

    before = forward()
    recompute_dropout(joint)
    assert forward() == before


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_where_nothing_or_everything_is_dropped_the_graph_stays(probability):
    joint = joint_graph(Viewed(probability), torch.rand(8, 8), loss_fn=torch.sum)
    expected = values(joint)
    recompute_dropout(joint)
    for found, value in zip(values(joint), expected, strict=True):
        assert torch.equal(found, value)
