"""Compiled code of a storage-less copy's forward, which then runs for the model itself.

The model of the world: to Dynamo's guards a storage-less copy of a model on a CPU is the model, so
that one trace serves both: the step is recorded on the copy, planned, and run.  Where a guard tells
them apart, Dynamo traces the model again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from planner._graph_capture.fake_copies.storage_less import is_storage_less
from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner._graph_capture.torch_compat import Branch, FakeTensor, compile_forward

if TYPE_CHECKING:
    from planner._graph_capture.dynamo.record import RecordedRegion


@dataclass(eq=False)
class TracedGraph:
    """A graph of the model, and what runs in its place."""

    region: RecordedRegion | None
    """`None` if it needs no gradient."""
    given: Sequence[str | None]
    """Names of the parameters and buffers among its inputs."""
    branches: tuple[Branch, ...]
    compiled: Callable[..., Any]
    """Runs the region's `forward`."""
    run: Callable[..., Any]
    """What the code calls."""

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


class TracedCode:
    """The code, compiled with whatever its backend is at the time."""

    def __init__(self, name: str, backend: Callable[..., Any], trained: tuple[bool, ...]) -> None:
        """`trained`: which of the copy's parameters are trained."""
        self.backend, self.trained = backend, trained
        self.graphs: list[TracedGraph] = []
        self.lowered: dict[bool, LoweredRegion] = {}
        """The graph in its base variant (`False`) and low-peak variant."""
        self.function = compile_forward(name, self)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self.backend(module, inputs)
        return compiled

    @property
    def is_complete(self) -> bool:
        """True if it is one graph with a backward, in which constants have their values."""
        return len(self.graphs) == 1 and (region := self.graphs[0].region) is not None and not any(
            isinstance(each, FakeTensor) or is_storage_less(each)
            for node in region.joint.graph.find_nodes(op="get_attr")
            if isinstance(each := getattr(region.joint, str(node.target), None), torch.Tensor))
