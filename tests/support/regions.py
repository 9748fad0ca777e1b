"""Captured regions of small models, for tests of the code between capture and planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from planner._graph_capture.dynamo.record import Recording, record_step
from planner._graph_capture.fake_copies.fake import make_fake_copy
from planner._graph_capture.joint_graph.joint import JointGraph, clean_joint_graph
from planner._graph_capture.joint_graph.lower import LoweredRegion, lower
from planner._graph_capture.plain_step.loss import objective


def recorded(model: nn.Module, *args: Any, loss_fn: Callable[[Any], Any] | None = None
             ) -> Recording:
    """Return the calls of captured regions in one step of `model(*args)`."""
    fake_copy = make_fake_copy(model, args, {}, extra=(loss_fn,))

    def run(compiled: Callable[..., Any], before_backward: Callable[[], object]) -> object:
        goal = objective(compiled(*fake_copy.args), fake_copy.extra[0])
        before_backward()
        goal.backward()
        return goal

    return record_step(fake_copy, run, lambda target, args, kwargs, out: 0)


def joint_graph(model: nn.Module, *args: Any, loss_fn: Callable[[Any], Any] | None = None,
                cotangents: tuple[bool, ...] | None = None) -> JointGraph:
    """Return the clean joint graph of a model with one region, by default for the cotangents of the
    recorded step."""
    (call,) = recorded(model, *args, loss_fn=loss_fn).calls
    region = call.region
    return clean_joint_graph(region.joint, region.num_forward_outputs,
                             region.cotangents[0] if cotangents is None else cotangents)


def lowered(model: nn.Module, *args: Any, loss_fn: Callable[[Any], Any] | None = None
            ) -> LoweredRegion:
    """Return the lowered region of a model with one region."""
    joint = joint_graph(model, *args, loss_fn=loss_fn)
    return lower(joint, [f"input:{index}" for index in range(len(joint.primals))])
