"""Gradients that a compiled region does not compute: gradients of gradients, which torch refuses,
and those through an output that was taken for one without."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from planner._graph_capture.random_state import TorchState
from planner._graph_capture.torch_compat.compilation import region_nodes
from planner._graph_capture.torch_compat.memory import TorchDispatchMode, running_node_number
from planner._graph_capture.torch_compat.symbols import backward_keeps_graph

_Gradients = Sequence[torch.Tensor | None]
_MOST_COPIED_BYTES = 2 ** 20


class DoubleBackwardWatch(TorchDispatchMode):
    """Notes whether a backward records a graph to be differentiated again (`create_graph=True`)."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        self.found |= torch.is_grad_enabled() and running_node_number() is not None
        return func(*args, **(kwargs or {}))


class CallState:
    """State that a region reads and may change, as it is when the call begins."""

    def __init__(self, inputs: Sequence[Any], written: Sequence[int]) -> None:
        """`written`: places of the inputs, such as buffers, that the region writes."""
        self.torch = TorchState(inputs)
        are_small = sum(inputs[place].nbytes for place in written) <= _MOST_COPIED_BYTES
        self.written = {place: inputs[place].detach().clone() if are_small else None
                        for place in written}
        """Copies by place; `None`: they are too large."""


def differentiate_again(outputs: Sequence[Any], inputs: Sequence[Any], run: Callable[..., Any],
                        tell: Callable[[], object], refuse: Callable[[], object], *,
                        state: CallState | None = None, expected: Sequence[bool] = (),
                        holds_inputs: bool = False, begin: Callable[[], object] = lambda: None,
                        unplanned: Callable[[], Exception | None] = lambda: None) -> None:
    """Allow gradients through the compiled region behind `outputs` to be differentiated again.

    In a backward that records a graph (`create_graph=True`), `tell` is called, and the region's
    gradients are computed by `run`, the region as it is written, of the same `inputs`.  Where these
    are gone, or the gradients differ (by random numbers, or buffers that were updated), `refuse` is
    called once they are differentiated.

    `state`, `unplanned`: where the first is given, gradients for which the second returns an error
    are replaced in the same way; the error is raised where the inputs are gone, which
    `holds_inputs` prevents.  `expected`: for each differentiable output, whether its gradient is
    planned; where others come, `begin` is called before any gradient is replaced.
    """
    # Hooks must not keep alive what the plan lets go of.
    given = [_while_alive(each) if isinstance(each, torch.Tensor) and not holds_inputs
             else lambda value=each: value for each in inputs]
    if state is not None:
        for place, before in state.written.items():
            given[place] = lambda value=before: value
    regions = [*dict.fromkeys(region_nodes(outputs))]
    to_come = len(regions)

    def end() -> None:
        nonlocal to_come
        to_come -= 1
        if not to_come and not backward_keeps_graph():
            given[:] = [lambda: None] * len(given)  # the output may live on

    for region in regions:
        places, weak = _places(region, outputs), weakref.proxy(region)

        def begun(cotangents: _Gradients, node: Any = weak,
                  places: Sequence[tuple[int, bool, int]] = places) -> None:
            is_again = torch.is_grad_enabled()
            if is_again:
                tell()
            elif state is None:
                return
            elif _are_expected(cotangents, places, expected):
                end()  # a hook on what is made would keep the cotangents until then
                return
            begin()

            def made(gradients: _Gradients, cotangents: _Gradients) -> _Gradients:
                handle.remove()
                found = replaced(gradients, cotangents)
                end()
                return found

            def replaced(gradients: _Gradients, cotangents: _Gradients) -> _Gradients:
                error, edges = unplanned(), node.next_functions
                if not is_again and error is None:
                    return gradients
                again = _gradients(run, given, places, cotangents, state, create_graph=is_again)
                if error is not None:
                    if not again:
                        raise error
                    return tuple(map(again.get, edges))
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


def _while_alive(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Gives the tensor, or one like it, while its memory is there."""
    found = weakref.ref(tensor)
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        return found
    # The caller's may be another object: that of an argument that is given twice is.
    memory = weakref.ref(tensor.untyped_storage())
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    dtype, device = tensor.dtype, tensor.device

    def alike() -> torch.Tensor | None:
        storage = memory()
        return found() if storage is None else torch.empty(0, dtype=dtype, device=device).set_(
            storage, *layout)

    return alike


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


def _are_expected(cotangents: _Gradients, places: Sequence[tuple[int, bool, int]],
                  expected: Sequence[bool]) -> bool:
    """True if all cotangents come through outputs from which the plan expects them."""
    numbers = sorted({number for _, _, number in places})
    return len(numbers) == len(expected) and all(
        is_expected or cotangents[number] is None
        for number, is_expected in zip(numbers, expected, strict=True))


def _gradients(run: Callable[..., Any], given: Sequence[Callable[[], Any]],
               places: Sequence[tuple[int, bool, int]], cotangents: _Gradients,
               state: CallState | None, *, create_graph: bool) -> dict[Any, torch.Tensor]:
    """The gradients of `run` by the edge where they go; none if they cannot be computed."""
    inputs = [get() for get in given]
    numbers = {number for number, each in enumerate(cotangents) if each is not None}
    wanted = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if any(each is None for each in inputs) or not numbers <= {number for _, _, number in places}:
        return {}
    with torch.enable_grad(), (TorchState(wanted) if state is None else state.torch).again():
        # One input may have been made of another: gradients end at these, before they meet.
        own = {id(each): each.view_as(each) for each in wanted}
        outputs = run(*(  # updates of buffers are made to copies
            own[id(each)] if id(each) in own else
            each.clone() if isinstance(each, torch.Tensor) else each for each in inputs))
        pairs = {number: outputs[place]._base if is_view else outputs[place]
                 for place, is_view, number in places if number in numbers}
        found = torch.autograd.grad(
            list(pairs.values()), [own[id(each)] for each in wanted],
            [cotangents[number] for number in pairs],
            create_graph=create_graph, allow_unused=True)
    edges = [get_gradient_edge(each) for each in wanted]
    return {(edge.node, edge.output_nr): each
            for edge, each in zip(edges, found, strict=True) if each is not None}


def _are_close(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """True if two gradients differ by no more than rounding."""
    return found is not None and found.shape == expected.shape and not (
        (found - expected).norm() > _ROUNDING * expected.norm())


_ROUNDING = 0.02
"""Relative error of a gradient that rounding to bfloat16 may cause."""
