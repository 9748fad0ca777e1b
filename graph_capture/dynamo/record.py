"""Runs a fake copy through Dynamo and AOTAutograd, and keeps the joint graphs.

The forward, the loss and the backward of the fake copy really run, on fake (or storage-less)
tensors.  That shows the order of the captured regions and the outputs into which a gradient flows.
The compiled regions themselves are stub graphs that only make results of the right shapes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from planner._graph_capture.device_kernels.layouts import on_device
from planner._graph_capture.dynamo.captured_graphs import (
    CapturedGraphs,
    CompiledCalls,
    DynamoBackend,
    RepeatedGraphs,
)
from planner._graph_capture.dynamo.stub_graphs import (
    StubResults,
    carrier_of,
    compiled_as_stubs,
)
from planner._graph_capture.dynamo.traced_code import TracedCode, TracedGraph, as_written
from planner._graph_capture.dynamo.uncaptured import GapTracker, UncapturedCode
from planner._graph_capture.errors import CaptureError, DataDependentValue, raised_behind
from planner._graph_capture.fake_copies.data_dependent_values import (
    data_dependent_value,
    failure,
    number_without_data,
)
from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.fake_copies.input_values import named_inputs, values_of_inputs
from planner._graph_capture.joint_graph.joint import primals_of
from planner._graph_capture.joint_graph.naming import name_modules, names_in_model
from planner._graph_capture.joint_graph.pipeline import LoweredGraphs
from planner._graph_capture.memory.tracker import Workspace
from planner._graph_capture.module_forward import hooks_within
from planner._graph_capture.plain_step.loss import LossFn, objective
from planner._graph_capture.rank import Wrapper
from planner._graph_capture.torch_compat import (
    BackendCompilerFailed,
    NoStaticShape,
    PrimalSource,
    TorchDynamoException,
    aot_backend,
    as_plain_code,
    boxed,
    branches_of,
    compile_settings,
    pass_absent_gradients,
    primal_sources,
    pytree,
    read_by,
    storage_key,
    weakly,
    written_inputs,
)
from planner._graph_capture.training_graph import Category
from planner._graph_capture.user_code import place_of


@dataclass
class RecordedRegion:
    """A joint graph and its use in the step."""

    joint: fx.GraphModule
    """On the planned device."""
    traced: fx.GraphModule
    """On the device of the trace."""
    num_forward_outputs: int
    sources: Sequence[PrimalSource]
    """Of its primals."""
    lowered: LoweredGraphs = field(default_factory=dict)
    cotangents: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    """For each of its calls whose backward has run, the outputs into which a gradient flowed."""
    forward: Callable[[list[Any]], tuple[Sequence[Any], torch.Tensor]] = field(init=False)
    """Code that runs in its place; see `Exchangeable`."""


@dataclass(frozen=True)
class RegionCall:
    """One run of a region's forward."""

    region: RecordedRegion
    inputs: tuple[object, ...]
    """The tensor for each primal: a parameter, a buffer or another tensor of the fake copy."""
    outputs: tuple[object, ...]
    """Tensors returned to the user's code, in order."""
    module: str = ""
    """The block that was called; empty if the whole model is compiled."""


