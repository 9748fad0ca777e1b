"""From a model and one batch to the annotated training step.

Everything happens on a fake twin: the model is neither executed nor changed.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graph_capture.dynamo.blocks import WHOLE_MODEL, find_blocks
from graph_capture.dynamo.record import MakeBackend, Recording, record_step
from graph_capture.errors import CaptureError
from graph_capture.inductor.compiled_form import compiled_form
from graph_capture.inductor.compiled_step import CompiledTracer, check_compiler
from graph_capture.inductor.fused_costs import FusedCosts
from graph_capture.inductor.joint_passes import (
    backward_ops_to_save,
    move_to_forward,
    rearrange,
    saved_by_default,
)
from graph_capture.joint_graph.input_names import region_input_names
from graph_capture.joint_graph.joint import clean_joint_graph, count_cotangents
from graph_capture.joint_graph.low_peak_backward import late_parts, lower_backward_peak
from graph_capture.joint_graph.lower import RESIDENT, lower
from graph_capture.memory.tracker import Workspace
from graph_capture.op_costs.costs import OpCosts
from graph_capture.optimizer.step import OptimizerFootprint, trace_optimizer
from graph_capture.plain_step.eager_step import EagerStep, trace_eager_step
from graph_capture.plain_step.loss import LossFootprint, objective, output_tensors
from graph_capture.specification import check
from graph_capture.step.assemble import LossMemory, RegionUse, assemble
from graph_capture.torch_compat import aot_backend, quiet_fake_tensors, storage_key
from graph_capture.training_graph import StepForm, TrainingGraph
from graph_capture.twins.data_less import data_less_twin
from graph_capture.twins.fake import FakeTwin, make_twin

Progress = Callable[[str], None]
"""Called with what happens next, for people."""


@dataclass(frozen=True)
class CapturedStep:
    """A training step, ready to be planned."""

    plain: StepForm
    """The step as it was captured."""
    baseline: EagerStep
    """The step as plain PyTorch runs it."""
    later: EagerStep | None
    """A later micro-step of accumulated gradients as plain PyTorch runs it, above what is resident
    and the gradients from before; `None` without accumulation."""
    optimizer: OptimizerFootprint | None
    """`None`: no optimizer was named, and none is counted."""
    training: bool
    """Whether the model was in training mode."""
    overrides: tuple[tuple[str, object], ...]
    """Keyword arguments that capture forced, e.g. `use_cache=False`."""
    lean: StepForm | None = None
    """The step whose backward holds less at the price of copies
    (`graph_capture.joint_graph.low_peak_backward`); `None` where there is nothing to copy."""
    compiled: CompiledTracer | None = None
    """Follows the step as Inductor compiles it; `None` for the eager backend."""

    @property
    def graph(self) -> TrainingGraph:
        """The graph of the step as it was captured."""
        return self.plain.graph


@quiet_fake_tensors()
def capture_step(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None, optimizer: object = None,
    device: torch.device | str | None = None, gpu: str | None = None, keep: Sequence[str] = (),
    backend: str = "eager", cost_model: str = "roofline", probe: bool = True,
    accumulated: bool = False, regions: str | Sequence[str] = WHOLE_MODEL,
    progress: Progress | None = None,
) -> CapturedStep:
    """The training step `loss_fn(model(*args, **kwargs)).backward()` as a graph.

    Capture takes place in the caller's autocast context and in the model's train or eval mode.
    `keep` holds module names (wildcards allowed; submodules are meant too) and op names such as
    `aten.topk`, whose results are never recomputed.  With `backend="inductor"` the graph is the one
    that Inductor partitions: after its decompositions and its passes over the joint graph.
    `regions`: what is captured as one piece, see `graph_capture.dynamo.blocks.find_blocks`.
    `accumulated`: several steps add up their gradients, and one but the first is to be looked at as
    well.

    Raises `CaptureError` where the model cannot be captured, and `ValueError` for a `keep` that
    names nothing in the model.
    """
    say = progress or (lambda message: None)
    forced = _forced_arguments(model, kwargs or {})
    say("copying the model to fake tensors")
    twin = make_twin(model, tuple(args), {**(kwargs or {}), **dict(forced)}, device=device,
                     extra=() if loss_fn is None else (loss_fn,))
    twin_loss = None if loss_fn is None else twin.extra[0]
    costs = OpCosts(twin.device, cost_model=cost_model, probe=probe, gpu=gpu, progress=say)
    inductor = backend == "inductor"
    if inductor:
        check_compiler(twin.device, twin.trace_device)
    say("capturing the forward and the backward")
    blocks = find_blocks(model, regions)
    # What runs between blocks, runs as it is written, and must see what it takes for plain tensors.
    traced, traced_loss = twin, twin_loss
    if blocks and twin.trace_device.type == "cpu":
        traced = data_less_twin(twin, extra=(twin_loss,))
        traced_loss = traced.extra[-1]
    recording, output = _record(traced, traced_loss, costs.workspace_bytes, blocks,
                                _inductor_recorder if inductor else aot_backend)
    uses, saved = _region_uses(traced, recording, output, inductor=inductor)
    say("tracing the plain step")
    try:
        plain = _plain_twin(twin, kwargs or {}, forced)
        baseline = trace_eager_step(plain, twin_loss, workspace=costs.workspace_bytes)
        later = None if not accumulated else trace_eager_step(
            plain, twin_loss, workspace=costs.workspace_bytes,
            with_gradient=baseline.with_gradient)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the training step fails on fake tensors: {type(error).__name__}: {error}") from error
    say("measuring and estimating ops")
    keeper = _Keeper(keep)
    fused = None if not inductor or cost_model == "flops" else FusedCosts(
        twin.device, costs, costs.device_model)

    def form(uses: Sequence[RegionUse], saved: Sequence[frozenset[str]]) -> StepForm:
        graph = assemble(
            uses, loss=_loss_memory(baseline.loss, loss_fn is not None),
            cost_of=fused or costs,
            pinned_by_user=keeper, resident=twin.resident, device=twin.device,
            uncaptured=recording.uncaptured)
        check(graph)
        graph = replace(graph, notes=_notes(forced, recording, costs))
        return compiled_form(graph, uses, saved, fused) if inductor else StepForm(graph)

    plain_form, lean_form = form(uses, saved), None
    keeper.check_all_used()
    if any(late_parts(use.lowered.joint) for use in uses):
        lean_form = form(*_region_uses(traced, recording, output, inductor=inductor, lean=True))
    return CapturedStep(
        plain=plain_form, lean=lean_form, baseline=baseline, later=later,
        optimizer=None if optimizer is None else trace_optimizer(
            optimizer, twin, with_gradient=baseline.with_gradient,
            workspace=costs.workspace_bytes),
        training=model.training, overrides=forced,
        compiled=None if recording.graphs is None else CompiledTracer(
            traced, traced_loss, costs, recording.graphs, twin))


def _inductor_recorder(partition: Callable[..., Any], forward: Callable[..., Any],
                       backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that shows `partition` the joint graph as Inductor would partition it."""
    from graph_capture.torch_compat.inductor import inductor_backend

    return inductor_backend(
        partition, "recorder", compile_graph=lambda graph, inputs, is_backward: (
            backward if is_backward else forward)(graph, inputs))


