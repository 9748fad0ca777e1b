"""Gradients of gradients through a compiled region, which torch refuses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from planner._graph_capture.torch_compat.compilation import region_nodes

_Gradients = Sequence[torch.Tensor | None]


def differentiate_again(outputs: Sequence[Any], inputs: Sequence[Any], run: Callable[..., Any],
                        tell: Callable[[], object], refuse: Callable[[], object]) -> None:
    """Allow gradients through the compiled region behind `outputs` to be differentiated again.

    In a backward that records a graph (`create_graph=True`), `tell` is called, and the region's
    gradients are computed by `run`, the region as it is written, of the same `inputs`.  Where these
    are gone, or the gradients differ (by random numbers, or buffers that were updated), `refuse` is
    called once they are differentiated.
    """
    # Hooks must not keep alive what the plan lets go of.
    given = [weakref.ref(each) if isinstance(each, torch.Tensor) else each for each in inputs]
    for region in dict.fromkeys(region_nodes(outputs)):
        places, weak = _places(region, outputs), weakref.proxy(region)

        def begun(_: object, node: Any = weak,
                  places: Sequence[tuple[int, bool, int]] = places) -> None:
            if not torch.is_grad_enabled():
                return
            tell()

            def made(gradients: _Gradients, cotangents: _Gradients) -> _Gradients:
                handle.remove()
                again = _gradients(run, given, places, cotangents)
                edges = node.next_functions
                if all(each is None or _are_close(again.get(edge), each)
                       for each, edge in zip(gradients, edges, strict=True)):
                    return tuple(None if each is None else again[edge]
                                 for each, edge in zip(gradients, edges, strict=True))
                for each in gradients:
                    if each is not None and each.grad_fn is not None:
                        each.grad_fn.register_prehook(lambda _: refuse())
                return gradients

            handle = node.register_hook(made)

        region.register_prehook(begun)


def _places(node: Any, outputs: Sequence[Any]) -> list[tuple[int, bool, int]]:
    """Of the outputs that come from the node: their place, whether they are views of what comes
    from it, and the number that this has among the node's outputs."""
    found = []
    for place, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            is_view = output.grad_fn is not node
            own = output._base if is_view else output
            if own is not None and own.grad_fn is node:
                found.append((place, is_view, own.output_nr))
    return found


def _gradients(run: Callable[..., Any], given: Sequence[Any],
               places: Sequence[tuple[int, bool, int]], cotangents: _Gradients
               ) -> dict[Any, torch.Tensor]:
    """The gradients of `run` by the edge where they go; none if they cannot be computed."""
    inputs = [each() if isinstance(each, weakref.ref) else each for each in given]
    numbers = {number for number, each in enumerate(cotangents) if each is not None}
    wanted = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if any(each is None for each in inputs) or not numbers <= {number for _, _, number in places}:
        return {}
    devices = {each.device for each in wanted if each.is_cuda}
    with torch.enable_grad(), torch.random.fork_rng(devices):
        outputs = run(*(  # updates of buffers are made to copies
            each.clone() if isinstance(each, torch.Tensor) and not each.requires_grad else each
            for each in inputs))
        pairs = {number: outputs[place]._base if is_view else outputs[place]
                 for place, is_view, number in places if number in numbers}
        found = torch.autograd.grad(
            list(pairs.values()), wanted, [cotangents[number] for number in pairs],
            create_graph=True, allow_unused=True)
    edges = [get_gradient_edge(each) for each in wanted]
    return {(edge.node, edge.output_nr): each
            for edge, each in zip(edges, found, strict=True) if each is not None}


def _are_close(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """True if two gradients differ by no more than rounding."""
    return found is not None and found.shape == expected.shape and not (
        (found - expected).norm() > _ROUNDING * expected.norm())


_ROUNDING = 0.02
"""Relative error of a gradient that rounding to bfloat16 may cause."""
