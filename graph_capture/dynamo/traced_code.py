"""Compiled code of a storage-less copy, which then runs for the model itself.

The model of the world: to Dynamo's guards a storage-less copy of a model is the model, so that one
trace serves both: the step is recorded on the copy, planned, and run, and recorded again once more
is known about it.  Where a guard tells them apart, Dynamo traces the model again.

Of a model whose blocks are compiled one by one, blocks of one class share a function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.storage_less import is_storage_less
from planner._graph_capture.module_forward import hooks_within, own_forward
from planner._graph_capture.torch_compat import Branch, FakeTensor, compile_forward

if TYPE_CHECKING:
    from planner._graph_capture.dynamo.record import RecordedRegion


def as_written(module: fx.GraphModule) -> Callable[..., Any]:
    """Code that runs a captured graph for callers without a plan."""
    return module if _has_values(module) else _run_by_nobody


def _run_by_nobody(*args: Any) -> Any:
    raise CaptureError("code that was compiled to record a step, and whose constants have no "
                       "values, is called without a plan")


def _has_values(module: fx.GraphModule) -> bool:
    """True if the constants of a graph have their values."""
    constants = [getattr(module, str(node.target), None)
                 for node in module.graph.find_nodes(op="get_attr")]
    return not any(isinstance(each, torch.Tensor)
                   and (isinstance(each, FakeTensor) or is_storage_less(each))
                   for each in constants)


@dataclass(eq=False)
class TracedGraph:
    """A graph of the model, and what runs in its place."""

    region: RecordedRegion | None
    """`None` if it needs no gradient."""
    module: fx.GraphModule
    """The graph as Dynamo captured it."""
    block: str
    """The block that was running; empty outside of blocks."""
    branches: tuple[Branch, ...]
    written: tuple[int, ...]
    """Positions of the inputs to which it writes."""
    compiled: Callable[..., Any]
    """Runs the region's `forward`."""
    given: dict[str, Sequence[str | None]] = field(default_factory=dict)
    """For each block that has run it, names of the parameters and buffers among its inputs."""
    run: Callable[..., Any] = _run_by_nobody
    """Function that the compiled code calls."""

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    @property
    def has_values(self) -> bool:
        """True if its constants have their values."""
        return _has_values(self.module) and (
            self.region is None or _has_values(self.region.joint))


class TracedCode:
    """The code, compiled with whatever its backend is at the time."""

    def __init__(self) -> None:
        self.backend: Callable[..., Any] | None = None
        self.has_others = False
        """True if parts of it were compiled while the model ran: where these fit, they would run
        in place of what is to be recorded."""
        self._is_recorded = False
        self.graphs: list[TracedGraph] = []
        self.blocks: tuple[str, ...] = ()
        """The blocks that are compiled one by one; empty for the whole model."""
        self._functions: dict[tuple[type, tuple[int, ...], tuple[bool, ...]],
                              Callable[..., Any]] = {}

    def function_of(self, module: nn.Module) -> Callable[..., Any]:
        """The compiled forward of a module, as of `compile_forward`.  Modules of one class with the
        same hooks and trained parameters share it: after a hook breaks the graph, torch leaves the
        code alone."""
        kind = (type(module), hooks_within(module),
                tuple(parameter.requires_grad for parameter in module.parameters()))
        if kind not in self._functions:
            self._functions[kind] = compile_forward(type(module).__name__, self, dynamic=None)
        return self._functions[kind]

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """The compiled forward of a whole model, to be called as the model's own."""
        return partial(self.function_of(model), model, own_forward(model))

    def functions_of(self, module: nn.Module) -> dict[tuple[bool, ...], Callable[..., Any]]:
        """Compiled forwards for this module, by which of its parameters are trained."""
        kind = type(module), hooks_within(module)
        return {trained: function for (*each, trained), function in self._functions.items()
                if tuple(each) == kind}

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert self.backend is not None
        self.has_others |= not self._is_recorded
        compiled: Callable[..., Any] = self.backend(module, inputs)
        return compiled

    @contextlib.contextmanager
    def recorded(self, backend: Callable[..., Any], follow: Callable[[TracedGraph], None]
                 ) -> Iterator[None]:
        """Context in which it is compiled by `backend`, and its graphs run what `follow` gives
        them; then they run again what they ran before, and new ones as they are written: torch may
        run this code for others, who have compiled theirs too often."""
        before = self.backend, [
            (graph, graph.run, None if graph.region is None else graph.region.forward)
            for graph in self.graphs]
        self.backend, self._is_recorded = backend, True
        for graph in self.graphs:
            follow(graph)
        try:
            yield
        finally:
            self._is_recorded = False
            for graph in self.graphs:
                graph.run = as_written(graph.module)
            self.backend, runs = before
            for graph, run, forward in runs:
                graph.run = run
                if graph.region is not None and forward is not None:
                    graph.region.forward = forward

    @property
    def is_complete(self) -> bool:
        """True if the model may run it: all of it ran in the step that was recorded last."""
        return all(graph.given and graph.has_values for graph in self.graphs)


_KEPT: WeakKeyDictionary[nn.Module, TracedCode] = WeakKeyDictionary()
"""Code of the last step that was planned of a model, until a plan is applied to it."""


def keep_code(model: nn.Module, code: TracedCode | None) -> None:
    """Keep the code of a planned step for `take_code`."""
    _KEPT.pop(model, None)
    if code is not None:
        _KEPT[model] = code


def take_code(model: nn.Module) -> TracedCode | None:
    """The code kept for a model, which is then kept no longer."""
    return _KEPT.pop(model, None)
