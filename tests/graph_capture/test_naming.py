"""Names and digests are the same in every process and tell different graphs apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from planner._graph_capture.joint_graph.naming import (
    Namer,
    describe_call,
    describe_value,
    digest,
    module_of,
    modules_as_in,
    rename_modules,
    source_of,
    target_name,
)
from planner._graph_capture.training_graph import Phase
from tests.support.regions import lowered

PRINT_NAMES = """
import json
from tests.support.models import dropout_everywhere
from tests.support.regions import lowered
case = dropout_everywhere(layers=1)
region = lowered(case.model, *case.args, loss_fn=case.loss_fn)
print(json.dumps([(op.name, op.digest, op.result) for op in region.ops]))
"""


@pytest.mark.slow
def test_every_process_finds_the_same_names_and_digests():
    found = set()
    for seed in ("0", "4242"):
        run = subprocess.run(
            [sys.executable, "-c", PRINT_NAMES], check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()})
        found.add(run.stdout)
    (text,) = found
    rows = json.loads(text)
    assert len({name for name, _, _ in rows}) == len(rows) > 30


class Net(nn.Module):
    def __init__(self, width: int = 8, p: float = 0.5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.ReLU()) for _ in range(2))
        self.p = p

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(layer(x), self.p)
        return x


def keys(model, *args):
    region = lowered(model, *args, loss_fn=torch.sum)
    return [(op.name, op.digest) for op in region.ops]


X = torch.randn(4, 8)


def test_the_same_model_gives_the_same_keys_whatever_its_values():
    assert keys(Net(), X) == keys(Net(), torch.zeros(4, 8))


@pytest.mark.parametrize(("model", "args"), [
    (Net(p=0.25), (X,)), (Net(width=16), (torch.randn(4, 16),)), (Net(), (torch.randn(5, 8),)),
    (Net(dtype=torch.float64), (X.double(),)), (Net(), (torch.randn(8, 4).t(),)),
], ids=["dropout", "width", "batch", "dtype", "strides"])
def test_a_difference_shows_in_a_digest(model, args):
    ours, theirs = keys(Net(), X), keys(model, *args)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert ours != theirs


def test_names_are_module_op_and_occurrence():
    names = [name for name, _ in keys(Net(), X)]
    assert names[0] == "layers.0.0/aten.addmm#0"
    assert names[1] == "layers.0.1/aten.relu#0"
    assert "/aten.native_dropout#0" in names and "/aten.native_dropout#1" in names
    assert "~layers.0.0/aten.mm#0" in names
    assert "~layers.1.1/aten.threshold_backward#0" in names


def test_a_change_elsewhere_leaves_a_name_alone():
    class Longer(Net):
        def forward(self, x):
            return super().forward(x.exp())

    assert {name for name, _ in keys(Net(), X)} < {name for name, _ in keys(Longer(), X)}


def test_occurrences_are_counted_by_phase_module_and_op():
    namer = Namer()
    assert namer.name(Phase.FORWARD, "a.b", "aten.mm.default") == "a.b/aten.mm#0"
    assert namer.name(Phase.FORWARD, "a.b", "aten.mm.default") == "a.b/aten.mm#1"
    assert namer.name(Phase.BACKWARD, "a.b", "aten.mm.default") == "~a.b/aten.mm#0"
    assert namer.name(Phase.FORWARD, "a", "aten.add.Tensor") == "a/aten.add.Tensor#0"
    assert Namer(2).name(Phase.BACKWARD, "a", "aten.mm.default") == "2:~a/aten.mm#0"


@pytest.mark.parametrize(("path", "plain"), [
    ("L['self'].h._modules['0'].attn", "h.0.attn"), ("L['module'].layers[3].mlp", "layers.3.mlp"),
    ("L['self']", ""), ("", ""), ("L['self']._orig_mod.body", "body"),
    ("L['self']._fsdp_wrapped_module.body", "body"), ("blocks['left'].up", "blocks.left.up")])
def test_module_paths_are_those_of_the_model(path, plain):
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"outer": ("L['self']", nn.Module), "inner": (path, nn.Linear)}
    assert module_of(node) == plain


def test_modules_of_shared_code_take_the_names_of_those_that_run():
    planned = ["9:c.1/aten.elu#0", "9:c/aten.add.Tensor#0", "9:~c.1/aten.elu_backward#0"]
    mine = ["9:b.1/aten.elu#0", "9:b/aten.add.Tensor#0", "9:~b.1/aten.elu_backward#0"]
    renamed = modules_as_in(mine, planned)
    assert renamed == {"b.1": "c.1", "b": "c"}
    assert not modules_as_in(planned, planned)
    for other in (mine[:2], ["9:b.1/aten.elu#1", *mine[1:]], [*mine[:2], "9:b.1/aten.elu#0"],
                  [*mine[:2], "9:~b/aten.elu_backward#0"], ["8:b.1/aten.elu#0", *mine[1:]]):
        assert not modules_as_in(other, planned)
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"inner": ("L['self'].b[1]", nn.ELU)}
    rename_modules(node.graph, renamed)
    assert module_of(node) == "c.1"


def test_the_source_is_the_innermost_frame_outside_of_torch():
    node = fx.Graph().placeholder("x")
    assert source_of(node) == ""
    node.meta["stack_trace"] = (
        'File "/home/me/net.py", line 3, in forward\n  y = self.layer(x)\n'
        'File "/home/me/block.py", line 14, in forward\n  return F.linear(x)\n'
        'File "/usr/lib/torch/nn/functional.py", line 99, in linear\n')
    assert source_of(node) == "block.py:14"


def test_an_op_of_ours_is_named_by_its_code():
    region = lowered(Net(), X, loss_fn=torch.sum)
    assert region.ops[0].source.startswith("test_naming.py:") or region.ops[0].source.startswith(
        "linear.py:")


def test_calls_are_described_canonically():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(
        torch.ops.aten.zeros.default, ([2, 3],),
        {"device": torch.device("cuda:1"), "dtype": torch.float16})
    other = graph.call_function(
        torch.ops.aten.zeros.default, ([2, 3],),
        {"dtype": torch.float16, "device": torch.device("cuda:0")})
    assert describe_call(node, {}) == describe_call(other, {})
    assert "cuda:" not in describe_call(node, {}) and "cuda" in describe_call(node, {})
    view = graph.call_function(torch.ops.aten.view.default, (x, (2, slice(None, 3), {"b": 1})))
    assert describe_call(view, {x: "input:0"}) == (
        "aten.view.default(input:0, [2, slice(None, 3, None), {b: 1}]; ) -> None")
    assert target_name(graph.call_function(len, (x,))) == "len"


def test_values_are_described_by_layout():
    assert describe_value(torch.empty(2, 3).t()) == "float32[3, 2]/[1, 3]"
    assert describe_value((torch.empty(1, dtype=torch.int64), None, 3)) == (
        "(int64[1]/[1], None, 3)")


def test_parts_of_a_digest_do_not_run_together():
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("a") == digest("a") and len(digest("a")) == 16