@dataclass
class Recording:
    """One recorded step."""

    fake_copy: FakeCopy
    """The copy of the model that ran."""
    loss_fn: LossFn | None = None
    """The loss function of that copy."""
    output: object = None
    """The output of its forward."""
    calls: list[RegionCall] = field(default_factory=list)
    """The calls of captured regions, in order."""
    inference_graphs: int = 0
    """Number of captured graphs that need no gradient."""
    uncaptured: UncapturedCode | None = None
    """The code between the regions; `None`: the model is one region and nothing else."""
    graphs: CapturedGraphs | None = None
    """For other backends to compile, where they are to be kept."""
    kept_outputs: frozenset[tuple[int, int]] = frozenset()
    """(call, position of an output) that is alive at the end of the step: the model returns it, or
    holds it in an attribute."""
    freed_gradients: tuple[int, ...] = ()
    """For a model of one region, primals whose gradients the loop frees, in that order."""
    asked: dict[str, str] = field(default_factory=dict)
    """Inputs by whose values the model's code decides, and where it does."""
    read: set[int] = field(default_factory=set)
    """Places, among the tensors that the model is called with, of those that ops read."""
    calls_again: int = 0
    """Number of region calls when the step ran for the second time."""
    has_compiled_again: bool = False
    """True if the second run of the step compiled another graph: the first call changed what the
    model's code reads."""
    sets_up: bool = False
    """True if the first call adds hooks to the model."""
    code: TracedCode | None = None
    """Compiled code that the model itself may run, if it was kept."""

    @property
    def unread(self) -> frozenset[int]:
        """Places, among the tensors that the model is called with, of those that no op reads."""
        if not self.calls:
            return frozenset()
        return frozenset(range(len([*named_inputs(self.fake_copy)]))) - self.read

    @property
    def is_repeatable(self) -> bool:
        """True if the second run of the step called as many regions as the first."""
        return self.calls_again == len(self.calls)

    def check_repeatable(self) -> None:
        """Raise `CaptureError` if the second run of the step called another number of regions."""
        if not self.is_repeatable:
            raise CaptureError(
                f"torch.compile captured {len(self.calls)} regions of the step, and "
                f"{self.calls_again} when it ran again: it gave up on code in which the graph "
                "breaks. Take that out of the model, or name blocks without it in regions")

    def check_any(self) -> None:
        """Raise `CaptureError` if nothing in the step can be planned."""
        if self.calls:
            return
        trained = [*self.fake_copy.model.parameters(),
                   *(leaf for _, leaf in named_inputs(self.fake_copy))]
        if not any(each.requires_grad for each in trained):
            raise CaptureError(
                "nothing that was captured of the model needs a gradient: no parameter or input "
                "with requires_grad takes part in it, so there is nothing to plan")
        raise CaptureError(
            "torch.compile ran the model as it is written and captured nothing of it that needs a "
            "gradient. So it does with code that it compiled too often before "
            "(torch._dynamo.config.recompile_limit): call torch._dynamo.reset() and plan again; "
            "with code under torch.compiler.disable, and with a loop in which the graph breaks: "
            "take that out of the model, or name blocks without it in regions; and with a module "
            "of torch's such as nn.Sequential that is called there: give it a class of your own")


RunStep = Callable[[Callable[..., Any], Callable[[], object]], object]
"""A step: given the compiled model and a callback for the start of the backward, it calls the model
with the fake copy's inputs, computes the loss, and runs the backward.  Its result is kept alive to
the end."""


def record_step(fake_copy: FakeCopy, run_step: RunStep, workspace: Workspace,
                blocks: Sequence[str] = (), wrapper: Wrapper | None = None, *,
                compiled: bool = False, captures_rest: bool = False,
                code: TracedCode | None = None) -> Recording:
    """Record one step of the fake copy, which has no gradients before and after.

    The step runs twice: the first time Dynamo compiles it, the second time what code between the
    regions allocates is followed; `workspace` tells what its ops take for themselves.  With
    `blocks`, names of submodules, these are compiled one by one and the rest runs as it is written
    or, with `captures_rest`, is compiled too.  `wrapper` has its hooks in the model while the step
    runs.  With `compiled` the joint graphs are those that Inductor would partition, and the graphs
    are kept for it.  `code`: is run, compiled as far as it is not yet, and kept for the model to
    run.
    """
    recording = Recording(fake_copy)
    recorder = _Recorder(fake_copy, recording, _for_inductor if compiled else aot_backend)
    model, installed, repeated = _compiled(fake_copy, blocks, recorder, compiled, captures_rest,
                                           code)
    hooks = (wrapper or Wrapper()).attached(fake_copy.model, recorder.make_buffer)
    # A graph of Inductor's is the one that torch.compile makes.
    plain = nullcontext() if compiled else as_plain_code(
        partial(values_of_inputs, fake_copy), recorder.has_written)
    recorded = nullcontext() if recorder.code is None else (
        recorder.code.recorded(repeated, recorder.follow))
    with (warnings.catch_warnings(), compile_settings(), plain,
          read_by(partial(number_without_data, fake_copy.mode)), fake_copy.as_on_device(),
          fake_copy.mode, recorded, installed, hooks,
          # A graph that fails does not put it back.
          torch.set_grad_enabled(torch.is_grad_enabled())):
        # Dice of Python's: the graph breaks there, as it may.
        warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin")
        # What a cached function computes is traced, whatever its cache holds.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        try:
            recorder.begin_run()
            run_step(model, lambda: None)
            nn.Module.zero_grad(fake_copy.model)
            repeated.are_expected = True
            _follow_uncaptured(fake_copy, run_step, model, recorder, workspace)
        except DataDependentValue as error:
            raise data_dependent_value(error) from error
        except CaptureError:
            raise
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            if isinstance(inner, CaptureError):
                raise inner from None
            raise CaptureError(f"the model cannot be captured: {_summary(inner)}") from inner
        except TorchDynamoException as error:
            raise CaptureError(
                f"torch.compile cannot capture the model: {_summary(error)}") from error
        except Exception as error:  # whatever the user's code raises
            if asked := raised_behind(error, DataDependentValue):
                raise data_dependent_value(asked) from error
            raise _failure(error) from error
        finally:
            nn.Module.zero_grad(fake_copy.model)
    if getattr(fake_copy.mode, "told_values", False):
        for name, _ in named_inputs(fake_copy):
            recording.asked.setdefault(name, "")
    if code is not None and code.is_complete and (captures_rest or not blocks):
        recording.code, code.blocks = code, tuple(blocks)
    return recording


