"""Trace a fake copy once more, with symbols for sizes of its inputs.

The step was captured with fixed sizes before, which showed that the model is one graph and into
which outputs gradients flow.  Here Dynamo and AOTAutograd make its joint graph with symbols; then
they are stopped, since nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.fake_copies.input_values import values_of_inputs
from planner._graph_capture.joint_graph.naming import name_modules
from planner._graph_capture.module_forward import in_place_of_forward
from planner._graph_capture.step.symbolic_region import NamedDimensions, SymbolicRegion
from planner._graph_capture.torch_compat import (
    aot_backend,
    as_plain_code,
    compile_module,
    compile_settings,
    quiet_fake_tensors,
    symbolic_dimensions,
)


class _Traced(Exception):
    """Ends the compilation."""


class _Backend:
    """The Dynamo backend, which keeps the joint graph."""

    def __init__(self, fake_copy: FakeCopy, cotangents: Sequence[bool],
                 inputs: Mapping[str, torch.Tensor], dimensions: NamedDimensions) -> None:
        model = fake_copy.model
        self.model, self.cotangents, self.dimensions = model, tuple(cotangents), dimensions
        self.names = {id(tensor): name for name, tensor in (*model.named_parameters(),
                                                            *model.named_buffers())}
        self.inputs = {id(tensor): name for name, tensor in inputs.items()}
        self.region: SymbolicRegion | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        name_modules(module, self.model)
        given = [self.names.get(id(value)) for value in inputs]
        called_with = [self.inputs.get(id(value)) for value in inputs]

        def partition(joint: fx.GraphModule, joint_inputs: object, *, num_fwd_outputs: int,
                      **_: object) -> Any:
            self.region = SymbolicRegion.of(joint, num_fwd_outputs, self.cotangents, given,
                                            called_with, self.dimensions)
            raise _Traced

        return aot_backend(partition, _no_code, _no_code)(module, list(inputs))


def _no_code(graph: fx.GraphModule, inputs: object) -> Any:
    raise ValueError("it has no backward")


@quiet_fake_tensors()
def trace_with_symbols(fake_copy: FakeCopy, cotangents: Sequence[bool],
                       inputs: Mapping[str, torch.Tensor], dimensions: NamedDimensions
                       ) -> SymbolicRegion:
    """The graph of a fake copy with symbols for these dimensions of its `inputs`.

    Raises `CaptureError` where it cannot be traced so.
    """
    backend = _Backend(fake_copy, cotangents, inputs, dimensions)
    compiled = compile_module(fake_copy.model, backend, dynamic=None)
    marks = [(tensor, sorted(dimensions.get(name, {}))) for name, tensor in inputs.items()]
    with (compile_settings(), as_plain_code(values_of_inputs(fake_copy)),
          fake_copy.as_on_device(), fake_copy.mode, symbolic_dimensions(marks),
          in_place_of_forward(fake_copy.model, compiled)):
        try:
            with fake_copy.forward_context():
                fake_copy.call()
        except Exception as error:  # what ends the trace, or whatever the user's code raises
            inner = getattr(error, "inner_exception", error)
            if not isinstance(inner, _Traced):
                words = str(inner).strip().partition("\n")[0] or type(inner).__name__
                raise CaptureError("the model cannot be captured with symbolic sizes: "
                                   f"{words}") from error
    if backend.region is None:
        raise CaptureError("the model cannot be captured with symbolic sizes: torch.compile runs "
                           "it as it is written")
    return backend.region
