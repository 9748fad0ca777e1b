"""Compiled code of a model with symbolic sizes, whose schedule can be exchanged.

Dynamo and AOTAutograd trace the model once.  What they get back stands for whatever schedule the
graph has: its forward returns, in the place of the tensors that a schedule saves, one empty tensor
that carries them, and its backward finds them there.  So another schedule, for other sizes or
another budget, takes no tracing.  Inputs that the backward reads are saved by autograd itself,
which sees whether anybody has changed them in between.

Before a call with sizes that were not met yet has done anything, its peak is evaluated; where it
does not fit, the call raises `SizesNotPlanned`.

Blind spot: hooks for saved tensors see the empty tensor.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import fx, nn

from planner._apply.errors import PlanMismatch
from planner._apply.outputs import OutputWatcher, places_to_watch, watch
from planner._apply.plan_backend import (
    boxed_callable,
    checked_backward,
    names_in_model,
    refuse_double_backward,
)
from planner._apply.planned_code import CompiledCode
from planner._apply.rewrite import rewrite
from planner._apply.rewrite_spec import RewriteSpec
from planner._apply.same_step import outputs_let_go
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.joint_graph.joint import is_cotangent, primals_of
from planner._graph_capture.joint_graph.naming import name_modules
from planner._graph_capture.joint_graph.symbolic_sizes import Values
from planner._graph_capture.step.symbolic_region import SymbolicRegion
from planner._graph_capture.torch_compat import (
    aot_backend,
    backward_keeps_graph,
    before_double_backward,
    boxed,
    compile_forward,
    copied_module,
    pass_absent_gradients,
    sizes_as_they_are,
    split_joint_graph,
    symbolic_dimensions,
)

_MOST_SIZES = 1024
"""Of how many sizes a graph remembers which schedule serves them."""
_MOST_SCHEDULES = 8
"""Schedules that a graph keeps."""
_CARRIED = "_checkpoint_planner_saved"
_CARRIER = "checkpoint_planner_carrier"


class SizesNotPlanned(PlanMismatch):
    """A call has sizes that the schedule of its graph does not serve, or the graph has none."""

    def __init__(self, graph: SymbolicCallable, values: Values) -> None:
        super().__init__("no schedule of the graph with symbolic sizes serves these sizes")
        self.graph, self.values = graph, values


Fits = Callable[[Values], bool]
"""True for sizes at which a step is within the budget under some schedule."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The two graphs of one schedule."""

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    reads: tuple[tuple[bool, int], ...]
    """Inputs of the backward before the cotangents: saved by the schedule (`True`) or an input of
    the forward, and the index there."""
    fits: Fits
    watched: tuple[int, ...]
    """Outputs of the forward that are taken to be let go before the backward."""


