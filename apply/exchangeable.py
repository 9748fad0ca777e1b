"""The graphs of a schedule that run in the place of a compiled graph, exchanged without tracing.

What is saved crosses over beside AOTAutograd (`graph_capture.dynamo.stub_graphs`).  As under
autograd, it is an error to change a saved tensor before the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner._apply.errors import PlanMismatch
from planner._apply.outputs import places_to_watch
from planner._apply.rewrite import rewrite
from planner._apply.rewrite_spec import RewriteSpec
from planner._apply.same_step import outputs_let_go
from planner._graph_capture.dynamo.stub_graphs import carrier_of
from planner._graph_capture.joint_graph.joint import is_cotangent
from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner._graph_capture.torch_compat import BoxedCodeGen, backward_keeps_graph, boxed

_CHANGED = ("one of the variables needed for gradient computation has been modified by an inplace "
            "operation: a tensor of shape {shape}, which the planned step has saved for its "
            "backward (as an input, an output or between them), is at version {found}; expected "
            "version {saved} instead")


def boxed_callable(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the module's generated code as a function of a list of arguments, which it empties."""
    graph.graph.set_codegen(BoxedCodeGen())
    graph.recompile()
    return boxed(graph.forward)


Unplanned = Callable[[PlanMismatch], None]
"""Raises the error, or notes it: the gradients will be replaced."""


def _refuse(mismatch: PlanMismatch) -> None:
    raise mismatch


def checked_backward(
    run: Callable[[list[Any]], Any], like: Sequence[torch.Tensor], cotangents: Sequence[bool],
    read: Sequence[frozenset[int]], unplanned: Unplanned = _refuse,
    number: Callable[[Any], int] = int,
) -> Callable[[list[Any]], Any]:
    """Return the backward `run` with a check of its last arguments, the cotangents.  Missing
    gradients that the plan relies on become zeros like `like`, whose sizes are as `number` says,
    and what is made of them alone is `None`, as in plain autograd; `read`: which cotangents each
    result is made of.  `unplanned` is called for a gradient through an output that the plan assumed
    to have none."""

    def call(args: list[Any]) -> Any:
        first = len(args) - len(cotangents)
        absent = set[int]()
        for index, expected in enumerate(cotangents):
            is_given = args[first + index] is not None
            if is_given and not expected:
                unplanned(PlanMismatch(
                    f"a gradient flows into differentiable output {index} of the model, which "
                    "the plan took for one without; make the plan with the loss_fn that is "
                    "trained with"))
                args[first + index] = None
            if expected and not is_given:
                args[first + index] = torch.zeros(
                    [*map(number, like[index].shape)], dtype=like[index].dtype,
                    device=like[index].device)
                absent.add(index)
        gradients = run(args)
        if not absent:
            return gradients
        return tuple(None if places and places <= absent else gradient
                     for gradient, places in zip(gradients, read, strict=True))

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
    like: tuple[torch.Tensor, ...]
    """The cotangents as they were traced."""
    cotangents: Sequence[bool]
    """For each differentiable output, whether its gradient is planned."""
    read_cotangents: tuple[frozenset[int], ...]
    """For each result of the backward, the cotangents that it is made of."""
    watched: tuple[int, ...]
    """Outputs of the forward that are taken to be let go before the backward."""
    unplanned: Unplanned
    """Called for a gradient that is not planned."""

    @classmethod
    def of(cls, spec: RewriteSpec, index: int, lowered: LoweredRegion,
           unplanned: Unplanned = _refuse) -> ScheduledGraphs:
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
                   tuple(node.meta["val"] for node in joint.cotangents), region.cotangents,
                   joint.read_cotangents,
                   places_to_watch(outputs_let_go(spec, index, lowered), lowered, graphs),
                   unplanned)

    def run_forward(self, args: list[Any], number: Callable[[Any], int]
                    ) -> tuple[Sequence[Any], torch.Tensor]:
        """Outputs of the forward, and a tensor that carries its backward.  `number`: gives a
        symbolic size its value in this call."""
        run_backward = checked_backward(self.backward, self.like, self.cotangents,
                                        self.read_cotangents, self.unplanned, number)
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
