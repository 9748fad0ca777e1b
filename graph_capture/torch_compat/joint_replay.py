"""Private names of AOTAutograd and Inductor for the passes before the partitioner.

A planned step is compiled for one schedule after the other, and everything before the partitioner
is the same each time: the traces of the forward and of the joint graph, and Inductor's passes over
that graph.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from planner._graph_capture.torch_compat.requirements import require

require(__name__)

import torch._functorch.aot_autograd as aot
import torch._inductor.compile_fx as inductor
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing

from planner._graph_capture.torch_compat.compilation import copied_module


class JointReplay:
    """The result of torch's passes over one Dynamo graph up to its partition.

    `record()` around the first compilation of the graph keeps it, `replay()` around later ones
    replaces new traces and passes by it.
    """

    def __init__(self) -> None:
        self._metadata: Any = None
        self._state: tuple[Any, ...] = ()
        self._capture: Any = None
        self._fake_mode: Any = None
        self._joint: fx.GraphModule | None = None

    @property
    def is_complete(self) -> bool:
        """True if there is something to replay: the graph has a backward."""
        return self._joint is not None

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Inside, the results of compilation are kept."""
        trace, passes = aot.aot_stage1_graph_capture, inductor._recursive_joint_graph_passes

        def capture(state: Any, function: Any) -> Any:
            self._metadata = copy.copy(state.fw_metadata)
            found = trace(state, function)
            if state.needs_autograd:
                self._capture, self._fake_mode = found, detect_fake_mode(state.flat_args)
                # Later passes change the metadata in place.
                self._state = (state.flat_args, state.flat_args_descs,
                               copy.copy(state.fw_metadata))
            return found

        def transform(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
            found = passes(graph, *args, **kwargs)
            if self._capture is not None and self._joint is None:
                self._joint = _copied(found)
            return found

        with self._patched(capture, transform):
            yield

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Inside, the kept results are used."""

        def metadata(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            return lambda *inputs: copy.copy(self._metadata)

        def capture(state: Any, function: Any) -> Any:
            assert self._joint is not None
            state.flat_args, state.flat_args_descs = self._state[:2]
            state.fw_metadata = copy.copy(self._state[2])
            return replace(self._capture, graph_module=_copied(self._joint))

        def transform(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
            return graph

        # Fake tensors of two modes do not mix.
        with (tracing(TracingContext(self._fake_mode)),
              mock.patch.object(aot, "run_functionalized_fw_and_collect_metadata", metadata),
              self._patched(capture, transform)):
            yield

    @staticmethod
    @contextlib.contextmanager
    def _patched(capture: Callable[..., Any], transform: Callable[..., Any]) -> Iterator[None]:
        with (mock.patch.object(aot, "aot_stage1_graph_capture", capture),
              mock.patch.object(inductor, "_recursive_joint_graph_passes", transform)):
            yield


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own; values and attributes are shared."""
    copied = copied_module(module, module.graph)
    copied.meta.update(module.meta)
    return copied