def _record(
    twin: FakeTwin, loss_fn: Callable[[Any], torch.Tensor] | None, workspace: Workspace,
    blocks: Sequence[str], make_backend: MakeBackend,
) -> tuple[Recording, object]:
    """One captured step of the twin, and what its forward returned.

    Some models change when they are called for the first time (transformers installs hooks), which
    breaks the graph once; a step of several pieces, or of none, is therefore captured anew.
    """
    first = _record_once(twin, loss_fn, workspace, blocks, make_backend)
    if blocks or len(first[0].calls) == 1:
        return first
    again = _record_once(twin, loss_fn, workspace, blocks, make_backend)
    is_better = again[0].calls and (
        not first[0].calls or len(again[0].calls) < len(first[0].calls))
    return again if is_better else first


def _record_once(
    twin: FakeTwin, loss_fn: Callable[[Any], torch.Tensor] | None, workspace: Workspace,
    blocks: Sequence[str], make_backend: MakeBackend,
) -> tuple[Recording, object]:
    outputs: list[object] = []

    def run(compiled: Callable[..., Any], before_backward: Callable[[], object]) -> object:
        output = compiled(*twin.args, **twin.kwargs)
        outputs.append(output)
        goal = objective(output, loss_fn)
        before_backward()
        goal.backward()
        return goal

    return record_step(twin, run, workspace, blocks, make_backend,
                       keep_graphs=make_backend is _inductor_recorder), outputs[0]


