"""Capture the annotated training step of a model for one batch.

Everything happens on a fake copy: the model is neither executed nor changed.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from planner._graph_capture.device_kernels.attention import kernels_of
from planner._graph_capture.dynamo.blocks import WHOLE_MODEL, find_blocks, repeated_blocks
from planner._graph_capture.dynamo.distinct_inputs import with_distinct_tensors
from planner._graph_capture.dynamo.record import Recording, record_training_step
from planner._graph_capture.dynamo.traced_code import TracedCode
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.data_dependent_values import decides_by_values, failure
from planner._graph_capture.fake_copies.fake import FakeCopy, device_planned_for, make_fake_copy
from planner._graph_capture.fake_copies.input_values import assumptions, inputs_without_values
from planner._graph_capture.fake_copies.skipped_blocks import skipped_blocks
from planner._graph_capture.fake_copies.storage_less import (
    may_be_storage_less,
    storage_less_copy,
)
from planner._graph_capture.garbage import fewer_collections
from planner._graph_capture.inductor.compiled_step import CompiledTracer, check_compiler
from planner._graph_capture.inductor.within_kernels import FusedCosts, compiled_variant
from planner._graph_capture.joint_graph.pipeline import JointVariant, has_low_peak_variant
from planner._graph_capture.joint_graph.symbolic_sizes import Values
from planner._graph_capture.memory.trace import Block
from planner._graph_capture.op_costs.costs import OpCosts
from planner._graph_capture.op_costs.cuda_workspace import held_workspace_bytes
from planner._graph_capture.op_costs.devices import Gpu, compute_capability
from planner._graph_capture.op_costs.headroom import ProbeHeadroom
from planner._graph_capture.optimizer.in_backward import EarlyGradients, early_gradients
from planner._graph_capture.optimizer.step import OptimizerTrace
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.plain_step.loop import Tracing
from planner._graph_capture.plain_step.loss import LossFn, OpenLoss, OutputGradient, trace_loss
from planner._graph_capture.plain_step.micro_batch import (
    EagerStep,
    resident_blocks,
    trace_eager_step,
)
from planner._graph_capture.plain_step.observed_loss import without_watches
from planner._graph_capture.progress import Progress
from planner._graph_capture.rank import RankLayout
from planner._graph_capture.step.assemble import Keeper, assemble
from planner._graph_capture.step.regions import RegionUse, region_uses, shares_code
from planner._graph_capture.step.released_output import with_output_released
from planner._graph_capture.step.symbolic_region import (
    NamedDimensions,
    SymbolicRegion,
    input_bytes,
    trace_with_symbols,
)
from planner._graph_capture.torch_compat import pytree, quiet_fake_tensors, undisturbed_autograd
from planner._graph_capture.training_graph import (
    ModelOutput,
    OptimizerMemory,
    StepVariant,
    TrainingGraph,
    check,
)

_MOST_OPS_OF_CHUNKS = 3_000
"""A step is not cut into chunks that have more ops together: of a whole model, not of a loss."""
Chunks = Sequence[tuple[int, int]]
"""Numbers of chunks to try: of the widest part of a step, and of the insides of its layers."""


@dataclass(frozen=True)
class CapturedStep:
    """A training step, ready to be planned."""

    variants: tuple[StepVariant, ...]
    """The base variant, the low-peak variant where there is one, and the chunked variants."""
    baseline: EagerStep
    """The step as plain PyTorch runs it."""
    later: EagerStep | None
    """A later micro-batch of accumulated gradients as plain PyTorch runs it, above the resident
    memory and the earlier gradients; `None` without accumulation."""
    optimizer_steps: OptimizerTrace | None
    """`None`: no optimizer was named, and none is counted."""
    training: bool
    """True if the model was in training mode."""
    overrides: tuple[tuple[str, object], ...]
    """Keyword arguments that capture forced, e.g. `use_cache=False`."""
    compiled: CompiledTracer | None
    """Traces the step as Inductor compiles it; `None` for the eager backend, and where Inductor
    generates no code because the device is absent."""
    outputs: tuple[OutputGradient, ...]
    """The gradient of each tensor of the model's output."""
    differentiable: tuple[bool, ...]
    """For each of these tensors, true if it has a gradient at all; empty with symbolic sizes."""
    tracing: Tracing
    """Retraces the step when more is known about it."""
    held_workspace_bytes: int
    """Bytes that torch allocates for cuBLAS per thread; 0 if the device is not a GPU."""
    chunked: Callable[[Chunks], tuple[StepVariant, ...]]
    """The variants with these numbers of chunks, from what was recorded."""
    unread: frozenset[int] = frozenset()
    """Places, among the tensors that the model is called with, of those that no op reads."""
    may_skip: bool = False
    """True if it is captured by blocks, and dice or values decide which of them run."""
    sets_up: bool = False
    """True if the first call adds hooks to the model."""
    code: TracedCode | None = None
    """Compiled code that the model may run, if it was kept."""

    @property
    def graph(self) -> TrainingGraph:
        """The graph of the base variant."""
        return self.variants[0].graph

    @property
    def holds_output(self) -> bool:
        """True if the caller keeps the model's output alive until the backward ends."""
        return self.tracing.holds_output

    @property
    def optimizer(self) -> OptimizerMemory | None:
        """Memory of the optimizer, if one is counted."""
        return None if self.optimizer_steps is None else self.optimizer_steps.memory

    def without_recording(self) -> CapturedStep:
        """The step as it is, to be kept: `chunked` finds nothing more."""
        return replace(self, chunked=lambda chunks: (), code=None)

    def resident_blocks(self) -> tuple[Block, ...]:
        """The storages that are alive before the step."""
        return resident_blocks(self.tracing.fake_copy, self.graph.resident,
                               is_sharded=self.tracing.layout is not None)


