"""Joint graphs as ops that exchange storages, against what really runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from planner._graph_capture.joint_graph.joint import tensors_of
from planner._graph_capture.joint_graph.lower import RESIDENT, epilogue_name
from planner._graph_capture.training_graph import Phase
from tests.support import models
from tests.support.models import BUILDERS
from tests.support.regions import lowered

ONE_REGION = ("language_model", "lora", "views", "many_outputs", "resnet", "autocast")


@pytest.fixture(scope="module", params=ONE_REGION)
def region(request):
    case = BUILDERS[request.param]()
    return lowered(case.model, *case.args, loss_fn=case.loss_fn)


def real_storages(region):
    """For each node its storages when the joint graph runs for real, op by op."""
    joint = region.joint
    values = {}

    class Run(fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            values[node] = result
            return result

    inputs = [_zeros_like(n.meta["val"]) for n in (*joint.primals, *joint.cotangents)]
    with torch.no_grad():
        Run(fx.GraphModule(joint.owner, joint.graph)).run(*inputs)
    return values


def _zeros_like(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def test_storages_are_those_that_really_are_there(region):
    """Two nodes live in one storage exactly where they do when the graph runs; sizes agree."""
    values = real_storages(region)
    found: dict[int, set[int]] = {}
    for node, storage in region.storage_of.items():
        if storage == RESIDENT or node not in values:
            continue
        tensors = tensors_of(values[node])
        if len(tensors) != 1:
            continue
        pointer = tensors[0].untyped_storage()
        found.setdefault(storage, set()).add(pointer._cdata)
        assert pointer.nbytes() == region.storages[storage].size_bytes, node
    assert all(len(pointers) == 1 for pointers in found.values())
    pointers = [next(iter(p)) for p in found.values()]
    assert len(set(pointers)) == len(pointers)


def test_every_op_reads_what_was_made_before_it(region):
    made = {s for s in region.cotangent_storages if s is not None}
    for index, op in enumerate(region.ops):
        assert set(op.inputs) <= made
        assert all(region.storages[s].producer == index for s in op.outputs)
        made |= set(op.outputs)
    assert made == set(range(len(region.storages)))


def test_the_forward_comes_first_and_needs_no_cotangent(region):
    phases = [op.phase for op in region.ops]
    assert phases == ([Phase.FORWARD] * region.num_forward
                      + [Phase.BACKWARD] * (len(phases) - region.num_forward))
    cotangents = {s for s in region.cotangent_storages if s is not None}
    for op in region.ops[:region.num_forward]:
        assert not cotangents & set(op.inputs)
    assert set(region.held_outputs) <= {
        s for op in region.ops[:region.num_forward] for s in op.outputs}


def test_views_are_no_ops(region):
    for op in region.ops:
        (value, *_) = tensors_of(op.node.meta["val"]) or [None]
        if value is not None:
            assert not op.node.target.is_view, op.name
    names = Counter(op.target for op in region.ops)
    views = {"aten.view.default", "aten.t.default", "aten.detach.default", "getitem"}
    assert not views & set(names)


def test_in_place_candidates_are_inputs_of_the_results_size(region):
    for op in region.ops:
        assert len(op.inplace) == len(op.inplace_operands)
        for storage, operand in zip(op.inplace, op.inplace_operands, strict=True):
            assert storage in op.inputs and region.storage_of[operand] == storage
            assert region.storages[storage].size_bytes == region.storages[
                op.outputs[0]].size_bytes


def test_elements_of_a_tuple_are_storages_of_their_own():
    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            values, indices = self.layer(x).topk(3)
            return values * indices

    region = lowered(Pick(), torch.randn(4, 8), loss_fn=torch.sum)
    (topk,) = [op for op in region.ops if "topk" in op.target]
    sizes = [region.storages[s].size_bytes for s in topk.outputs]
    assert sizes == [4 * 3 * 4, 4 * 3 * 8]


def test_what_the_step_mutates_is_listed():
    case = models.resnet(stages=1, blocks=1, image=16)
    region = lowered(case.model, *case.args, loss_fn=case.loss_fn)
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in case.model.modules())
    assert len(region.mutation_sources) == 3 * norms
    replayed = [op for op in region.ops if op.replay.copied_inputs]
    assert Counter(len(op.replay.copied_inputs) for op in replayed) == {1: norms, 2: norms}


def test_gradients_belong_to_their_parameters():
    case = models.language_model(layers=1)
    region = lowered(case.model, *case.args, loss_fn=case.loss_fn)
    for storage, primal in region.gradient_storages:
        parameter = region.joint.primals[primal].meta["val"]
        assert region.storages[storage].size_bytes == parameter.numel() * 4
    assert len(region.gradient_storages) == len(list(case.model.parameters()))


def test_primals_are_found_through_views():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.rand(6, 4)), nn.Parameter(torch.rand(6, 4))

        def forward(self, x):
            return (x @ self.a.t()[:, :3]).sum() + F.relu(self.b).sum()

    region = lowered(Both(), torch.randn(5, 4))
    shapes = [tuple(p.meta["val"].shape) for p in region.joint.primals]
    (mm,) = [op for op in region.ops if op.target == "aten.mm.default"
             and op.phase is Phase.FORWARD]
    read = {shapes[index] for index in region.primals_read_by(mm.node)}
    assert read == {(5, 4), (6, 4)} and mm.inputs == ()


def test_the_epilogue_is_named_after_its_region():
    assert epilogue_name(0) == "/update of mutated inputs#0"
    assert epilogue_name(3) == "3:/update of mutated inputs#0"