def _plain_twin(
    twin: FakeTwin, kwargs: Mapping[str, Any], forced: Sequence[tuple[str, object]]
) -> FakeTwin:
    """The twin as the user calls it: without the arguments that capture forced."""
    if not forced:
        return twin
    names = {name for name, _ in forced if name not in kwargs}
    return replace(twin, kwargs={k: v for k, v in twin.kwargs.items() if k not in names})


def _loss_memory(footprint: LossFootprint, outside: bool) -> LossMemory:
    """What `assemble` needs of the loss; `outside`: it is not part of the model."""
    cotangents = sum(gradient.size_bytes for gradient in footprint.outputs)
    if not outside:
        return LossMemory(cotangents_held=True)
    return LossMemory(
        retained_bytes=footprint.retained_bytes,
        forward_workspace_bytes=footprint.forward_peak_bytes - footprint.retained_bytes,
        backward_workspace_bytes=max(
            0, footprint.backward_peak_bytes - footprint.retained_bytes - cotangents))


def _region_uses(
    twin: FakeTwin, recording: Recording, output: object, *, inductor: bool, lean: bool = False
) -> tuple[list[RegionUse], list[frozenset[str]]]:
    """How each captured region hangs together with the model, the batch and the other regions; for
    Inductor also the names of what its own partitioner saves in each.  `lean`: see
    `CapturedStep.lean`.
    """
    recording.check_any()
    names = {id(tensor): name for name, tensor in
             (*twin.model.named_parameters(), *twin.model.named_buffers())}
    trainable = {id(tensor): name for name, tensor in twin.model.named_parameters()}
    held = {storage_key(tensor) for tensor in output_tensors(output)}
    runs_by_code = _runs_by_code(recording)
    made: dict[int, tuple[int, int]] = {}  # storage of an output -> (region, its storage there)
    runs: Counter[int] = Counter()
    uses: list[RegionUse] = []
    saved: list[frozenset[str]] = []
    for number, call in enumerate(recording.calls):
        region = call.region
        # Backwards run in the reverse order of the forwards.
        backward = len(region.cotangents) - 1 - runs[id(region)]
        runs[id(region)] += 1
        cotangents = (region.cotangents[backward] if 0 <= backward < len(region.cotangents)
                      else (False,) * count_cotangents(region.joint))
        joint = clean_joint_graph(region.joint, region.num_forward_outputs, cotangents)
        if lean:
            lower_backward_peak(joint, compiled=inductor)
        early: tuple[int, ...] = ()
        if inductor:
            rearrange(joint)
            saved.append(saved_by_default(joint))
            early = backward_ops_to_save(joint, saved[-1])
            move_to_forward(joint, early)
        known = [names.get(id(tensor)) for tensor in call.inputs]
        lowered = lower(joint, region_input_names(known), number, call.module)
        linked = {
            index: made[storage_key(tensor)] for index, tensor in enumerate(call.inputs)
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) in made}
        returned: set[int] = set()
        released: dict[int, int] = {}
        outputs = [node for position, node in enumerate(joint.forward_outputs)
                   if position not in joint.mutations]
        for position, (node, tensor) in enumerate(zip(outputs, call.outputs, strict=False)):
            storage = None if node is None else lowered.storage_of.get(node)
            if storage is None or storage == RESIDENT or not isinstance(tensor, torch.Tensor):
                continue
            made[storage_key(tensor)] = (number, storage)
            last = None if recording.uncaptured is None else (
                recording.uncaptured.outputs_released.get((number, position)))
            if storage_key(tensor) in held:
                returned.add(storage)
            elif last is not None:
                released[storage] = max(last, released.get(storage, 0))
        uses.append(RegionUse(
            lowered=lowered, cotangents=cotangents,
            parameter_names={index: trainable.get(id(tensor), f"input {index}")
                             for index, tensor in enumerate(call.inputs)},
            linked_inputs=linked, returned=frozenset(returned), released=released,
            block=call.module, repeated=runs_by_code[id(region), call.module] > 1,
            early=early))
    return uses, saved


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _forced_arguments(
    model: nn.Module, kwargs: Mapping[str, Any]
) -> tuple[tuple[str, object], ...]:
    """`use_cache=False` for a transformers model that would build a key-value cache: in training
    nobody reads it, and it would hold every key and value to the end of the step."""
    config = getattr(model, "config", None)
    if not getattr(config, "use_cache", False) or "use_cache" in kwargs:
        return ()
    accepted = inspect.signature(model.forward).parameters
    return (("use_cache", False),) if "use_cache" in accepted else ()


