"""The Dynamo backend of a plan: it checks that each captured region is the planned one, and
replaces it by the plan's graphs.

The graphs run op by op, boxed, so that memory is as simulated.  If the plan relies on it, a watcher
warns of outputs that the caller has not released when the backward begins.

Blind spot: an output that both the caller and the model's backward keep alive counts as saved.
"""

from __future__ import annotations

import copy
import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import fx, nn
from torch.overrides import get_default_nowrap_functions

from planner._apply.errors import PlanMismatch
from planner._apply.rewrite import RewrittenRegion, rewrite
from planner._apply.rewrite_spec import OpKey, RegionSpec, RewriteSpec
from planner._apply.same_step import difference_from_step, outputs_let_go
from planner._graph_capture.errors import CaptureError, PlannerError
from planner._graph_capture.joint_graph.joint import count_cotangents, primals_of, tensors_of
from planner._graph_capture.joint_graph.lower import LoweredRegion, region_signature
from planner._graph_capture.joint_graph.naming import name_modules
from planner._graph_capture.joint_graph.pipeline import JointVariant, lower_joint_graph
from planner._graph_capture.joint_graph.replay import is_random
from planner._graph_capture.torch_compat import (
    BoxedCodeGen,
    OpOverload,
    PartitionFunction,
    aot_backend,
    before_double_backward,
    boxed,
    branches_of,
    mutated_inputs,
    no_subclass_functions,
    pass_absent_gradients,
    primal_sources,
    schema_of,
    storage_key,
)
from planner._graph_capture.training_graph import RegionSignature

Fallback = Callable[[fx.GraphModule], Callable[..., Any]]
"""Converts a captured graph into a function of its inputs that trains it."""


@dataclass(frozen=True, slots=True)
class Match:
    """A captured graph and its region in the rewrite spec."""

    index: int
    """The region's number."""
    region: RegionSpec
    lowered: LoweredRegion
    is_resized: bool
    """True if it is the region with smaller tensors."""


_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16,
                    torch.Tensor.double, torch.Tensor.to, torch.Tensor.detach})
_OF_SHAPE = frozenset({torch.Tensor.size, torch.Tensor.stride, torch.Tensor.dim,
                       torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.is_floating_point,
                       torch.Tensor.register_hook, torch.Tensor.__len__, torch.Tensor.__hash__,
                       torch.Tensor.untyped_storage, torch.Tensor.get_device})


