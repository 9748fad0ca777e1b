"""Check that the caller releases the model's output before the backward, if a plan relies on it.

Blind spot: an output that both the caller and the model's backward keep alive counts as saved.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from planner._apply.rewrite import RewrittenRegion
from planner._graph_capture.joint_graph.joint import tensors_of
from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner._graph_capture.torch_compat import storage_key

OUTPUT_IS_HELD = (
    "the plan counts on the model's output being let go before the backward (hold_output=False), "
    "and {bytes:,} bytes of it are still held, so that the step may take that much more than the "
    "budget: keep the loss alone, or plan with hold_output=True")


def places_to_watch(let_go: Collection[int], lowered: LoweredRegion, rewritten: RewrittenRegion
                    ) -> tuple[int, ...]:
    """Return the outputs among `let_go` that are freed before the backward unless the caller keeps
    them alive.  `let_go`: outputs that the plan expects the caller to release."""
    count = len(lowered.joint.forward_outputs)
    returned = rewritten.forward.graph.output_node().args[0]
    saved = {storage_key(tensor) for node in returned[count:] if isinstance(node, fx.Node)
             for tensor in tensors_of(node.meta["val"])}
    return tuple(place for place, node in enumerate(lowered.returned)
                 if place in let_go and node is not None
                 and storage_key(node.meta["val"]) not in saved)


class OutputWatcher:
    """Base of backends that warn once if the caller keeps an output that the plan expects it to
    release."""

    _warned_of_output = False

    def _output_is_held(self, size_bytes: int) -> None:
        if not self._warned_of_output:
            self._warned_of_output = True
            warnings.warn(OUTPUT_IS_HELD.format(bytes=size_bytes), stacklevel=2)


def watch(outputs: Sequence[Any], places: Sequence[int], report: Callable[[int], None]) -> None:
    """Call `report` when the backward begins with the bytes of these outputs that are still alive;
    do not call it if there are none."""
    node = next((tensor.grad_fn for tensor in outputs
                 if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None), None)
    if node is None or not places:
        return
    storages = {storage_key(outputs[place]): weakref.ref(outputs[place].untyped_storage())
                for place in places}

    def begun(_: object) -> None:
        held = sum(storage.nbytes() for found in storages.values()
                   if (storage := found()) is not None)
        if held:
            report(held)

    node.register_prehook(begun)