def _runs_by_code(recording: Recording) -> Counter[tuple[int, str]]:
    """How often each captured piece of code runs in the step."""
    return Counter((id(call.region), call.module) for call in recording.calls)


def _notes(
    forced: Sequence[tuple[str, object]], recording: Recording, costs: OpCosts
) -> tuple[str, ...]:
    notes = []
    if forced:
        arguments = ", ".join(f"{name}={value}" for name, value in forced)
        notes.append(f"the model is called with {arguments}: a training step has no use for "
                     "the key-value cache")
    blocks = {call.module for call in recording.calls} - {""}
    if blocks:
        notes.append(f"{len(blocks)} blocks are compiled one by one; what the rest of the model "
                     "allocates is counted, but not planned")
    elif len(recording.calls) > 1:
        notes.append(f"torch.compile broke the model into {len(recording.calls)} regions, "
                     "which are planned together; what runs between them is not planned")
    repeated = sum(count for count in _runs_by_code(recording).values() if count > 1)
    if repeated:
        notes.append(f"{repeated} regions share code that runs several times in a step, and are "
                     "kept as they are: a graph break in a loop does that; regions=\"blocks\" "
                     "plans each by itself")
    if recording.inference_graphs:
        notes.append(f"{recording.inference_graphs} captured pieces need no gradient "
                     "and are not planned")
    if costs.assumed:
        notes.append("workspace is a stated margin, not a measurement, for: "
                     + ", ".join(sorted(costs.assumed)))
    if costs.assumption is not None:
        notes.append(costs.assumption)
    if costs.estimated:
        notes.append("seconds are estimated, since they could not be measured, for: "
                     + ", ".join(sorted(costs.estimated)))
    return tuple(notes)


class _Keeper:
    """Which ops the user wants kept."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._used: set[str] = set()

    def __call__(self, module: str, target: str) -> bool:
        hit = False
        for pattern in self._patterns:
            if _is_inside(module, pattern) or target == pattern or target.startswith(f"{pattern}."):
                self._used.add(pattern)
                hit = True
        return hit

    def check_all_used(self) -> None:
        """Raise `ValueError` for a pattern that named nothing."""
        for pattern in self._patterns:
            if pattern not in self._used:
                raise ValueError(
                    f"keep={pattern!r} names no module and no op of the captured forward; give a "
                    "module name such as 'layers.3.attn' (wildcards allowed) or an op such as "
                    "'aten.topk'")


def _is_inside(module: str, pattern: str) -> bool:
    """Whether a module, or one that it is in, matches."""
    parts = module.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:length]), pattern)
               for length in range(1, len(parts) + 1))
