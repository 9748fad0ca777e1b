"""Compiled code of a model with symbolic sizes, whose schedule can be exchanged.

Dynamo and AOTAutograd trace the model once; another schedule, for other sizes or another budget,
takes no tracing (`graph_capture.dynamo.stub_graphs`).

Before a call with sizes that were not met yet has done anything, its peak is evaluated; where it
does not fit, the call raises `SizesNotPlanned`.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from planner._apply.call_signature import input_tensors
from planner._apply.errors import PlanMismatch
from planner._apply.exchangeable import ScheduledGraphs, Unplanned
from planner._apply.outputs import watch
from planner._apply.plan_backend import (
    Backend,
    OtherBranch,
    check_branches,
    check_numbers,
    different_op,
    written_places,
)
from planner._apply.planned_code import CompiledCode
from planner._apply.rewrite_spec import RewriteSpec, SymbolicSizes
from planner._apply.same_step import difference_from_step
from planner._apply.size_expressions import number
from planner._graph_capture.dynamo.stub_graphs import compiled_as_stubs
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.garbage import give_back_freed_memory
from planner._graph_capture.joint_graph.symbolic_sizes import Values
from planner._graph_capture.module_forward import Forward
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.step.symbolic_region import SymbolicRegion
from planner._graph_capture.torch_compat import (
    CallState,
    boxed_callable,
    compile_forward,
    constants_otherwise,
    sizes_as_they_are,
    symbolic_dimensions,
    varying_numbers,
)

_MOST_SIZES = 1024
"""Of how many sizes a graph remembers which schedule serves them."""
_MOST_SCHEDULES = 8
"""Schedules that a graph keeps."""
_MOST_PATHS = 8
"""Paths of the model's code, decided by values of its inputs, that are traced."""
_SIZES_PER_TRIM = 8
"""New sizes after which freed memory is given back to the system."""


class SizesNotPlanned(PlanMismatch):
    """A call has sizes that the schedule of its graph does not serve, or the graph has none."""

    def __init__(self, graph: SymbolicCallable) -> None:
        super().__init__("no schedule of the graph with symbolic sizes serves these sizes")
        self.graph = graph


