"""Each rule of the training graph's specification is enforced."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings

from planner._graph_capture.training_graph import Category, MalformedGraph, Phase, check
from tests.support.graphs import chain, steps

GRAPH = chain(4)
BACKWARD = next(i for i, op in enumerate(GRAPH.ops) if op.phase is Phase.BACKWARD)
GRADIENT = next(i for i, b in enumerate(GRAPH.buffers) if b.kind is Category.GRADIENTS)


def with_op(index, **changes):
    ops = list(GRAPH.ops)
    ops[index] = dataclasses.replace(ops[index], **changes)
    return dataclasses.replace(GRAPH, ops=tuple(ops))


def with_buffer(index, **changes):
    buffers = list(GRAPH.buffers)
    buffers[index] = dataclasses.replace(buffers[index], **changes)
    return dataclasses.replace(GRAPH, buffers=tuple(buffers))


def with_region(**changes):
    return dataclasses.replace(GRAPH, regions=(dataclasses.replace(GRAPH.regions[0], **changes),))


@settings(max_examples=50, deadline=None)
@given(steps())
def test_well_formed_graphs_pass(step):
    check(step.graph)


BROKEN = {
    "order of phases": (with_op(0, phase=Phase.BACKWARD), "phases must come in the order"),
    "equal names": (with_op(1, name=GRAPH.ops[0].name), "two ops are named"),
    "neither digest nor pin": (with_op(0, digest=""), "neither a digest nor is it pinned"),
    "reads the future": (with_op(0, inputs=(3,)), "before it is made"),
    "reads itself": (with_op(0, inputs=(0,)), "before it is made"),
    "reads twice": (with_op(1, inputs=(0, 0)), "lists an input twice"),
    "makes what another makes": (with_op(1, outputs=(1, 0)), "which another op makes"),
    "does not list its buffer": (with_op(0, outputs=()), "does not list buffer 0"),
    "no producer": (with_buffer(0, producer=99), "buffer 0 has no producer"),
    "negative producer": (with_buffer(0, producer=-1), "buffer 0 has no producer"),
    "negative size": (with_buffer(0, size_bytes=-1), "negative size"),
    "negative flops": (with_op(0, flops=-1), "negative cost"),
    "negative traffic": (with_op(0, bytes_moved=-1), "negative cost"),
    "negative workspace": (with_op(0, workspace_bytes=-1), "negative cost"),
    "negative replay state": (with_op(0, replay_state_bytes=-1), "negative cost"),
    "negative duration": (with_op(0, seconds=-1.0), "no finite duration"),
    "endless": (with_op(0, seconds=math.inf), "no finite duration"),
    "no duration": (with_op(0, seconds=math.nan), "no finite duration"),
    "in place of a stranger": (with_op(2, inplace=(0,)), "cannot write its result over buffer 0"),
    "in place with several results": (with_op(BACKWARD, inplace=GRAPH.ops[BACKWARD].inputs[:1]),
                                      "cannot write its result over"),
    "in place of another size": (dataclasses.replace(with_op(1, inplace=(0,)), buffers=(
        dataclasses.replace(GRAPH.buffers[0], size_bytes=99), *GRAPH.buffers[1:])),
                                 "cannot write its result over buffer 0"),
    "a gradient of the forward": (with_buffer(0, kind=Category.GRADIENTS, kept_to_end=True),
                                  "is made in the forward"),
    "an activation of the backward": (
        with_buffer(GRAPH.ops[BACKWARD].outputs[0], kind=Category.ACTIVATIONS),
        "makes an activation in the backward"),
    "too short a forward": (with_region(forward=range(3)), "forward range of region 0"),
    "too long a backward": (with_region(backward=range(BACKWARD, len(GRAPH.ops) + 1)),
                            "backward range of region 0"),
}


def test_the_whole_graph_passes():
    check(GRAPH)


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_is_enforced(rule):
    graph, message = BROKEN[rule]
    with pytest.raises(MalformedGraph, match=message):
        check(graph)


def test_an_activation_made_in_the_backward_may_be_kept():
    check(with_buffer(GRAPH.ops[BACKWARD].outputs[0], kind=Category.ACTIVATIONS,
                      kept_to_end=True))