@dataclass(frozen=True, slots=True)
class SymbolicStep:
    """A step whose graph was captured with symbolic sizes."""

    region: SymbolicRegion
    values: Values
    """Of the symbols, where the model is called with the arguments of this step."""
    outputs: tuple[ModelOutput, ...]
    """Outputs of the model in the graph with fixed sizes."""
    dimensions: NamedDimensions
    """Names of the sizes that vary."""
    input_bytes: tuple[str, ...]
    """Bytes of the inputs that have such dimensions, in terms of the names."""

    @classmethod
    def of(cls, region: SymbolicRegion, outputs: tuple[ModelOutput, ...],
           dimensions: NamedDimensions, inputs: Mapping[str, torch.Tensor]) -> SymbolicStep:
        """The step of a call with these inputs, by name."""
        found = {name: {place: region.same[size] for place, size in places.items()
                        if size in region.same} for name, places in dimensions.items()}
        sizes = {size: inputs[name].size(place) for name, places in found.items()
                 for place, size in places.items()}
        return cls(region, region.values_at(sizes), outputs, found, input_bytes(found, inputs))

    def at(self, inputs: Mapping[str, torch.Tensor]) -> SymbolicStep | None:
        """The same for a call with other inputs; `None` if the graph is not theirs."""
        other = SymbolicStep.of(self.region, self.outputs, self.dimensions, inputs)
        return other if self.region.serves(other.values) else None

    @property
    def planned(self) -> dict[str, int]:
        """The named sizes of this step."""
        return self.region.named(self.values)


def trace_symbolic(step: CapturedStep, named: Callable[[FakeCopy], Mapping[str, torch.Tensor]],
                   dimensions: NamedDimensions) -> SymbolicStep:
    """The same step with symbols for named sizes of its inputs; `named`: the tensors among a call's
    arguments, by name.  Raises `CaptureError` where there is no such graph."""
    graph, fake_copy = step.graph, step.tracing.fake_copy
    if len(graph.regions) != 1 or graph.regions[0].block or any(
            op.target == "uncaptured code" for op in graph.ops):
        raise CaptureError("the model cannot be captured with symbolic sizes: its step is no "
                           "single graph")
    if step.overrides:
        fake_copy = replace(fake_copy, kwargs={**fake_copy.kwargs, **dict(step.overrides)})
    inputs = named(fake_copy)
    region = trace_with_symbols(fake_copy, graph.regions[0].cotangents, inputs, dimensions)
    return SymbolicStep.of(region, graph.outputs, dimensions, inputs)