Fits = Callable[[Values], bool]
"""True for sizes at which a step is within the budget under some schedule."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """One schedule of a graph."""

    graphs: ScheduledGraphs
    fits: Fits


class SymbolicCallable:
    """A compiled graph with symbolic sizes."""

    def __init__(self, region: SymbolicRegion, unplanned: Unplanned) -> None:
        """`unplanned`: is called for a gradient that is not planned."""
        self.region = region
        self._unplanned = unplanned
        self.schedules: list[Schedule] = []
        """The last that was made comes first."""
        self._new_sizes = 0
        self._served: OrderedDict[Values, Schedule] = OrderedDict()
        self.used: Schedule
        """Schedule of the last call."""

    def adopt(self, spec: RewriteSpec, fits: Fits, *, instead: bool) -> Schedule:
        """Run under this rewrite spec where it fits; `instead`: under no earlier one."""
        made = Schedule(
            ScheduledGraphs.of(spec, 0, self.region.variants[spec.low_peak], self._unplanned), fits)
        self.schedules = [made, *([] if instead else self.schedules)][:_MOST_SCHEDULES]
        self._served.clear()
        return made

    def schedule_for(self, values: Values) -> Schedule:
        """The schedule that serves these sizes; raises `SizesNotPlanned`."""
        found = self._served.get(values)
        if found is None:
            found = next((each for each in self.schedules if each.fits(values)), None)
            if found is None:
                raise SizesNotPlanned(self)
            self._served[values] = found
            self._new_sizes += 1
            if self._new_sizes % _SIZES_PER_TRIM == 0:
                give_back_freed_memory()
            if len(self._served) > _MOST_SIZES:
                self._served.popitem(last=False)
        self._served.move_to_end(values)
        return found

    def forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        """Outputs of the forward, and a tensor that carries those that its schedule saves."""
        values = self.region.values_of(args)
        schedule = self.used = self.schedule_for(values)
        return schedule.graphs.run_forward(
            args, partial(self.region.sizes.number, values=values))


class SymbolicBackend(Backend):
    """The Dynamo backend that captures a model with symbolic sizes."""

    def __init__(self, model: nn.Module, cotangents: Sequence[bool]) -> None:
        super().__init__(model)
        self._cotangents = tuple(cotangents)
        self.graphs: list[SymbolicCallable] = []
        """The captured graphs: one, and those of sizes that torch specializes."""
        self.tensors: Mapping[str, torch.Tensor] = {}
        """Those among the arguments of the running call, by name."""
        self.dimensions: dict[str, dict[int, str]] = {}
        """Names of the sizes that are to be symbolic, by input and dimension."""
        self.used: Schedule | None = None
        """The schedule of the last call."""
        self.returned: Sequence[Any] = ()
        """Values that the graph has returned in a trial."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        branches, given = self._begin_compiling(module, inputs)
        of_call = {id(tensor): name for name, tensor in self.tensors.items()}
        called_with = [of_call.get(id(value)) for value in inputs]

        written: tuple[int, ...] = ()

        def target_of(joint: fx.GraphModule, num_outputs: int) -> SymbolicCallable:
            nonlocal written
            written = written_places(joint)
            check_numbers(module, joint, num_outputs)
            try:
                return SymbolicCallable(SymbolicRegion.of(
                    joint, num_outputs, self._cotangents, given, called_with, self.dimensions),
                    self._note_unplanned)
            except (CaptureError, ValueError) as error:
                raise PlanMismatch(str(error)) from error

        with constants_otherwise(module, lambda _: False):
            compiled, target = compiled_as_stubs(module, inputs, target_of, boxed_callable)
        if target is not None:
            self.graphs.append(target)
        lacks_gradients = target is not None and False in self._cotangents

        def call(*args: Any) -> Any:
            if self.planned_runs:
                raise PlanMismatch("the model's graph breaks with symbolic sizes")
            check_branches(branches, args)
            state = CallState(args, written) if self.fallback and lacks_gradients else None
            outputs = compiled(*args)
            self.has_run = self.has_begun = True
            self.planned_runs += target is not None
            self._follow_gradients(outputs, args, module, state, self._cotangents,
                                   holds_inputs=state is not None)
            if self.is_trial:
                self.returned = outputs
            if target is not None:
                self.used = target.used
                watch(outputs, target.used.graphs.watched, self._output_is_held)
            return outputs

        return torch.compiler.disable(call)


class SymbolicCode(CompiledCode):
    """Compiled code of the model with symbolic sizes, under whatever schedule its graph has."""

    backend: SymbolicBackend

    def __init__(self, model: nn.Module, cotangents: Sequence[bool], *,
                 returns_in_order: bool = False) -> None:
        """`returns_in_order`: it is taken that the graph returns what the model does, in its order;
        a trial raises `PlanMismatch` where it does not."""
        super().__init__(type(model).__name__, SymbolicBackend(model, cotangents))
        self._paths = [self._compiled]
        """What is compiled of each path; that of the last call comes first."""
        self._returns_in_order = returns_in_order

    def call_block(self, block: str, module: nn.Module, own: Forward | None, /, *args: Any,
                   **kwargs: Any) -> Any:
        """Call the model.  Where its code decides by values of its inputs, each path is compiled by
        itself, as Dynamo has no guards on values."""
        paths = [*self._paths]
        if len(paths) < _MOST_PATHS:
            paths.append({})
        for path in paths:
            self._compiled = path
            self._paths = [path, *(other for other in self._paths if other is not path)]
            try:
                output = super().call_block(block, module, own, *args, **kwargs)
                break
            except OtherBranch:
                if path is paths[-1]:
                    raise
        returned, self.backend.returned = self.backend.returned, ()
        if self._returns_in_order and self.is_trial and [*map(id, returned)] != [
                *map(id, output_tensors(output))]:
            raise PlanMismatch("the model returns other tensors than its graph, or in another "
                               "order")
        return output

    def compile_again(self) -> None:
        """Compile the model's code anew in its next call."""
        self._compiled = {}
        self._paths = [self._compiled]
        self.backend.graphs.clear()

    def _compile(self) -> Callable[..., Any]:
        return compile_forward(self._name, self.backend, dynamic=None)

    @contextlib.contextmanager
    def _around_call(self, module: nn.Module, own: Forward | None, args: tuple[Any, ...],
                     kwargs: dict[str, Any]) -> Iterator[None]:
        tensors = self.backend.tensors = input_tensors(module, own, args, kwargs)
        try:
            with sizes_as_they_are((args, kwargs)), varying_numbers(), symbolic_dimensions([
                    (tensor, sorted(self.backend.dimensions.get(name, ())))
                    for name, tensor in tensors.items()]):
                yield
        finally:
            self.backend.tensors = {}