def _compiled(fake_copy: FakeCopy, blocks: Sequence[str], recorder: _Recorder, keep_graphs: bool,
              captures_rest: bool, code: TracedCode | None
              ) -> tuple[Callable[..., Any], AbstractContextManager[Any], RepeatedGraphs]:
    """The model that `recorder` sees running, inside of the context, and what it has seen of it."""
    model = fake_copy.model
    if keep_graphs:
        graphs = recorder.recording.graphs = CapturedGraphs(
            model, recorder, blocks, captures_rest=captures_rest)
        recorder.running_block = lambda: graphs.running
        return graphs.call, graphs.installed(), graphs.repeated
    repeated = RepeatedGraphs(recorder, lambda: recorder.running_block())
    code = recorder.code = code or TracedCode()
    recorder.graphs = code.graphs
    calls = CompiledCalls(model, blocks, code, captures_rest=captures_rest)
    recorder.running_block = lambda: calls.running
    return model if blocks else fake_copy.callee, calls.installed(), repeated


def _follow_uncaptured(
    fake_copy: FakeCopy, run_step: RunStep, compiled: Callable[..., Any], recorder: _Recorder,
    workspace: Workspace,
) -> None:
    """Run the compiled step again and follow what is allocated outside of the regions."""
    tracker = GapTracker(fake_copy, workspace)
    found = len(recorder.recording.calls) > 1

    def model(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        output = compiled(*args, **kwargs)
        found = found or tracker.made_any
        return output

    recorder.again.tracker = tracker
    recorder.begin_run()
    with tracker:
        held = run_step(model, tracker.start_of_backward)
    seen = tracker.finish({name: parameter.grad for name, parameter
                           in fake_copy.model.named_parameters() if parameter.grad is not None})
    del held
    recording = recorder.recording
    recording.read |= {place for place, (_, leaf) in enumerate(named_inputs(fake_copy))
                       if storage_key(leaf) in tracker.read}
    recording.kept_outputs = frozenset(
        key for key, gap in seen.outputs_released.items() if gap is None)
    recording.calls_again = tracker.calls if found else len(recording.calls)
    if found:
        recording.uncaptured = seen
    else:
        freed = seen.gradients_released
        order = sorted(freed, key=freed.__getitem__)
        recording.freed_gradients = tuple(primal for _, primal in order)


def _summary(error: BaseException) -> str:
    """Dynamo's description of an error: the error that it quotes, or else its first line."""
    text = str(error).strip() or type(error).__name__
    quoted = re.search(r"got (\w+)\((['\"])(.*?)\2\)", text)
    return f"{quoted[1]}: {quoted[3]}" if quoted else text.splitlines()[0]


def _failure(error: Exception) -> CaptureError:
    """The error for a failure of code that runs eagerly."""
    if isinstance(error, NoStaticShape):
        return data_dependent_value(error)
    return CaptureError(
        f"the training step fails on fake tensors{place_of(error)}: {failure(error)}")


@dataclass(eq=False)
class _Again:
    """State of the second run of the step."""

    tracker: GapTracker | None = None
    """Traces the second run; `None` during the first."""


class _Recorder:
    """The Dynamo backend of `record_step`."""

    def __init__(self, fake_copy: FakeCopy, recording: Recording,
                 make_backend: Callable[..., DynamoBackend]) -> None:
        self.mode, self.model, self.device = fake_copy.mode, fake_copy.model, fake_copy.trace_device
        self.planned = fake_copy.device
        self.recording = recording
        self.make_backend = make_backend
        self.input_names = {id(leaf): name for name, leaf in named_inputs(fake_copy)}
        self.input_places = {
            id(leaf): place for place, (_, leaf) in enumerate(named_inputs(fake_copy))}
        self.has_answers = fake_copy.answers is not None
        self.again = _Again()
        self.running_block: Callable[[], str] = lambda: ""
        """Name of the block that is running; empty if the whole model is compiled."""
        self._written: set[int] = set()
        self._versions: dict[int, int] = {}
        self.graphs: list[TracedGraph] = []
        self.code: TracedCode | None = None

    def begin_run(self) -> None:
        """Begin a run of the step: nothing is written yet."""
        self._written.clear()
        self._versions = {id(each): each._version for each in self.model.buffers()}

    def has_written(self, tensor: torch.Tensor) -> bool:
        """True if the step has written a tensor of the fake copy, as far as it has run."""
        # What is written through `data` counts in no version.
        return (storage_key(tensor) in self._written
                or tensor._version != self._versions.get(id(tensor), tensor._version))

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        mode, device, planned = self.mode, self.device, self.planned
        name_modules(module, self.model.get_submodule(self.running_block()))

        def region_of(joint: fx.GraphModule, num_outputs: int) -> RecordedRegion:
            return RecordedRegion(joint if planned == device else on_device(joint, planned), joint,
                                  num_outputs, primal_sources(primals_of(joint)))

        def without_gradient(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
            results = StubResults(graph, None, mode, device)
            return boxed(lambda args: results.outputs())

        self.recording.has_compiled_again |= self.again.tracker is not None
        branches, written = branches_of(module), written_inputs(module)
        compiled, region = compiled_as_stubs(module, inputs, region_of, without_gradient,
                                             make_backend=self.make_backend)
        graph = TracedGraph(region, module, self.running_block(), branches, written, compiled)
        self.follow(graph)
        self.graphs.append(graph)
        return weakly(graph, as_written(module))

    def follow(self, graph: TracedGraph) -> None:
        """Record the runs of a graph."""
        # The graphs' tensors keep their functions alive by way of autograd, and the recorder keeps
        # the tensors alive.  So these functions do not refer to the recorder: the garbage collector
        # cannot see such cycles.
        again, region, compiled = self.again, graph.region, graph.compiled
        calls, running = 0, 0  # of the region in the first run; the number of the running one
        graph.given.clear()
        if region is not None:
            cotangents = region.cotangents = {}
            results = StubResults(region.traced, region.num_forward_outputs, self.mode,
                                  self.device, has_views=self.make_backend is aot_backend)

            def run_backward(number: int, given: list[Any]) -> list[Any]:
                if again.tracker is None:
                    cotangents[number] = tuple(value is not None for value in given)
                    return results.gradients()
                again.tracker.begin_backward(number, given)
                given.clear()
                try:
                    gradients = results.gradients()
                finally:
                    again.tracker.end_region()
                again.tracker.watch_gradients(number, gradients)
                return gradients

            def run_forward(args: list[Any]) -> tuple[list[Any], torch.Tensor]:
                args.clear()
                return results.outputs(), carrier_of(partial(run_backward, running))

            region.forward = run_forward

        def call(*args: Any) -> Any:
            nonlocal calls, running
            self._written.update(storage_key(args[position]) for position in graph.written)
            for branch in graph.branches:
                for position in branch.inputs:
                    name = self.input_names.get(id(args[position]), "an input")
                    self.recording.asked[name] = branch.place
                if self.has_answers:  # One of them is for this.
                    branch.holds(args)
            if self.again.tracker is not None:
                # What needs no gradient counts as code that runs as it is written.
                return (graph.module(*args) if region is None
                        else followed(self.again.tracker, region, args))
            block = self.running_block()
            if block not in graph.given:
                graph.given[block] = names_in_model(self.model, args)
            self.recording.read.update(
                self.input_places[id(arg)] for arg in args if id(arg) in self.input_places)
            running, calls = calls, calls + 1
            outputs = compiled(*args)
            pass_absent_gradients(outputs)
            if region is None:
                self.recording.inference_graphs += 1
            else:
                self.recording.calls.append(RegionCall(
                    region, tuple(source.of(args) for source in region.sources),
                    tuple(pytree.tree_leaves(outputs)), block))
            return outputs

        def followed(tracker: GapTracker, region: RecordedRegion, args: tuple[Any, ...]) -> Any:
            nonlocal running
            running = number = tracker.begin_forward(
                [source.of(args) for source in region.sources])
            try:
                outputs = compiled(*args)
            finally:
                tracker.end_region()
            pass_absent_gradients(outputs)
            tracker.watch_outputs(number, pytree.tree_leaves(outputs))
            return outputs

        graph.run = call

    def make_buffer(self, size_bytes: int, kind: Category) -> torch.Tensor:
        """Allocate a buffer of the wrapper."""
        if self.again.tracker is not None:
            return self.again.tracker.make_buffer(size_bytes, kind)
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)


def record_training_step(
    fake_copy: FakeCopy, loss_fn: LossFn | None, workspace: Workspace, blocks: Sequence[str], *,
    compiled: bool, wrapper: Wrapper | None = None, holds_output: bool = True,
    captures_rest: bool = False, keeps_code: bool = False, code: TracedCode | None = None,
) -> Recording:
    """One captured step of the fake copy (see `record_step`).  `holds_output`: the caller keeps
    the output alive until the backward ends.

    Some models change in their first call (transformers installs hooks), which breaks the graph
    once.  Then Dynamo's guards fail in the second run, and the step is captured again.
    """
    wrapper = wrapper or Wrapper()

    def record(code: TracedCode | None) -> Recording:
        outputs: list[object] = []

        def run(model: Callable[..., Any], before_backward: Callable[[], object]) -> object:
            with fake_copy.forward_context():
                output = fake_copy.call(model, has_backward=True)
                if holds_output or not outputs:  # Keep that of the run that captures graphs.
                    outputs.append(output)
                goal = objective(output, loss_fn, fake_copy)
            del output
            before_backward()
            with fake_copy.behind_call():
                goal.backward()
            return goal, wrapper.finish()

        recording = record_step(fake_copy, run, workspace, blocks, wrapper, compiled=compiled,
                                captures_rest=captures_rest, code=code)
        recording.loss_fn, recording.output = loss_fn, outputs[0]
        return recording

    def new_code() -> TracedCode | None:
        return TracedCode() if keeps_code else None

    hooks = hooks_within(fake_copy.model)
    chosen = first = record(code or new_code())
    sets_up = hooks_within(fake_copy.model) != hooks
    is_stable = first.is_repeatable and (
        bool(blocks) or (bool(first.calls) and not first.has_compiled_again and not sets_up))
    if not (is_stable or len(first.calls) == 1):
        again = record(new_code())
        if again.calls and (not first.calls or not first.is_repeatable
                            or len(again.calls) < len(first.calls)):
            chosen = again
    chosen.sets_up = sets_up
    chosen.check_repeatable()
    return chosen


def _for_inductor(partition: Callable[..., Any], forward: Callable[..., Any],
                  backward: Callable[..., Any]) -> DynamoBackend:
    """A backend that passes `partition` the joint graph as Inductor would partition it."""
    from planner._graph_capture.torch_compat.inductor import inductor_backend

    return inductor_backend(
        partition, "recorder", compile_graph=lambda graph, inputs, is_backward: (
            backward if is_backward else forward)(graph, inputs))
