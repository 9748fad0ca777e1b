"""The applied model under Inductor: the plan decides what crosses from forward to backward and what
is computed again, and Inductor compiles the two graphs.

Inductor hands its partitioner the joint graph after its decompositions and joint passes; a plan for
it was made on the same graph.  The graphs run in the order that Inductor's scheduler gives them: it
starts from the plan's, and deviates where kernels fuse or its own estimate of the peak is lower.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from apply.recipe import Recipe
from apply.runtime import PlanBackend, checked_backward
from graph_capture.inductor_joint import move_saved_to_forward, saved_by_default
from graph_capture.joint import JointGraph
from graph_capture.torch_compat import PartitionFunction
from graph_capture.torch_compat.inductor import LateRecomputation, inductor_backend

_FORMAT = "checkpoint-planner 1"
"""To be changed whenever one recipe makes other graphs than before."""


class InductorBackend(PlanBackend):
    """The Dynamo backend that lets Inductor compile a recipe's graphs."""

    def _compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionFunction,
        cotangents: Callable[[], tuple[bool, ...]],
    ) -> Callable[..., Any]:
        def finish_backward(planned_inputs: list[Any], run: Callable[[list[Any]], Any]
                            ) -> Callable[[list[Any]], Any]:
            if all(cotangents()):
                return run
            planned = planned_inputs[len(planned_inputs) - len(cotangents()):]
            return checked_backward(run, planned, cotangents(), self._mismatch)

        return inductor_backend(
            partition, uuid_of(self._recipe), finish_backward=finish_backward,
            settings={"_pre_fusion_custom_pass": LateRecomputation()})(module, inputs)

    def _clean(
        self, joint: fx.GraphModule, num_forward_outputs: int, cotangents: Sequence[bool]
    ) -> JointGraph:
        clean = super()._clean(joint, num_forward_outputs, cotangents)
        move_saved_to_forward(clean, saved_by_default(clean))
        return clean


def uuid_of(recipe: Recipe) -> str:
    """What tells recipes apart in the keys of Inductor's caches: equal for equal recipes, in every
    process."""
    return hashlib.sha256(f"{_FORMAT}\0{recipe!r}".encode()).hexdigest()