@without_watches()
@quiet_fake_tensors()
@undisturbed_autograd()
@fewer_collections()
def capture_step(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
    loss_fn: LossFn | None = None, optimizer: object = None,
    device: torch.device | str | None = None, gpu: str | Gpu | None = None,
    keep: Sequence[str] = (),
    backend: str = "eager", cost_model: str = "roofline", probe: bool = True,
    accumulated: bool = False, regions: str | Sequence[str] | None = None,
    autocast: torch.dtype | None = None, holds_output: bool = True,
    answers: tuple[Any, ...] | None = None, larger_answers: tuple[Any, ...] | None = None,
    paths_vary: bool = False, most_runs: Mapping[str, int] | None = None,
    probe_headroom: ProbeHeadroom | None = None,
    progress: Progress | None = None, chunks: Chunks = (),
    make_layout: Callable[[FakeCopy], RankLayout] | None = None,
    symbolic: SymbolicStep | None = None,
    early: EarlyGradients | None = None, optimizer_in_backward: bool = False,
    keeps_code: bool = False, code: TracedCode | None = None,
) -> CapturedStep:
    """The training step `loss_fn(model(*args, **kwargs)).backward()` as a graph.

    Capture takes place in the model's train or eval mode and, forward and loss, in the caller's
    autocast context or in that of `autocast`.
    `keep` holds module names (wildcards allowed; submodules are meant too) and op names such as
    `aten.topk`, whose results are never recomputed.  With `backend="inductor"` the graph is the one
    that Inductor partitions: after its decompositions and its passes over the joint graph.
    `regions`: what is captured as a unit, see `graph_capture.dynamo.blocks.find_blocks`; `None`:
    the whole model, or its repeated blocks where a graph break would make one code run for several
    of them, of which nothing could be recomputed, or where nothing is captured.
    `accumulated`: several steps add up their gradients, and one but the first is to be looked at as
    well.  `answers`: the values of tensors that the model's code asks for, in order; such a step is
    captured in regions.  `larger_answers`: the same where what it selects is larger: the graph has
    these sizes, and the plain step those of `answers`.  `paths_vary`: such calls have taken several
    paths, which blocks may share.  `most_runs`: how often each block has run in any call, where
    dice or values decide that.  `holds_output`: the caller holds the
    model's output until the backward ends, not only until the loss is made.  `make_layout`: the
    step is that of one rank of a data-parallel run, which holds the model so.  `probe_headroom`:
    what running single ops may take where a loop has begun to train.  `chunks`: the numbers of
    chunks in which the widest part of the step and the insides of layers may run.  `symbolic`: the
    step's graph, captured before with symbolic sizes; nothing is traced but the plain step.
    `early`: gradients that the loop uses and frees as they come; with `optimizer_in_backward` these
    are all, for `optimizer`.  `keeps_code`: what is compiled of a model on a device that is present
    is kept for it to run; `code`: what was kept before of the same step.

    Raises `CaptureError` where the model cannot be captured, and `ValueError` for a `keep` that
    names nothing in the model.
    """
    say = progress or (lambda message: None)
    args, kwargs = with_distinct_tensors(tuple(args), kwargs or {})
    _check_layouts(args, kwargs)
    forced = _forced_arguments(model, kwargs)
    say("copying the model to fake tensors")
    fake_copy = make_fake_copy(
        model, args, {**kwargs, **dict(forced)}, device=device,
        extra=() if loss_fn is None else (loss_fn,),
        capability=compute_capability(device_planned_for(model, device), gpu))
    fake_loss = None if loss_fn is None else fake_copy.extra[0]
    fake_copy = replace(fake_copy, answers=answers, autocast=autocast)
    keeps_code &= (backend == "eager" and not early
                   and fake_copy.device == fake_copy.trace_device
                   and may_be_storage_less(fake_copy))
    headroom = None if not probe or probe_headroom is None else probe_headroom.left(
        lambda: _least_plain_peak(fake_copy, fake_loss))
    costs = OpCosts(fake_copy.device, cost_model=cost_model, probe=probe, gpu=gpu, progress=say,
                    headroom=headroom)
    inductor = backend == "inductor"
    is_present = fake_copy.device.type == fake_copy.trace_device.type
    if inductor and is_present:
        check_compiler(fake_copy.device)

    say("capturing the forward and the backward")
    begun = time.monotonic()
    layout = None if make_layout is None else make_layout(fake_copy)
    if optimizer_in_backward and early is None:
        early = early_gradients(optimizer, fake_copy, costs.workspace_bytes)
    unforced = replace(fake_copy, kwargs={
        name: value for name, value in fake_copy.kwargs.items() if name in kwargs})
    tracing = Tracing(unforced, fake_loss, costs.workspace_bytes, holds_output, layout, early or {})
    fake_copy = replace(fake_copy, answers=larger_answers or answers)

    def record(fake_copy: FakeCopy, blocks: Sequence[str], captures_rest: bool = False,
               keeps_code: bool = keeps_code, code: TracedCode | None = None) -> Recording:
        # Code between blocks runs as it is written, and must see what it takes for ordinary
        # tensors.
        traced, traced_loss = fake_copy, fake_loss
        if (blocks or answers is not None or fake_copy.has_subclasses or keeps_code) and (
                may_be_storage_less(fake_copy)):
            traced = storage_less_copy(fake_copy, extra=(fake_loss,))
            traced_loss = traced.extra[-1]
        recording = record_training_step(
            traced, traced_loss, costs.workspace_bytes, blocks, compiled=inductor,
            wrapper=tracing.wrapper, holds_output=holds_output, captures_rest=captures_rest,
            keeps_code=keeps_code, code=code if keeps_code else None)
        if keeps_code and getattr(traced.mode, "told_values", False):  # they decide what it does
            if not blocks:
                return record(fake_copy, blocks, captures_rest, False)
            recording.code = None
        return recording

    blocks, chosen_because = find_blocks(model, regions or WHOLE_MODEL), ""
    if symbolic is not None:
        recording = Recording(fake_copy, fake_loss)
    else:
        try:
            recording = record(fake_copy, blocks, bool(blocks), code=code)
        except CaptureError:
            if not blocks:
                raise
            recording = record(fake_copy, blocks)
    may_skip = fake_copy.dice.were_thrown or decides_by_values(answers)
    repeated = blocks or (repeated_blocks(model) if regions is None else ())
    skipped = () if not may_skip or symbolic is not None else (
        skipped_blocks(recording.fake_copy, repeated, most_runs or {}))
    # One graph of a model that skips blocks serves only the steps that skip the same.
    is_in_vain = (not recording.calls or shares_code(recording) or skipped
                  or fake_copy.dice.were_thrown or paths_vary)
    if symbolic is None and regions is None and is_in_vain and repeated:
        # Blocks are a better way, not the only one: code may fail under it alone.
        with contextlib.suppress(CaptureError):
            by_blocks = record(fake_copy, repeated)
            by_blocks.check_any()
            if not (inductor and shares_code(by_blocks)):
                chosen_because = (
                    "values of tensors decide which code runs" if paths_vary else
                    "as a whole, code would run several times, or none be captured")
                recording, blocks = by_blocks, repeated
    if blocks and skipped:
        complete = replace(fake_copy, skipped=skipped)
        with contextlib.suppress(CaptureError):
            recording = record(complete, blocks, keeps_code=False)
            fake_copy, tracing = complete, replace(
                tracing, fake_copy=replace(tracing.fake_copy, skipped=skipped))
    uses = [] if symbolic is not None else region_uses(
        recording, JointVariant(compiled=inductor))
    capture_seconds = time.monotonic() - begun
    rules = _rules_since(fake_copy)

    say("tracing the plain step")
    try:
        baseline = tracing.plain_step(fake_loss)
        plain_rules = _rules_since(fake_copy)
        if symbolic is None:
            loss = trace_loss(recording.loss_fn, recording.output, recording.fake_copy,
                              costs.workspace_bytes)
        elif forced:  # the plain step returns more
            loss = replace(tracing, fake_copy=fake_copy).plain_step(fake_loss).loss
        else:
            loss = baseline.loss
        later = (None if not accumulated
                 else tracing.plain_step(fake_loss, baseline.with_gradient))
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the training step fails on fake tensors: {failure(error)}") from error

    assumed = assumptions(recording.asked, inputs_without_values(fake_copy))
    say("measuring and estimating ops")
    keeper = Keeper(keep)
    fused = None if not inductor or cost_model == "flops" else FusedCosts(
        fake_copy.device, costs, costs.device_model)

    def variant(uses: Sequence[RegionUse], low_peak: bool = False,
                chunks: tuple[int, int] = (1, 1)) -> StepVariant:
        graph = assemble(
            uses, cost_of=fused or costs, pinned_by_user=keeper,
            resident=fake_copy.resident if layout is None else layout.resident,
            loss=None if loss_fn is None or isinstance(loss_fn, OpenLoss) else baseline.loss,
            device=fake_copy.device, uncaptured=recording.uncaptured, early=tracing.early,
            freed=recording.freed_gradients)
        if not holds_output:
            graph = with_output_released(graph, [each.until for each in loss.outputs])
        check(graph)
        notes = _notes(forced, recording, uses, costs, rules, plain_rules, tracing.early,
                       chosen_because)
        graph = replace(graph, notes=notes, kernels=kernels_of(graph.ops, rules),
                        assumptions=assumed)
        return (compiled_variant(graph, uses, fused, low_peak=low_peak, chunks=chunks) if inductor
                else StepVariant(graph, low_peak, *chunks))

    if symbolic is not None:
        variants = []
        for low_peak in symbolic.region.variants:
            with symbolic.region.at(symbolic.values, low_peak=low_peak) as lowered:
                use = symbolic.region.use(lowered, symbolic.outputs, fake_copy.parameters)
                variants.append(variant([use], low_peak))
    else:
        variants = [variant(uses)]
    keeper.check_all_used()
    whole_ops = sum(len(use.lowered.ops) for use in uses)
    if any(has_low_peak_variant(use.lowered) for use in uses):
        uses = region_uses(recording, JointVariant(inductor, low_peak=True))
        variants.append(variant(uses, low_peak=True))

    @quiet_fake_tensors()
    @undisturbed_autograd()
    @fewer_collections()
    def chunked(chunks: Chunks) -> tuple[StepVariant, ...]:
        # Code behind the regions, or a loss of the caller's, might read the output.  Inductor's
        # blocks took more memory without it, for unknown reasons.
        uncaptured = recording.uncaptured
        elides_output = not holds_output and loss_fn is None and (uncaptured is None or (
            not inductor and uncaptured.makes_nothing_after(len(recording.calls) - 1)))
        found = []
        ops_of_chunk = 0.0
        for widest, inner in chunks if symbolic is None else ():
            if ops_of_chunk * (widest - 1) > _MOST_OPS_OF_CHUNKS:
                continue
            cut = region_uses(
                recording, JointVariant(inductor, chunks=widest, inner_chunks=inner),
                elides_output=elides_output)
            has_inner = any(use.lowered.inner_chunks > 1 for use in cut)
            has_widest = any(use.lowered.chunks > 1 for use in cut)
            if has_inner or (has_widest and inner == 1):
                found.append(variant(cut, chunks=(widest, inner)))
            if not has_widest:
                break
            if not has_inner:
                more = sum(len(use.lowered.ops) for use in cut) - whole_ops
                ops_of_chunk = more / (widest - 1)
        return tuple(found)

    return CapturedStep(
        variants=(*variants, *chunked(chunks)), baseline=baseline, later=later,
        optimizer_steps=tracing.optimizer(optimizer, baseline.with_gradient),
        training=model.training, overrides=forced,
        compiled=None if recording.graphs is None or not is_present else CompiledTracer(
            recording.fake_copy, recording.loss_fn, costs, recording.graphs,
            lambda: tracing.wrapper, holds_output, capture_seconds),
        outputs=loss.outputs,
        differentiable=tuple(tensor.requires_grad for tensor in output_tensors(recording.output)),
        unread=recording.unread, may_skip=bool(blocks) and may_skip, sets_up=recording.sets_up,
        tracing=tracing, held_workspace_bytes=held_workspace_bytes(costs.device_model.gpu),
        chunked=chunked, code=recording.code)