class OutputNotMade(PlannerError, RuntimeError):
    """An elided output of the model was read."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(
            f"the model's output of shape {tuple(shape)} was not made: the plan runs the part that "
            "makes it in chunks, and was made for a caller that reads the loss alone "
            "(hold_output=False); plan with hold_output=True to read it")
        self._shape = tuple(shape)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._shape,)


class ElidedOutput(torch.Tensor):
    """Has shape, dtype and device; reading it raises `OutputNotMade`."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Sequence[type],
                           args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
                           ) -> Any:
        given = kwargs or {}
        with no_subclass_functions():
            if func in get_default_nowrap_functions() or func in _OF_SHAPE or (
                    getattr(func, "__name__", "") == "__get__"):
                return func(*args, **given)
            if func in _CASTS:  # as wrappers of models do with all outputs
                single = args[0][(slice(0, 1),) * args[0].dim()]
                return func(single, *args[1:], **given).expand(args[0].shape).as_subclass(cls)
            shape = next((arg.shape for arg in (*args, *given.values()) if isinstance(arg, cls)),
                         ())
        raise OutputNotMade(shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ElidedOutput(shape={tuple(self.shape)}, dtype={self.dtype})"


def without_elided(outputs: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Return the outputs, with those at these places unreadable."""
    if not places:
        return outputs
    return type(outputs)(  # type: ignore[call-arg]
        value.as_subclass(ElidedOutput) if place in places else value
        for place, value in enumerate(outputs))


def names_in_model(model: nn.Module, values: Sequence[Any]) -> list[str | None]:
    """Return the name of each value that is a parameter or buffer of the model, else `None`."""
    names = {id(tensor): name for name, tensor in
             (*model.named_parameters(), *model.named_buffers())}
    return [names.get(id(value)) for value in values]


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


class PlanBackend(OutputWatcher):
    """The Dynamo backend that replaces captured graphs by a rewrite spec's graphs."""

    def __init__(self, model: nn.Module, spec: RewriteSpec, regions: Sequence[int] | None = None
                 ) -> None:
        """Create the backend.  `regions`: those of the rewrite spec that may be met, by default
        all."""
        # Compiled code refers to this object, and torch's cache, which the garbage collector does
        # not see, refers to the code: a model that the caller deletes would stay.
        self._model = weakref.ref(model)
        self._spec = spec
        self._regions = tuple(range(len(spec.regions)) if regions is None else regions)
        self._compiled_regions = 0
        self._lowered: dict[tuple[fx.GraphModule, int], LoweredRegion] | None = None
        self.running: nn.Module | None = None
        """The module whose forward is being called: the model or a block; `None`: unknown, and
        modules keep the names of the graph."""
        self.fallback: Fallback | None = None
        """Replacement for a graph that is not the plan's once others have run; `None`: that is an
        error."""
        self.compilations = 0
        """Number of graphs compiled so far."""
        self.has_run = False
        """True if any captured graph has run in this call."""
        self.has_begun = False
        """True if the part that has run may have changed random state or buffers, so that the call
        cannot start over."""
        self.is_trial = False
        """True if a graph that is not the plan's ends the call although others have run."""
        self._leaves_no_trace = False  # the graph without gradients that was compiled last
        self.planned_runs = 0
        """Number of regions of the plan that have run in this call."""

    def with_spec(self, spec: RewriteSpec, regions: Sequence[int]) -> Self:
        """Return the backend of these regions of another rewrite spec for the same captured graphs
        (the same modules).  Graphs that this one has lowered are not lowered again."""
        if self._lowered is None:
            self._lowered = {}
        other = copy.copy(self)
        other._spec, other._regions = spec, tuple(regions)
        return other

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        match: Match | None = None
        watched: list[int] = []
        branches = branches_of(module)
        self.compilations += 1
        if self.running is not None:
            name_modules(module, self.running)
        # Read now: the model may have other parameters than when the plan was applied.  Only the
        # names, since the compiler keeps `partition`, and an input may be an activation.
        model = self._model()
        assert model is not None  # it is being called
        given = names_in_model(model, inputs)

        def partition(
            joint: fx.GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **_: object
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            nonlocal match
            match = self._matching_region(module, joint, num_fwd_outputs, given)
            region = match.region
            rewritten = rewrite(match.lowered, region.insertions, region.inplace_reuses,
                                region.released)
            watched.extend(places_to_watch(
                outputs_let_go(self._spec, match.index, match.lowered), match.lowered, rewritten))
            rewritten = self._prepared(match, rewritten, num_fwd_outputs)
            return rewritten.forward, rewritten.backward

        self._leaves_no_trace = False
        try:
            compiled = self._compile(module, inputs, partition, lambda: match)
        except Exception as error:
            mismatch = getattr(error, "inner_exception", error)
            if self.is_trial or not (isinstance(mismatch, PlanMismatch) and self.fallback
                                     and self.has_begun):
                raise
            warnings.warn("a part of this step is not the planned one; it runs under the schedule "
                          "that takes least, and the step may take more than the budget: "
                          f"{mismatch}", stacklevel=2)
            compiled = self.fallback(module)
        leaves_no_trace = self._leaves_no_trace

        def call(*args: Any) -> Any:
            for branch in branches:
                if not branch.holds(args):
                    raise PlanMismatch(
                        "the model's code decides by the values of its inputs "
                        f"({branch.place}), and goes another way than in the step that was "
                        f"planned, where the answer was {branch.taken}. Make a plan for these "
                        "inputs, or use planner.within(model, ...), which does")
            self.has_run = True
            self.has_begun |= not leaves_no_trace
            self.planned_runs += match is not None
            outputs = compiled(*args)
            pass_absent_gradients(outputs)
            before_double_backward(outputs, refuse_double_backward)
            watch(outputs, watched, self._output_is_held)
            return outputs if match is None else without_elided(outputs, match.region.elided)

        return torch.compiler.disable(call)

    def _compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionFunction,
        match: Callable[[], Match | None],
    ) -> Callable[..., Any]:
        """Return the captured module, compiled with the graphs of `partition`; `match` is the
        region that it found."""

        def forward(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
            self._leaves_no_trace = match() is None and _leaves_no_trace(graph.graph)
            return boxed_callable(graph)

        def backward(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
            found = match()
            cotangents = found.region.cotangents if found else ()
            count = len(cotangents)
            planned = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")
                       ][-count:] if count else []
            return checked_backward(boxed_callable(graph), planned, cotangents)

        return aot_backend(partition, forward, backward)(module, list(inputs))

    def _prepared(self, match: Match, graphs: RewrittenRegion, num_outputs: int
                  ) -> RewrittenRegion:
        """Return the graphs in the form for their compiler; the forward's first `num_outputs`
        outputs are the caller's."""
        return graphs

    def _matching_region(
        self, module: fx.GraphModule, joint: fx.GraphModule, num_forward_outputs: int,
        given: Sequence[str | None],
    ) -> Match:
        """Return the rewrite spec's region that equals this graph, among those whose inputs have
        these names, if any; raise `PlanMismatch` if there is none."""
        names = [source.name(given) for source in primal_sources(primals_of(joint))]
        variant = JointVariant(self._spec.backend == "inductor", self._spec.low_peak,
                               self._spec.chunks, self._spec.inner_chunks)
        first_difference = ""
        start = self._compiled_regions % max(len(self._regions), 1)
        for index in (*self._regions[start:], *self._regions[:start]):
            region = self._spec.regions[index]
            if len(region.cotangents) != count_cotangents(joint):
                first_difference = first_difference or (
                    f"the plan has {len(region.cotangents)} differentiable outputs, "
                    f"this model {count_cotangents(joint)}")
                continue
            lowered = None if self._lowered is None else self._lowered.get((module, index))
            if lowered is None:
                lowered = lower_joint_graph(
                    joint, num_forward_outputs, variant, cotangents=region.cotangents,
                    input_names=names, hoisted=region.hoisted, region=index, block=region.block,
                    elided=region.elided)
            if self._lowered is not None:
                self._lowered[module, index] = lowered
            difference = different_op(region, lowered)
            is_resized = difference is not None
            if difference is not None and region.region_signature is not None:
                # In a step that may fall back, code may size tensors by values, with equal inputs.
                difference = self._why_not_served(
                    region.region_signature, region_signature(lowered), difference
                )
            if difference is None:
                difference = difference_from_step(self._spec, index, lowered)
            if difference is None:
                self._compiled_regions += 1
                return Match(index, region, lowered, is_resized)
            first_difference = first_difference or difference
        raise PlanMismatch(
            f"the plan does not fit this model and these inputs; the first difference: "
            f"{first_difference}. Make a plan for them")

    def _why_not_served(
        self, planned: RegionSignature, found: RegionSignature, difference: str
    ) -> str | None:
        """Reason why a region that differs from the planned one cannot run its schedule within its
        memory; `None` if it can, since it has the same ops on smaller tensors."""
        # In a step that may fall back, values may decide sizes, so that equal inputs prove nothing.
        has_control_flow = self.fallback is not None and planned.is_like(found)
        if not (planned.serves(found) or has_control_flow):
            return difference
        larger = planned.first_larger(found)
        if larger is None:
            return None
        return (f"{difference}, and with these inputs a tensor takes {larger[1]:,} bytes where the "
                f"plan has {larger[0]:,}: a plan serves inputs up to the size it was made with")


def refuse_double_backward() -> None:
    """Raise `CaptureError`: what was compiled is differentiated once."""
    raise CaptureError(
        "a gradient that came through the planned step is differentiated again (create_graph=True, "
        "as for a gradient penalty), and what torch.compile has captured can be differentiated "
        "once only. Make such a loss of the model as it is written: "
        "type(model).forward(model, ...) calls it without its plan; or plan only parts of the "
        "model that are differentiated once")


def _leaves_no_trace(graph: fx.Graph) -> bool:
    """Return whether a graph only makes its outputs: it draws no random numbers and writes no
    input."""
    return not mutated_inputs(graph.output_node()) and all(
        isinstance(node.target, OpOverload) and not schema_of(node.target).is_mutable
        and not is_random(node) for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem)


def different_op(region: RegionSpec, lowered: LoweredRegion) -> str | None:
    """Describe the first op that differs between a region and a captured graph; `None` if there is
    none."""
    expected = (*region.forward, *region.backward)
    for want, have in zip(expected, lowered.ops, strict=False):
        if want.name != have.name or want.digest != have.digest:
            return (f"the plan has {_describe_op(want)}, "
                    f"the model has {_describe_op(OpKey(have.name, have.digest, have.result))}")
    if len(expected) != len(lowered.ops):
        return f"the plan has {len(expected)} ops, the model has {len(lowered.ops)}"
    if len(region.forward) != lowered.num_forward:
        return (f"the plan's forward has {len(region.forward)} ops, "
                f"the model's {lowered.num_forward}")
    return None


def _describe_op(key: OpKey) -> str:
    return f"{key.name} -> {key.result} [{key.digest[:8]}]"


def boxed_callable(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the module's generated code as a function of a list of arguments, which it empties."""
    graph.graph.set_codegen(BoxedCodeGen())
    graph.recompile()
    return boxed(graph.forward)


class Layout(Protocol):
    """Of a tensor that is to be made."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def checked_backward(
    run: Callable[[list[Any]], Any], planned: Sequence[Layout], cotangents: Sequence[bool],
) -> Callable[[list[Any]], Any]:
    """Return the backward `run` with a check of its last arguments, the cotangents.  Missing
    gradients that the plan relies on become zeros like `planned`; a gradient through an output that
    the plan assumed to have none is refused."""

    def call(args: list[Any]) -> Any:
        first = len(args) - len(cotangents)
        for index, expected in enumerate(cotangents):
            is_given = args[first + index] is not None
            if is_given and not expected:
                raise PlanMismatch(
                    f"a gradient flows into differentiable output {index} of the model, which "
                    "the plan took for one without; make the plan with the loss_fn that is "
                    "trained with")
            if expected and not is_given:
                like = planned[index]
                args[first + index] = torch.zeros(
                    like.shape, dtype=like.dtype, device=like.device)
        return run(args)

    return boxed(call)
