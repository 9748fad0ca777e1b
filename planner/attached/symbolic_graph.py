"""A graph with symbolic sizes of a model that is trained within a budget.

The model of the world: where a call differs from a planned one in the sizes of its tensors alone,
the model is traced once more, with symbols for the sizes that differ.  From then on calls of other
sizes take no tracing.  A schedule is planned for the largest sizes met so far; for others its peak
is evaluated, by the project's simulator on the same problem with other numbers.  Where it does not
fit, a schedule is planned for those sizes on the same graph, and both are kept.

What a kernel takes for itself at smaller sizes is at first bounded by what it takes at the planned
ones; where that is too much, and for larger sizes, it is measured for each op and shape, once.

Blind spots: a loss outside of the model is taken to use at smaller sizes what it does at the
planned ones, and in proportion to the model's output at larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner._apply.call_signature import Call, input_tensors
from planner._apply.symbolic_code import Schedule, SymbolicCallable, SymbolicCode
from planner._graph_capture.joint_graph.symbolic_sizes import Values
from planner._graph_capture.module_forward import Forward, in_place_of_forward
from planner._graph_capture.step.symbolic_region import SymbolicRegion
from planner._graph_capture.torch_compat import FakeTensorMode, OpOverload, pytree
from planner._graph_capture.training_graph import LOSS_BACKWARD, Phase
from planner.attached.planned_graph import PlannedGraph
from planner.plans.plan import Plan
from planner.solvers.problem import Schedule as Order
from planner.solvers.simulator import simulate
from planner.step.variant import Variant


class SymbolicGraph(PlannedGraph):
    """The graph of a model for any sizes."""

    code: SymbolicCode

    def __init__(self, fixed: PlannedGraph, module: nn.Module, inner: Forward | None) -> None:
        """`fixed`: the graph that was captured with fixed sizes."""
        super().__init__(fixed.call)
        assert fixed.planner is not None
        self.plan, self.lives, self.plain_bytes = fixed.plan, fixed.lives, fixed.plain_bytes
        self.step_mates = fixed.step_mates.copy()
        self.outputs = fixed.planner.graph_outputs
        self.target: SymbolicCallable | None = None
        """The graph that the plan is of."""
        self.values: Values = ()
        """Of the symbols, at the sizes that the plan is made for."""
        self.has_run = False
        self._plans: dict[Schedule, Plan] = {}
        self._is_for_more_sizes = False

        def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, torch.Tensor]:
            with in_place_of_forward(module, inner):
                return input_tensors(module, args, kwargs)

        self.tensors_of = tensors_of
        self.code = SymbolicCode(module, fixed.plan.spec.regions[0].cotangents, tensors_of)

    def may_serve(self, call: Call) -> bool:
        """It is asked for by other means."""
        return False

    def note_sizes(self, call: Call) -> None:
        """Note which sizes of a call differ from those planned for: they are to be symbolic."""
        assert self.call is not None
        mine = self.call.sizes
        for name, sizes in call.sizes.items():
            differing = {place for place, (left, right) in enumerate(
                zip(sizes, mine[name], strict=True)) if left != right}
            if differing:
                self.code.dimensions.setdefault(name, set()).update(differing)

    def choose_sizes(self, target: SymbolicCallable, call: Call) -> Call:
        """Choose the sizes to plan for: those planned for so far where none of the call's is
        larger, else the call's own.  Returns a call that has them."""
        chosen = call
        if self.call is not None and self.target in (None, target) and not self.values and all(
                mine <= theirs for name, sizes in call.sizes.items()
                for mine, theirs in zip(sizes, self.call.sizes[name], strict=True)):
            chosen = self.call
        self._is_for_more_sizes = target is self.target
        self.target, self.values, self.call = target, target.values_at(chosen.sizes), chosen
        return chosen

    def arguments_at(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
                     ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with tensors of the sizes of another one."""
        names = {id(tensor): name for name, tensor in self.tensors_of(args, kwargs).items()}
        sizes = call.sizes
        resized: dict[int, torch.Tensor] = {}

        def of(leaf: Any) -> Any:
            wanted = sizes.get(names.get(id(leaf), ""))
            if not isinstance(leaf, torch.Tensor) or wanted in (None, tuple(leaf.shape)):
                return leaf
            if id(leaf) not in resized:
                resized[id(leaf)] = torch.empty(
                    wanted, dtype=leaf.dtype, device=leaf.device,
                    requires_grad=leaf.requires_grad)
            return resized[id(leaf)]

        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(of, (args, kwargs))
        return found

    def adopt(self, module: nn.Module, plan: Plan) -> None:
        """Run under this plan from here on, or, where it was made for more sizes, as well."""
        assert self.target is not None and self.planner is not None and self.known is not None
        self.plan, self.plain_bytes = plan, plan.baseline_peak_bytes
        variant, order = self.planner.schedule_of(plan, self.known)
        assert self.call is not None
        again = {key.name for key in self.call.signature.inputs if key.same_as is not None}
        inputs = [size for name, size in self.target.input_bytes if name not in again]
        peak = PeakAtSizes(self.target.region, self.values, variant, order,
                           self.planner.workspace, inputs)
        self._peak = peak
        # A plan that is over the budget is the one that uses least, and was said to be.
        planned_for, limit_bytes = self.values, max(plan.budget_bytes or 0, plan.peak_bytes)
        made = self.target.adopt(
            plan.spec, lambda values: plan.budget_bytes is None or values == planned_for
            or peak.is_within(limit_bytes, values), instead=not self._is_for_more_sizes)
        self._is_for_more_sizes = False
        self._plans = {each: self._plans[each] for target in self.code.graphs
                       for each in target.schedules if each in self._plans}
        self._plans[made] = plan

    def peak_bytes_at(self, sizes: Mapping[str, Sequence[int]]) -> int:
        """The peak of a step whose inputs have these sizes, under the last plan."""
        assert self.target is not None
        return self._peak.bytes_at(self.target.values_at(sizes))

    def note_run(self) -> None:
        """Note that a call went well."""
        self.has_run = True
        if self.code.used is not None:
            self.plan = self._plans.get(self.code.used, self.plan)


Workspace = Callable[..., int]


class PeakAtSizes:
    """The peak of a step under one schedule, as a function of its sizes."""

    def __init__(self, region: SymbolicRegion, values: Values, variant: Variant, order: Order,
                 workspace: Workspace, input_sizes: Sequence[Any]) -> None:
        """`variant`: that of the step where the symbols have these values; `input_sizes`: bytes of
        the call's tensors."""
        self._region, self._values, self._variant, self._order = region, values, variant, order
        self._lowered = region.variants[variant.low_peak]
        self._workspace = workspace
        storages, graph = self._lowered.storages, variant.graph
        place_of = {op.name: place for place, op in enumerate(graph.ops)}
        self._buffers: dict[int, Any] = {}  # buffer -> its size in symbols
        for op in self._lowered.ops:
            for storage, buffer in zip(op.outputs, graph.ops[place_of[op.name]].outputs,
                                       strict=True):
                self._buffers[buffer] = storages[storage].size_bytes
        cotangents = [storages[each].size_bytes for each in self._lowered.cotangent_storages
                      if each is not None]
        made = graph.ops[place_of[LOSS_BACKWARD]].outputs
        for buffer, size in zip(made[len(made) - len(cotangents):], cotangents, strict=False):
            self._buffers[buffer] = size
        sizes = region.sizes
        self._buffers = {buffer: size for buffer, size in self._buffers.items()
                         if sizes.number(size, values) == graph.buffers[buffer].size_bytes}
        self._of_loss = [place for place, op in enumerate(graph.ops) if op.phase is Phase.LOSS]
        self._output_sizes = cotangents
        self._input_sizes = input_sizes
        self._ops: dict[str, tuple[Any, list[int]]] = {}  # shape class -> an op, places of all
        for each in self._lowered.ops:
            node = each.node
            if isinstance(node.target, OpOverload):
                call = pytree.tree_map(
                    lambda leaf: leaf.meta.get("val") if hasattr(leaf, "meta") else leaf,
                    (node.args, dict(node.kwargs), node.meta.get("val")))
                self._ops.setdefault(f"{node.target} {_described(call)}", (
                    (each, call), []))[1].append(place_of[each.name])

    def is_within(self, limit_bytes: int, values: Values) -> bool:
        """True where the step uses no more than this when the symbols have these values."""
        is_smaller = all(mine <= planned for mine, planned in zip(values, self._values,
                                                                  strict=True))
        return (is_smaller and self._bytes_at(values, {}) <= limit_bytes) or (
            self.bytes_at(values) <= limit_bytes)

    def bytes_at(self, values: Values) -> int:
        """The peak of the whole step where the symbols have these values."""
        return self._bytes_at(values, self._workspaces(values))

    def _bytes_at(self, values: Values, workspace: Mapping[int, int]) -> int:
        """The same with such workspace of some ops; of others it is that at the planned sizes."""
        variant, sizes = self._variant, self._region.sizes
        graph, budget, problem = variant.graph, variant.budget, variant.problem
        scale = max(1.0, self._total(self._output_sizes, values)
                    / max(1, self._total(self._output_sizes, self._values)))
        of_loss = {buffer for place in self._of_loss for buffer in graph.ops[place].outputs}
        storages = tuple(
            replace(storage, size_bytes=sizes.number(self._buffers[place], values))
            if place in self._buffers else
            replace(storage, size_bytes=math.ceil(scale * storage.size_bytes))
            if place in of_loss else storage
            for place, storage in enumerate(problem.storages))
        ops = tuple(
            replace(op, workspace_bytes=workspace.get(
                place, math.ceil(scale * op.workspace_bytes) if place in self._of_loss
                else op.workspace_bytes))
            for place, op in enumerate(problem.ops))
        net_bytes = simulate(replace(problem, ops=ops, storages=storages), self._order).peak_bytes
        more_inputs = (self._total(self._input_sizes, values)
                       - self._total(self._input_sizes, self._values))
        more_kept = sum(after.size_bytes - before.size_bytes
                        for after, before in zip(storages, problem.storages, strict=True)
                        if before.kept_to_end) + more_inputs
        if budget.optimizer is None:
            return budget.resident_bytes + more_inputs + net_bytes
        return max(budget.resident_bytes + more_inputs + net_bytes,
                   budget.optimizer_step_bytes + more_kept)

    def _total(self, sizes: Sequence[Any], values: Values) -> int:
        return sum(self._region.sizes.number(size, values) for size in sizes)

    def _workspaces(self, values: Values) -> dict[int, int]:
        """Workspace of each op of the region."""
        mode, device = FakeTensorMode(), torch.device(self._variant.graph.device)
        found: dict[int, int] = {}
        for (op, call), places in self._ops.values():
            args, kwargs, out = self._region.sizes.at(call, values, mode)
            size = (self._workspace(op.node.target, args, kwargs, out)
                    + op.replay.workspace_bytes(device))
            found.update(dict.fromkeys(places, size))
        return found


def _described(value: object) -> str:
    """A text that is equal for equal calls."""
    leaves, structure = pytree.tree_flatten(value)
    words = [f"{leaf.dtype}{list(leaf.shape)}{list(leaf.stride())}"
             if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in leaves]
    return f"{structure} {' '.join(words)}"