def _check_layouts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `CaptureError` for sparse tensors among the inputs."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and str(leaf.layout).startswith("torch.sparse"):
            raise CaptureError(
                f"an input is a sparse tensor ({leaf.layout}), and the sizes of what is made of it "
                "depend on its values; plan the modules that take dense tensors, or give indices "
                "and values to ops such as index_add")


def _least_plain_peak(fake_copy: FakeCopy, loss_fn: LossFn | None) -> int:
    """Peak of the plain step above the resident memory, without op workspaces; 0 if the step cannot
    be traced, which is an error later."""
    try:
        return trace_eager_step(fake_copy, loss_fn, workspace=lambda *call: 0).peak_bytes
    except Exception:  # whatever the user's code raises
        fake_copy.attributes.put_back()  # what is captured is to go the same way
        return 0


def _forced_arguments(
    model: nn.Module, kwargs: Mapping[str, Any]
) -> tuple[tuple[str, object], ...]:
    """`use_cache=False` for a transformers model that would build a key-value cache: hardly any
    training reads it, and it would keep every key and value alive to the end of the step.  Not for
    a call that is given one, and not for a tuple of outputs, in which those behind the cache would
    move to its place."""
    config = getattr(model, "config", None)
    if not getattr(config, "use_cache", False) or "use_cache" in kwargs or (
            kwargs.get("past_key_values") is not None):
        return ()
    named = kwargs.get("return_dict")
    if not (getattr(config, "return_dict", True) if named is None else named):
        return ()
    accepted = inspect.signature(model.forward).parameters
    return (("use_cache", False),) if "use_cache" in accepted else ()


