"""Run a graph captured by Dynamo under the schedule with the lowest peak.

The first training step of some shapes is planned and run under that plan, and so is every later
step of the same shapes.  Smaller shapes use the plan of larger ones if it serves them.

The loss is the first differentiable scalar that the graph returns; without one, every
differentiable output counts with a gradient of its own size.

Blind spot: allocations of the code around the graph are not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import fx, nn

from planner._graph_capture.foreign_calls import foreign_call
from planner.api import capture
from planner.errors import PlanMismatch
from planner.plans.plan import Plan
from planner.reporters.one_line import summarize
from planner.search.effort import Effort
from planner.search.planning import leanest_plan

log = logging.getLogger("planner")

_SECONDS = 5.0
"""Time limit of a plan, which is made within a step."""


def with_least_memory(module: fx.GraphModule) -> Callable[..., Any]:
    """The captured graph as a function that runs op by op under the schedule with the lowest
    peak."""
    planned: Callable[..., Any] = torch.compiler.disable(_LeanGraph(module))
    return planned


class _LeanGraph:
    """A captured graph that is planned when it first runs with inputs of some shapes."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._numbers = _arguments_read_as_numbers(module)
        self._applied: dict[tuple[object, ...], _Applied] = {}
        self._made: list[Plan] = []
        """Plans of this graph, for any parameters."""

    def __call__(self, *args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors) or (
                foreign_call() is not None):
            return self._module(*args)
        key = tuple(
            arg if not isinstance(arg, torch.Tensor) else
            # Dynamo runs one graph for all modules of equal structure, each with its own
            # parameters.
            (id(arg), arg.requires_grad) if isinstance(arg, nn.Parameter) else
            (arg.shape, arg.stride(), arg.dtype, arg.item() if index in self._numbers else None)
            for index, arg in enumerate(args))
        if key in self._applied:
            return self._applied[key](*args)
        return self._first_call(key, args)

    def _first_call(self, key: tuple[object, ...], args: tuple[Any, ...]) -> Any:
        """Run the first step of some shapes, under a plan of larger ones or a new one."""
        region = _as_module(self._module, args)
        inputs = region.inputs_of(args)
        for known in self._made:
            with suppress(PlanMismatch):
                call = known.apply(region)
                outputs = call(*inputs)
                break
        else:
            prepared = capture(region, inputs, loss_fn=_loss_among(self._module))
            made = leanest_plan(prepared, Effort(time_limit=_SECONDS))
            log.info("%s", summarize(made))
            self._made.append(made)
            call = made.apply(region)
            outputs = call(*inputs)
        region.release()
        self._applied[key] = _Applied(call, region, tuple(
            ref(arg, partial(_forget, self._applied, key)) for arg in args
            if isinstance(arg, nn.Parameter)))
        return outputs


@dataclass(frozen=True, slots=True)
class _Applied:
    """A planned region, which refers to parameters only while it runs: Dynamo keeps its compiled
    code even after the model is deleted."""

    call: Callable[..., Any]
    region: Any
    parameters: tuple[ref[nn.Parameter], ...]
    """Deletion of one of them drops this entry, before another object reuses its `id`."""

    def __call__(self, *args: Any) -> Any:
        self.region.take(args)
        try:
            return self.call(*self.region.inputs_of(args))
        finally:
            self.region.release()


def _forget(applied: dict[tuple[object, ...], _Applied], key: tuple[object, ...],
            _: object) -> None:
    applied.pop(key, None)


def _as_module(module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
    """The captured graph as a module with the parameters among `args`."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if _is_number_of_argument(node):
            copies[node] = args[names.index(node.args[0].name)].item()
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        # Dynamo's metadata survive a second capture only sometimes; names must not depend on them.
        copies[node].meta = {}
    bare = fx.GraphModule(module, graph)
    # A parameter's name comes from its place in the model.
    parameters = {index: names[index] for index, arg in enumerate(args)
                  if isinstance(arg, nn.Parameter)}

    class CapturedGraph(nn.Module):
        """A graph captured by Dynamo."""

        def __init__(self) -> None:
            super().__init__()
            self.graph_module = bare

        def take(self, args: tuple[Any, ...]) -> None:
            self._parameters.update({name: args[index] for index, name in parameters.items()})

        def release(self) -> None:
            self._parameters.update(dict.fromkeys(parameters.values()))

        def inputs_of(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(arg for index, arg in enumerate(args) if index not in parameters)

        def forward(self, *inputs: Any) -> Any:
            given = iter(inputs)
            return self.graph_module(*[
                getattr(self, parameters[index]) if index in parameters else next(given)
                for index in range(len(names))])

    region = CapturedGraph()
    region.take(args)
    return region


def _is_number_of_argument(node: fx.Node) -> bool:
    """True if the node reads the value of a scalar argument: Dynamo makes tensors of Python floats
    that change between calls."""
    return bool(node.op == "call_method" and node.target == "item"
                and node.args[0].op == "placeholder")


def _arguments_read_as_numbers(module: fx.GraphModule) -> frozenset[int]:
    read = {node.args[0] for node in module.graph.nodes if _is_number_of_argument(node)}
    return frozenset(index for index, node
                     in enumerate(module.graph.find_nodes(op="placeholder")) if node in read)


def _loss_among(module: fx.GraphModule) -> Callable[[Any], torch.Tensor] | None:
    """Select the first differentiable scalar of the outputs; `None` if there is none."""
    returned = module.graph.output_node().args[0]
    for index, node in enumerate(returned if isinstance(returned, (tuple, list)) else ()):
        value = getattr(node, "meta", {}).get("example_value")
        if (isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad):
            return lambda outputs: outputs[index]
    return None