class SizedCode(SymbolicCode):
    """Code under one rewrite spec; raises `PlanMismatch` for another graph, and for sizes that it
    does not serve."""

    def __init__(self, model: nn.Module, spec: RewriteSpec) -> None:
        assert spec.sizes is not None, "a rewrite spec for a range of sizes"
        super().__init__(model, spec.regions[0].cotangents)
        self._spec, self._sizes = spec, spec.sizes
        for each in spec.sizes.dimensions:
            self.backend.dimensions.setdefault(each.input, {})[each.dimension] = each.size

    def __call__(self, module: nn.Module, own: Forward | None, /, *args: Any, **kwargs: Any
                 ) -> Any:
        """Call the module.  `own`: the forward that the instance has; `None`: that of its class."""
        check_ranges(self._sizes, input_tensors(module, own, args, kwargs))
        try:
            return super().__call__(module, own, *args, **kwargs)
        except SizesNotPlanned as unknown:
            self._adopt(unknown.graph)
        return super().__call__(module, own, *args, **kwargs)

    def _adopt(self, target: SymbolicCallable) -> None:
        """Run the rewrite spec on this graph; raises `PlanMismatch` where it is another one."""
        spec, region = self._spec, target.region
        if target.schedules:
            raise PlanMismatch("with inputs of these sizes the step would not stay within the "
                               "plan's budget; make a plan for them")
        if {*region.names.values()} != {*self._sizes.names} or (
                spec.low_peak not in region.variants):
            raise PlanMismatch("the plan is for any size of its ranges, and this model's code "
                               f"lets {', '.join(sorted(region.smallest)) or 'none'} vary, of "
                               f"{', '.join(self._sizes.names)}. Make a plan for these inputs")
        for named in (self._sizes.largest,
                      {each.name: each.smallest for each in self._sizes.ranges}):
            with region.at(region.values_at(named), low_peak=spec.low_peak) as lowered:
                difference = different_op(spec.regions[0], lowered) or difference_from_step(
                    _at(spec, self._sizes, named), 0, lowered)
            if difference is not None:
                raise PlanMismatch("the plan does not fit this model and these inputs; the first "
                                   f"difference: {difference}. Make a plan for them")
        target.adopt(spec, lambda values: spec.fits is None or spec.fits(region.named(values)),
                     instead=True)


def check_ranges(sizes: SymbolicSizes, tensors: dict[str, torch.Tensor]) -> None:
    """Raise `PlanMismatch` if an input has a size outside of the ranges."""
    ranges = {each.name: each for each in sizes.ranges}
    found: dict[str, tuple[int, str]] = {}
    for each in sizes.dimensions:
        tensor = tensors.get(each.input)
        if tensor is None or tensor.dim() <= each.dimension:
            raise PlanMismatch(f"the plan's inputs had `{each.input}` of {each.dimension + 1} "
                               "dimensions or more, which this call has not")
        size, served = tensor.size(each.dimension), ranges[each.size]
        where = f"dimension {each.dimension} of `{each.input}`"
        if not served.smallest <= size <= served.largest:
            raise PlanMismatch(
                f"{each.size} is {size} in this call ({where}), and the plan serves "
                f"{served.smallest} to {served.largest}: make a plan for " + (
                    "inputs of the largest size" if size > served.largest else "these inputs"))
        known, first = found.setdefault(each.size, (size, where))
        if known != size:
            raise PlanMismatch(f"{each.size} is {known} ({first}) and {size} ({where}) in this "
                               "call, and the plan has one size for both")


def _at(spec: RewriteSpec, sizes: SymbolicSizes, named: dict[str, int]) -> RewriteSpec:
    """The rewrite spec with the step as it states it for these sizes."""
    return replace(spec, buffers=tuple(
        replace(buffer, size_bytes=number(text, named))
        for buffer, text in zip(spec.buffers, sizes.buffer_bytes, strict=True)))
