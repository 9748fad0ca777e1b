"""Graphs captured by Dynamo, planned and run as models.

The first training step of some shapes is planned as by `planner.plan` and run under that plan, and
so is every later step of the same shapes.  Smaller shapes use the plan of larger ones if it serves
them; others are planned when they come.  If they do not fit, they run under the schedule with the
lowest peak, with a warning.  A percentage is of the plain step of the first shapes.

The loss is the first differentiable scalar that the graph returns; without one, every
differentiable output counts with a gradient of its own size.

Blind spots: ops captured by Dynamo do not know their modules, so `keep` can name only ops
(`"aten.topk"`); allocations of the code around the graph are not seen.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.foreign_calls import foreign_call
from planner._graph_capture.torch_compat import sizes_may_vary
from planner.api import plan, plan_step
from planner.arguments.budget import parse_budget
from planner.arguments.planning import PlanArguments, Planning
from planner.errors import InfeasibleBudget, PlanMismatch
from planner.plans.plan import Plan, summarize

log = logging.getLogger("planner.torch_compile_backend")

_SECONDS_FOR_LEAST = 5.0
"""Time limit of the lowest-peak plan, which is made within a step."""


@dataclass(frozen=True, slots=True)
class Options:
    """Contents of `torch.compile(options=…)`; see `planner.plan`."""

    budget_gb: float | None = None
    budget: int | str | None = None
    inductor: bool = True
    """Compile with Inductor; otherwise the planned graphs run op by op."""
    takes_least: bool = False
    """Run under the schedule with the lowest peak, whatever the budget, without a warning."""
    arguments: PlanArguments = field(default_factory=PlanArguments)
    """The other arguments, except those that the captured graph determines."""


def with_least_memory(module: fx.GraphModule) -> Callable[..., Any]:
    """The captured graph as a function that runs op by op under the schedule with the lowest
    peak."""
    planned: Callable[..., Any] = torch.compiler.disable(DynamoGraph(module, Options(
        budget=1, inductor=False, takes_least=True, arguments={"time_limit": _SECONDS_FOR_LEAST})))
    return planned


class DynamoGraph:
    """A captured graph that is planned when it first runs with inputs of some shapes."""

    def __init__(self, module: fx.GraphModule, options: Options) -> None:
        self._module, self._options = module, options
        self._numbers = _arguments_read_as_numbers(module)
        self._applied: dict[tuple[object, ...], Callable[..., Any]] = {}
        self._made: list[Plan] = []
        """Plans of this graph, for any parameters."""
        self._has_warned = False

    def __call__(self, *args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return self._module(*args)
        if (foreign := foreign_call()) is not None:
            if not (foreign.is_traced or self._has_warned):
                self._has_warned = True
                warnings.warn(foreign.reason, stacklevel=2)
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
        with sizes_may_vary(False):
            return self._first_call(key, args)

    def _first_call(self, key: tuple[object, ...], args: tuple[Any, ...]) -> Any:
        """Run the first step of some shapes, under a plan of larger ones or a new one."""
        region = _as_module(self._module, args)
        inputs = region.inputs_of(args)
        plans = _plans_of(args, self._options)
        for known in {id(each): each for each in (*plans, *self._made)}.values():
            with suppress(PlanMismatch):
                call = known.apply(region)
                outputs = call(*inputs)
                break
        else:
            try:
                made = self._plan(region, inputs, plans)
            except CaptureError as error:
                if not self._options.takes_least:
                    raise
                # By itself it may write into what is a parameter then.
                warnings.warn("it runs as it is written, for it cannot be planned by itself: "
                              f"{error}", stacklevel=2)
                region.release()
                self._applied[key] = self._module
                return self._module(*args)
            plans.append(made)
            self._made.append(made)
            call = made.apply(region)
            outputs = call(*inputs)
        region.release()
        applied = self._applied
        applied[key] = _Applied(call, region, tuple(
            ref(arg, lambda _: applied.pop(key, None)) for arg in args
            if isinstance(arg, nn.Parameter)))
        return outputs

    def _plan(self, region: Any, inputs: tuple[Any, ...], earlier: Sequence[Plan]) -> Plan:
        options = self._options
        limit = parse_budget(options.budget_gb, options.budget)
        # A percentage is of the first planned step.
        if earlier and limit is not None and not options.takes_least:
            limit = parse_budget(None, earlier[0].budget_bytes)
        planning = Planning.of(plan, {
            **options.arguments, "loss_fn": _loss_among(self._module),
            "backend": "inductor" if options.inductor else "eager"})

        def note(refusal: InfeasibleBudget) -> None:
            if not options.takes_least:
                log.warning("a step with inputs of other shapes does not fit in the budget, and "
                            "runs under the schedule that takes least: %s", refusal)

        log.info("planning a captured graph of %d nodes", len(self._module.graph.nodes))
        made = plan_step(region, inputs, limit, planning,
                         on_refusal=note if earlier or options.takes_least else None)
        log.info("%s", summarize(made))
        return made


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


_PLANS = WeakIdKeyDictionary()
"""The plans made so far, keyed weakly by a parameter of their model: Dynamo captures other shapes
as another graph, which has no reference to the first.  The first plan of each list has the budget
in bytes that a percentage resolves to."""


def _plans_of(args: tuple[Any, ...], options: Options) -> list[Plan]:
    """The list of plans made for this model with these options."""
    parameter = next((arg for arg in args if isinstance(arg, nn.Parameter)), None)
    if parameter is None:
        return []
    by_options: list[tuple[Options, list[Plan]]] = _PLANS.setdefault(parameter, [])
    for known, plans in by_options:
        if known == options:
            return plans
    by_options.append((options, []))
    return by_options[-1][1]


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
