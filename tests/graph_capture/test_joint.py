"""Joint graphs are cleaned of what plain autograd would not run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.joint_graph.joint import clean_joint_graph, count_cotangents
from planner.solvers import simulate
from tests.support import models
from tests.support.models import Case
from tests.support.regions import joint_graph, recorded
from tests.support.training import apply_schedule, captured, random_schedule, reference, train

pytestmark = pytest.mark.compat


class Heads(nn.Module):
    """Two outputs with a common trunk; the loss may use either or both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden).sigmoid(), self.right(hidden).exp(), hidden


LOSSES = {
    "left": lambda out: out[0].sum(),
    "right": lambda out: out[1].sum(),
    "both": lambda out: (out[0] * out[1]).sum(),
    "trunk": lambda out: out[2].square().sum(),
    "left and trunk": lambda out: out[0].sum() + out[2].square().sum(),
}


@pytest.mark.parametrize("used", LOSSES)
def test_what_gets_no_gradient_in_eager_gets_none_planned(used):
    torch.manual_seed(0)
    case = Case(Heads(), (torch.randn(4, 8),), LOSSES[used])
    plain = train(case.model, case)
    without = {name for name, gradient in plain.gradients.items() if gradient is None}
    step = captured(case)
    assert {b.label for b in step.base.graph.buffers if b.label} | without == set(plain.gradients)
    planned, _ = apply_schedule(case, step, random_schedule(step.base.problem, 0, 0.7))
    trace = train(planned, case)
    assert {name for name, gradient in trace.gradients.items() if gradient is None} == without
    assert trace.differences(reference(case)) == []


def test_the_backward_through_unused_outputs_is_not_run():
    model, x = Heads(), torch.randn(4, 8)
    targets = {}
    for used, loss_fn in LOSSES.items():
        graph = joint_graph(model, x, loss_fn=loss_fn).graph
        targets[used] = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert not any("zeros" in target for found in targets.values() for target in found)
    assert "aten.sigmoid_backward.default" not in targets["right"]
    assert "aten.sigmoid_backward.default" in targets["left"]
    assert len(targets["trunk"]) < len(targets["left"]) < len(targets["both"])


def test_zeros_are_made_where_an_op_cannot_do_without():
    """The gradient of `cat` is sliced, that of a sum passes on, that of `stack` is indexed; an op
    that mixes a zero with a gradient in another way gets zeros."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            top, bottom = torch.cat([self.a(x), self.b(x)]).chunk(2)
            return F.gelu(top), F.gelu(bottom)

    torch.manual_seed(0)
    for index in (0, 1):
        case = Case(Mixed(), (torch.randn(3, 6),), lambda out, index=index: out[index].sum())
        step = captured(case)
        planned, _ = apply_schedule(case, step, step.base.problem.keep_all_schedule)
        trace = train(planned, case)
        plain = train(case.model, case)
        assert trace.distance(plain) <= 1e-6


def test_duplicates_are_merged_but_random_ops_stay_apart():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x):
            x = self.a(x)
            return F.dropout(x.exp()) + F.dropout(x.exp())

    graph = joint_graph(Twice(), torch.randn(3, 6), loss_fn=torch.sum).graph
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("aten.exp.default") == 1
    assert targets.count("aten.native_dropout.default") == 2


def test_inputs_outputs_and_gradients_are_matched():
    torch.manual_seed(0)
    case = models.resnet(stages=1, blocks=1, image=16)
    joint = joint_graph(case.model, *case.args, loss_fn=case.loss_fn)
    tensors = [*case.model.parameters(), *case.model.buffers(), *case.args]
    assert len(joint.primals) == len(tensors)
    shapes = sorted(tuple(p.meta["val"].shape) for p in joint.primals)
    assert shapes == sorted(tuple(t.shape) for t in tensors)
    for primal, gradient in zip(joint.primals, joint.gradients, strict=True):
        if gradient is not None:
            assert gradient.meta["val"].shape == primal.meta["val"].shape
    assert sum(g is not None for g in joint.gradients) == len(list(case.model.parameters()))
    assert len(joint.mutations) == len(list(case.model.buffers()))
    for position, primal in joint.mutations.items():
        updated = joint.forward_outputs[position]
        assert updated.meta["val"].shape == joint.primals[primal].meta["val"].shape
    assert [n.meta["val"].shape for n in joint.differentiable_outputs] == [(4, 10)]


def test_the_given_graph_is_not_changed():
    (call,) = recorded(Heads(), torch.randn(4, 8), loss_fn=LOSSES["both"]).calls
    before = str(call.region.joint.graph)
    clean_joint_graph(call.region.joint, call.region.num_forward_outputs, (True, False, False))
    assert str(call.region.joint.graph) == before


def test_a_wrong_number_of_cotangents_is_refused():
    (call,) = recorded(Heads(), torch.randn(4, 8), loss_fn=LOSSES["both"]).calls
    assert count_cotangents(call.region.joint) == 3
    with pytest.raises(CaptureError, match="3 differentiable outputs, but 1 were described"):
        clean_joint_graph(call.region.joint, call.region.num_forward_outputs, (True,))


def test_symbolic_sizes_are_refused():
    graph = fx.Graph()
    size = graph.placeholder("primals_1")
    size.meta["val"] = 5
    graph.output((size,))
    with pytest.raises(CaptureError, match="static shapes"):
        clean_joint_graph(fx.GraphModule({}, graph), 1, ())


def test_a_gradient_is_made_right_behind_what_it_is_made_from():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    joint = joint_graph(model, torch.randn(4, 8), loss_fn=lambda out: out.square().sum())
    nodes = list(joint.graph.nodes)
    at = {node: position for position, node in enumerate(nodes)}
    products = [node for node in nodes if str(node.target) == "aten.mm.default"]
    # For each layer from the last the gradient of the weight, then that of the layer's input.
    assert ["aten.t" in str(node.args[0].target) for node in products] == [
        True, False, True, False, True]
    assert all(at[node.args[0]] == at[node] - 1 for node in products[::2])


def test_early_gradients_lower_the_peak_and_change_no_value(monkeypatch):
    torch.manual_seed(0)
    layers = [nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)]
    case = Case(nn.Sequential(*layers), (torch.randn(256, 32),), lambda out: out.square().sum())
    step = captured(case)
    early, _ = simulate(step.base.problem, step.base.problem.keep_all_schedule)
    planned, _ = apply_schedule(case, step, random_schedule(step.base.problem, 0, 0.7))
    assert train(planned, case).differences(reference(case)) == []
    monkeypatch.setattr("planner._graph_capture.joint_graph.joint._hasten_gradients",
                        lambda *_: None)
    late = captured(case)
    assert early < simulate(late.base.problem, late.base.problem.keep_all_schedule).peak_bytes