class SymbolicCallable:
    """A compiled graph with symbolic sizes."""

    def __init__(self, region: SymbolicRegion, num_outputs: int) -> None:
        self.region, self.num_outputs = region, num_outputs
        self.schedules: list[Schedule] = []
        """The last that was made comes first."""
        self._served: OrderedDict[Values, Schedule] = OrderedDict()
        self.used: Schedule
        """Schedule of the last call."""

    def adopt(self, spec: RewriteSpec, fits: Fits, *, instead: bool) -> Schedule:
        """Run under this rewrite spec where it fits; `instead`: under no earlier one."""
        planned, = spec.regions
        lowered = self.region.variants[spec.low_peak]
        graphs = rewrite(lowered, planned.insertions, planned.inplace_reuses, planned.released)
        forward, backward = graphs.forward.graph, graphs.backward.graph
        saved = [node.name for node in forward.output_node().args[0][self.num_outputs:]]
        inputs = [node.name for node in forward.find_nodes(op="placeholder")]
        by_autograd = {inputs[place] for place in self.saved_by_autograd}
        made = Schedule(
            boxed_callable(graphs.forward), boxed_callable(graphs.backward),
            tuple((False, inputs.index(node.name)) if node.name in by_autograd
                  else (True, saved.index(node.name))
                  for node in backward.find_nodes(op="placeholder") if not is_cotangent(node)),
            fits, places_to_watch(outputs_let_go(spec, 0, lowered), lowered, graphs))
        self.schedules = [made, *([] if instead else self.schedules)][:_MOST_SCHEDULES]
        self._served.clear()
        return made

    def schedule_for(self, values: Values) -> Schedule:
        """The schedule that serves these sizes; raises `SizesNotPlanned`."""
        found = self._served.get(values)
        if found is None:
            found = next((each for each in self.schedules if each.fits(values)), None)
            if found is None:
                raise SizesNotPlanned(self, values)
            self._served[values] = found
            if len(self._served) > _MOST_SIZES:
                self._served.popitem(last=False)
        self._served.move_to_end(values)
        return found

    @cached_property
    def saved_by_autograd(self) -> tuple[int, ...]:
        """Inputs of the forward that autograd saves for the backward."""
        joint = self.region.variants[False].joint
        mutated = {*joint.mutations.values()}
        return tuple(index for index, node in enumerate(joint.primals)
                     if isinstance(node.meta["val"], torch.Tensor) and index not in mutated)

    def forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        """Outputs of the forward, and a tensor that carries those that its schedule saves."""
        values = self.region.values_of(args)
        schedule = self.used = self.schedule_for(values)
        results = schedule.forward(args)
        carrier = torch.empty(0)
        setattr(carrier, _CARRIED, (schedule, values, list(results[self.num_outputs:])))
        return results[:self.num_outputs], carrier

    def backward(self, primals: dict[int, Any], carrier: torch.Tensor, cotangents: list[Any]
                 ) -> Any:
        """The backward of the schedule that the forward ran under."""
        schedule, values, saved = getattr(carrier, _CARRIED)
        if not backward_keeps_graph():
            delattr(carrier, _CARRIED)
        args = [saved[place] if is_saved else primals[place]
                for is_saved, place in schedule.reads]
        del saved
        primals.clear()
        args += cotangents
        cotangents.clear()
        return self._checked(schedule, values)(args)

    def _checked(self, schedule: Schedule, values: Values) -> Callable[[list[Any]], Any]:
        """The backward with zeros for cotangents that autograd left out."""
        region, sizes = self.region, self.region.sizes
        like = [_Layout(tuple(sizes.number(size, values) for size in value.shape),
                        value.dtype, value.device)
                for node in region.variants[False].joint.cotangents
                for value in (node.meta["val"],)]
        return checked_backward(schedule.backward, like, region.cotangents)