def _rules_since(fake_copy: FakeCopy) -> dict[str, tuple[str, ...]]:
    """The rules by which kernels were chosen since the last call."""
    if fake_copy.kernels is None:
        return {}
    rules = {kernel: tuple(found) for kernel, found in fake_copy.kernels.rules.items()}
    fake_copy.kernels.rules.clear()
    return rules


def _notes(forced: Sequence[tuple[str, object]], recording: Recording,
           uses: Sequence[RegionUse], costs: OpCosts, rules: Mapping[str, Sequence[str]],
           plain_rules: Mapping[str, Sequence[str]], early: EarlyGradients, chosen_because: str
           ) -> tuple[str, ...]:
    notes = []
    if early:
        notes.append("gradients are used and freed as they come, by hooks of the parameters; what "
                     "their optimizer's steps allocate is counted there")
    if forced:
        arguments = ", ".join(f"{name}={value}" for name, value in forced)
        notes.append(f"the model is called with {arguments}: a training step has no use for "
                     "the key-value cache")
    blocks = {call.module for call in recording.calls} - {""}
    around = sum(not call.module for call in recording.calls)
    if blocks:
        why = f" ({chosen_because})" if chosen_because else ""
        notes.append(f"{len(blocks)} blocks are compiled one by one{why}; " + (
            f"what stands around them is {around} more regions" if around else
            "what the rest of the model allocates is counted, but not planned"))
    elif len(recording.calls) > 1:
        notes.append(f"torch.compile broke the model into {len(recording.calls)} regions, "
                     "which are planned together; what runs between them is not planned")
    repeated = sum(use.repeated for use in uses)
    if repeated:
        notes.append(f"{repeated} regions share code that runs several times in a step, and are "
                     "kept as they are: a graph break in a loop does that; where the loop runs "
                     "modules, regions=(...) with their names plans each by itself")
    if recording.inference_graphs:
        notes.append(f"{recording.inference_graphs} captured regions need no gradient "
                     "and are not planned")
    others = {kernel for kernel in rules.keys() ^ plain_rules.keys() if "attention" in kernel}
    if others:
        plain = [kernel for kernel in plain_rules if "attention" in kernel]
        notes.append(f"the plain step runs {' and '.join(plain)}: what torch.compile makes of the "
                     "model's code calls attention with other arguments")
    return (*notes, *costs.notes)
