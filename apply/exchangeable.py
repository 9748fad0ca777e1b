"""The graphs of a schedule that run in the place of a compiled graph, exchanged without tracing.

What is saved crosses over beside AOTAutograd (`graph_capture.dynamo.stub_graphs`).  As under
autograd, it is an error to change a saved tensor before the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from planner._apply.errors import PlanMismatch
from planner._apply.outputs import places_to_watch
from planner._apply.rewrite import rewrite
from planner._apply.rewrite_spec import RewriteSpec
from planner._apply.same_step import outputs_let_go
from planner._graph_capture.dynamo.stub_graphs import carrier_of
from planner._graph_capture.joint_graph.joint import JointGraph, is_cotangent
from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner._graph_capture.torch_compat import backward_keeps_graph, boxed, boxed_callable

_CHANGED = ("one of the variables needed for gradient computation has been modified by an inplace "
            "operation: a tensor of shape {shape}, which the planned step has saved for its "
            "backward (as an input, an output or between them), is at version {found}; expected "
            "version {saved} instead")


Unplanned = Callable[[PlanMismatch], None]
"""Raises the error, or notes it: the gradients will be replaced."""


class GradientLayout(NamedTuple):
    """What the gradients that a backward takes and returns are like, as they were traced."""

    cotangents: tuple[torch.Tensor, ...]
    inputs: tuple[Any, ...]
    """The region's inputs, whose gradients it returns."""
    read: tuple[frozenset[int], ...]
    """For each of these gradients, the cotangents that it is made of."""

    @classmethod
    def of(cls, joint: JointGraph) -> GradientLayout:
        """That of a joint graph's backward."""
        return cls(tuple(node.meta["val"] for node in joint.cotangents),
                   tuple(node.meta["val"] for node in joint.primals), joint.read_cotangents)


def checked_backward(
    run: Callable[[list[Any]], Any], layout: GradientLayout, cotangents: Sequence[bool],
    unplanned: Unplanned, number: Callable[[Any], int] = int,
) -> Callable[[list[Any]], Any]:
    """Return the backward `run` with a check of its last arguments, the cotangents.  Missing
    gradients that the plan relies on become zeros, whose sizes are as `number` says, and what is
    made of them alone is `None`, as in plain autograd.  `unplanned` is called for a gradient
    through an output that the plan assumed to have none."""
    def zeros(like: torch.Tensor, shape: Sequence[int] = ()) -> torch.Tensor:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def call(args: list[Any]) -> Any:
        first = len(args) - len(cotangents)
        absent = set[int]()
        will_be_replaced = False
        for index, expected in enumerate(cotangents):
            is_given = args[first + index] is not None
            if is_given and not expected:
                unplanned(PlanMismatch(
                    f"a gradient flows into differentiable output {index} of the model, which "
                    "the plan took for one without; make the plan with the loss_fn that is "
                    "trained with"))
                args[first + index], will_be_replaced = None, True
            if expected and not is_given:
                like = layout.cotangents[index]
                args[first + index] = zeros(like, [*map(number, like.shape)])
                absent.add(index)
        gradients = run(args)
        if will_be_replaced:  # autograd takes no tensor in the place of `None`
            return tuple(
                zeros(like).expand([*map(number, like.shape)])
                if gradient is None and isinstance(like, torch.Tensor) and (
                    like.is_floating_point() or like.is_complex()) else gradient
                for gradient, like in zip(gradients, layout.inputs, strict=True))
        if not absent:
            return gradients
        return tuple(None if places and places <= absent else gradient
                     for gradient, places in zip(gradients, layout.read, strict=True))

    return boxed(call)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledGraphs:
    """The two graphs of one schedule."""

    place: int
    """Number of its region among those of its block."""
    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    num_outputs: int
    """Outputs of the forward before the tensors that it saves."""
    reads: tuple[int, ...]
    """Indices among the saved values of the backward's inputs, before the cotangents."""
    checked: tuple[int, ...]
    """Indices of the saved tensors that nobody may change before the backward."""
    layout: GradientLayout
    cotangents: Sequence[bool]
    """For each differentiable output, whether its gradient is planned."""
    watched: tuple[int, ...]
    """Outputs of the forward that are taken to be let go before the backward."""
    unplanned: Unplanned
    """Called for a gradient that is not planned."""

    @classmethod
    def of(cls, spec: RewriteSpec, index: int, lowered: LoweredRegion,
           unplanned: Unplanned) -> ScheduledGraphs:
        """Compile the two graphs of a region, the rewrite spec's `index`-th."""
        region, joint = spec.regions[index], lowered.joint
        graphs = rewrite(lowered, region.insertions, region.inplace_reuses, region.released)
        num_outputs = len(joint.forward_outputs)
        updated = {joint.primals[place].name for place in joint.mutations.values()}
        outputs = graphs.forward.graph.output_node().args[0]
        saved = [node.name for node in outputs[num_outputs:]]
        place = sum(each.block == region.block for each in spec.regions[:index])
        return cls(place, boxed_callable(graphs.forward), boxed_callable(graphs.backward),
                   num_outputs,
                   tuple(saved.index(node.name) for node in
                         graphs.backward.graph.find_nodes(op="placeholder")
                         if not is_cotangent(node)),
                   tuple(place for place, node in enumerate(outputs[num_outputs:])
                         if isinstance(node.meta["val"], torch.Tensor)
                         and node.name not in updated),
                   GradientLayout.of(joint), region.cotangents,
                   places_to_watch(outputs_let_go(spec, index, lowered), lowered, graphs),
                   unplanned)

    def run_forward(self, args: list[Any], number: Callable[[Any], int]
                    ) -> tuple[Sequence[Any], torch.Tensor]:
        """Outputs of the forward, and a tensor that carries its backward.  `number`: gives a
        symbolic size its value in this call."""
        run_backward = checked_backward(self.backward, self.layout, self.cotangents,
                                        self.unplanned, number)
        results = self.forward(args)
        # An output itself would refer to its own backward.
        saved = [value.detach() if isinstance(value, torch.Tensor) else value
                 for value in results[self.num_outputs:]]
        versions = [saved[place]._version for place in self.checked]

        def backward(cotangents: list[Any]) -> Any:
            nonlocal saved
            for place, version in zip(self.checked, versions, strict=True):
                if saved[place]._version != version:
                    raise RuntimeError(_CHANGED.format(shape=list(saved[place].shape),
                                                       found=saved[place]._version, saved=version))
            args = [saved[place] for place in self.reads]
            if not backward_keeps_graph():
                saved = []
            args += cotangents
            cotangents.clear()
            return run_backward(args)

        return results[:self.num_outputs], carrier_of(backward)