@dataclass(frozen=True, slots=True)
class _Layout:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class SymbolicBackend(OutputWatcher):
    """The Dynamo backend that captures a model with symbolic sizes."""

    def __init__(self, model: nn.Module, cotangents: Sequence[bool]) -> None:
        self._model, self._cotangents = ref(model), tuple(cotangents)
        self.running: nn.Module | None = None
        self.graphs: list[SymbolicCallable] = []
        self.tensors: Mapping[str, torch.Tensor] = {}
        """Those among the arguments of the running call, by name."""
        self.dimensions: dict[str, dict[int, str]] = {}
        """Names of the sizes that are to be symbolic, by input and dimension."""
        self.used: Schedule | None = None
        """The schedule of the last call."""
        self.compilations = self.planned_runs = 0
        self.has_run = self.has_begun = self.is_trial = False

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compilations += 1
        model = self._model()
        assert model is not None  # it is being called
        if self.running is not None:
            name_modules(module, self.running)
        given = names_in_model(model, inputs)
        of_call = {id(tensor): name for name, tensor in self.tensors.items()}
        called_with = [of_call.get(id(value)) for value in inputs]
        made: list[SymbolicCallable] = []
        shells = _Shells()

        def partition(
            joint: fx.GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **_: object
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            try:
                region = SymbolicRegion.of(joint, num_fwd_outputs, self._cotangents, given,
                                           called_with, self.dimensions)
            except (CaptureError, ValueError) as error:
                raise PlanMismatch(str(error)) from error
            made.append(SymbolicCallable(region, num_fwd_outputs))
            return shells.of(joint, num_fwd_outputs, made[0].saved_by_autograd)

        def forward(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
            if not made:
                return boxed_callable(graph)
            return boxed(shells.forward(graph, made[0]))

        def backward(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
            return boxed(shells.backward(graph, made[0]))

        compiled = aot_backend(partition, forward, backward)(module, list(inputs))
        self.graphs += made

        def call(*args: Any) -> Any:
            if self.planned_runs:
                raise PlanMismatch("the model's graph breaks with symbolic sizes")
            outputs = compiled(*args)
            self.has_run = self.has_begun = True
            self.planned_runs += len(made)
            pass_absent_gradients(outputs)
            before_double_backward(outputs, refuse_double_backward)
            for target in made:
                self.used = target.used
                watch(outputs, target.used.watched, self._output_is_held)
            return outputs

        return torch.compiler.disable(call)


def _gradients(*args: object) -> Any:
    """Placeholder op of a stub graph; never executed."""
    raise AssertionError("a stub graph is not run")


class _Shells:
    """The two graphs that AOTAutograd is shown."""

    def of(self, joint: fx.GraphModule, num_outputs: int, saved: Sequence[int]
           ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward that save these inputs, and the tensor that carries the rest."""
        module = copied_module(joint, joint.graph)
        graph = module.graph
        primals = primals_of(module)
        self.inputs = [node.name for node in primals]
        read = [primals[place] for place in saved]
        places = {node.name: place for place, node in zip(saved, read, strict=True)}
        self.places = places
        output = graph.output_node()
        returned = list(output.args[0])
        tensor = next(node.meta["val"] for node in read)
        with graph.inserting_before(output):
            carrier = graph.create_node(
                "call_function", torch.ops.aten.empty.memory_format, ([0],), {}, name=_CARRIER)
            with tensor.fake_mode:
                carrier.meta["val"] = torch.empty(0)
            tangents = [node for node in graph.find_nodes(op="placeholder") if is_cotangent(node)]
            whole = graph.call_function(_gradients, (carrier, *read, *tangents))
            whole.meta["val"] = None
            for place in range(num_outputs, len(returned)):
                if isinstance(returned[place], fx.Node):
                    stub = graph.call_function(_gradients, (whole, place))
                    stub.meta = {"val": returned[place].meta.get("val")}
                    returned[place] = stub
        output.args = (returned,)
        graph.eliminate_dead_code()
        self.carrier = carrier.name
        return split_joint_graph(module, [*read, carrier], num_outputs)

    def forward(self, graph: fx.GraphModule, target: SymbolicCallable) -> Callable[..., Any]:
        """Runs `target` and returns what the graph does."""
        outputs = graph.graph.output_node().args[0]
        inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        count = target.num_outputs
        saved = [None if node.name == self.carrier else inputs.index(node.name)
                 for node in outputs[count:]]

        def run(args: list[Any]) -> Any:
            kept = [None if place is None else args[place] for place in saved]
            results, carrier = target.forward(args)
            return (*results, *(carrier if place is None else value
                                for place, value in zip(saved, kept, strict=True)))

        return run

    def backward(self, graph: fx.GraphModule, target: SymbolicCallable) -> Callable[..., Any]:
        """Runs `target` on what autograd has saved."""
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        count = len(target.region.cotangents)
        own = names[:len(names) - count]
        carrier = own.index(self.carrier)
        places = [self.places.get(name) for name in own]

        def run(args: list[Any]) -> Any:
            first = len(args) - count
            cotangents, carried = args[first:], args[carrier]
            primals = {place: value for place, value in zip(places, args, strict=False)
                       if place is not None}
            args.clear()
            return target.backward(primals, carried, cotangents)

        return run


NamedTensors = Callable[[tuple[Any, ...], dict[str, Any]], Mapping[str, torch.Tensor]]
"""The tensors among a call's arguments, by name."""


class SymbolicCode(CompiledCode):
    """Compiled code of the model with symbolic sizes, under whatever schedule its graph has."""

    def __init__(self, model: nn.Module, cotangents: Sequence[bool], tensors_of: NamedTensors
                 ) -> None:
        backend = SymbolicBackend(model, cotangents)
        super().__init__(type(model).__name__, backend)
        self._tensors_of, self._symbolic = tensors_of, backend

    @property
    def dimensions(self) -> dict[str, dict[int, str]]:
        """Names of the sizes that are to be symbolic, by input and dimension."""
        return self._symbolic.dimensions

    @property
    def graphs(self) -> Sequence[SymbolicCallable]:
        """The captured graphs: one, and those of sizes that torch specializes."""
        return self._symbolic.graphs

    @property
    def used(self) -> Schedule | None:
        """The schedule of the last call."""
        return self._symbolic.used

    def _compile(self) -> Callable[..., Any]:
        return compile_forward(self._name, self._backend, dynamic=None)

    @contextlib.contextmanager
    def _marked_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        tensors = self._symbolic.tensors = self._tensors_of(args, kwargs)
        try:
            with sizes_as_they_are((args, kwargs)), symbolic_dimensions([
                    (tensor, sorted(self.dimensions.get(name, ())))
                    for name, tensor in tensors.items()]):
                yield
        finally:
            self._symbolic.tensors = {}
