"""The annotated graph of one training step, which `graph_capture` makes and everything else reads.

The model of the world: the step is a fixed sequence of *ops* - the forward, then the loss, then the
backward - that exchange *buffers*.  A buffer is a storage that an op allocates; views, `detach` and
tuple elements of it are the same buffer and are not ops.  Parameters, model buffers and inputs are
*resident*: alive the whole step, whatever the schedule, and so not buffers of the graph.

A step with graph breaks is a chain of *regions*, each with its own forward and backward: forwards
in order, the loss, backwards in reverse.

Blind spots: data-dependent control flow is not in a graph; allocations of the user's own code
between two regions or outside the model are not seen.

`check` enforces these rules:

1. Ops are in the order of execution: forwards by region, the loss, backwards by region in reverse.
2. Names are unique; every captured op has a digest, every pseudo-op is pinned.
3. An op reads only buffers that an earlier op made, each listed once; a buffer is made by exactly
   the op that it names, which lists it.
4. No size, cost or count is negative; seconds are finite.
5. An in-place candidate is an input of the size of the op's only output.
6. Gradients are made in the backward, activations are not.
7. The ranges of a region hold exactly its forward and its backward ops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

LOSS_BACKWARD = "loss/backward#0"
"""Name of the pseudo-op that starts the backward: the loss's own, and the first cotangents."""


HELD_IN_FORWARD = "/gradients of the step before#0"
"""Name of the pseudo-op that makes what the loop holds until the backward begins."""


class Phase(StrEnum):
    """The part of the step in which an op runs first."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class Category(StrEnum):
    """The use of a block of memory, as shown to the user."""

    PARAMETERS = "parameters"
    """Among what a step makes: whole ones, gathered from this rank's and others' shards."""
    BUFFERS = "buffers"
    INPUTS = "inputs"
    GRADIENTS = "gradients"
    """Gradients of parameters; they stay to the end of the step."""
    OPTIMIZER = "optimizer"
    """State, and the optimizer's own copies of the parameters."""
    ACTIVATIONS = "activations"
    """Made by the forward or the loss: saved tensors, outputs and short-lived values."""
    TEMPORARIES = "temporaries"
    """Freed before the step ends: gradients of activations, cotangents, workspace of single ops,
    temporaries of the optimizer's step."""


MADE_BY_STEP = (Category.ACTIVATIONS, Category.GRADIENTS, Category.TEMPORARIES, Category.PARAMETERS)
"""What forward, loss and backward allocate."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A storage made by an op of the graph."""

    size_bytes: int
    producer: int
    """Index of the op that makes it."""
    kind: Category
    kept_to_end: bool = False
    """Kept alive by the user to the end of the step: the model's output, a parameter's gradient."""
    label: str = ""
    """For a gradient, the parameter's name; otherwise empty."""


KEPT_BY_USER, RUNS_SEVERAL_TIMES = "kept by the user", "runs several times in a step"
"""Reasons to pin an op whose results must be kept."""


@dataclass(frozen=True, slots=True)
class TrainingOp:
    """One op of the step, in the order of execution."""

    name: str
    """Stable across processes and machines: module path, op and occurrence, e.g.
    `transformer.h.0.attn/aten.bmm#1` (`~` in front of the op in the backward)."""
    target: str
    """The op itself, e.g. `aten.bmm.default`."""
    module: str
    """Qualified name of the module that called it (in the backward: the one whose forward it
    differentiates); empty for the root."""
    source: str
    """`file:line` of the model's code; empty if unknown."""
    phase: Phase
    region: int
    """Index of the region it belongs to; -1 for the loss."""
    inputs: tuple[int, ...]
    """Buffers that it reads, without repetition."""
    outputs: tuple[int, ...]
    """Buffers that it makes."""
    flops: int = 0
    bytes_moved: int = 0
    """Bytes of the tensors that it reads and writes."""
    seconds: float = 0.0
    """Estimated or measured duration of one run."""
    workspace_bytes: int = 0
    """Temporary memory of its kernel while it runs."""
    pinned: str = ""
    """The reason why it may not be replayed; empty if it may."""
    inplace: tuple[int, ...] = ()
    """Inputs whose storage its only output may overwrite when they die in this op, in order of
    preference: same size, and the kernel reads each element before it writes it."""
    replay_state_bytes: int = 0
    """State that a replay needs from the first run: the random generator's state, copies of inputs
    that the step mutates later."""
    digest: str = ""
    """Hash of op, arguments, shapes and dtypes: equal for equal ops, in any process."""
    result: str = ""
    """Dtype, shape and strides of its result, for people."""


def pseudo_op(name: str, phase: Phase, region: int, inputs: tuple[int, ...],
              outputs: tuple[int, ...], workspace_bytes: int = 0) -> TrainingOp:
    """An op that stands for memory of other code than the model's ops; its name says which."""
    target = name.partition("/")[2].partition("#")[0]
    return TrainingOp(
        name=name, target=target, module="", source="", phase=phase, region=region, inputs=inputs,
        outputs=outputs, workspace_bytes=workspace_bytes, pinned="no op of the model")


@dataclass(frozen=True, slots=True)
class RegionSignature:
    """A region's structure without its sizes, and its sizes.

    A plan for one size of inputs serves another if the structure is the same, and fits the same
    budget if no size is larger: the same schedule then keeps the same storages alive, none of them
    larger. (A kernel's workspace is assumed to grow with its operands.)
    """

    structure: str
    """Hash of everything about the ops except sizes: the ops, the storages they exchange, and
    possible in-place writes."""
    storage_bytes: tuple[int, ...]
    """Sizes of the ops' results, in order."""
    input_bytes: tuple[int, ...]
    """Sizes of the region's inputs, parameters included; of a slice, from its first to its last
    element."""
    input_layout: str
    """Hash of the inputs' shapes and strides.  If it is equal, the sizes must be, too: only another
    model can make them differ."""

    def serves(self, other: RegionSignature) -> bool:
        """True if a plan for this region serves `other`, whose sizes differ."""
        return self.is_like(other) and self.input_layout != other.input_layout

    def is_like(self, other: RegionSignature) -> bool:
        """True if only sizes differ from `other`."""
        return (self.structure == other.structure
                and len(self.input_bytes) == len(other.input_bytes)
                and len(self.storage_bytes) == len(other.storage_bytes))

    def first_larger(self, other: RegionSignature) -> tuple[int, int] | None:
        """Bytes planned and bytes needed where `other` first uses more memory than this."""
        mine = (*self.input_bytes, *self.storage_bytes)
        theirs = (*other.input_bytes, *other.storage_bytes)
        return next(((m, t) for m, t in zip(mine, theirs, strict=True) if t > m), None)


@dataclass(frozen=True, slots=True)
class CodeMemory:
    """Memory of the generated code of one graph, its inputs included."""

    peak_bytes: int
    """Maximum at any time."""
    left_bytes: int
    """Bytes of its outputs."""

    def serves(self, other: CodeMemory) -> bool:
        """True if other code uses no more memory at its peak, and leaves no more."""
        return other.peak_bytes <= self.peak_bytes and other.left_bytes <= self.left_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRegion:
    """Properties of a part of the model that was captured as one joint graph."""

    cotangents: tuple[bool, ...]
    """For each differentiable output of the joint graph, true if a gradient flows into it."""
    region_signature: RegionSignature | None = None
    """Other sizes of inputs that a plan of the region serves; `None`: no others."""
    block: str = ""
    """The submodule that is compiled by itself; empty if the whole model is."""
    hoisted: tuple[int, ...] = ()
    """Positions, in the clean joint graph, of backward ops that belong to the forward here."""
    released: tuple[int, ...] = ()
    """Outputs of its forward that the caller releases before the backward, not counting mutated
    inputs."""
    elided: tuple[int, ...] = ()
    """Outputs of its forward that are not made, since nobody is to read them: the part that would
    make them runs in chunks."""


@dataclass(frozen=True, slots=True)
class Region(CapturedRegion):
    """A captured region in a training graph."""

    forward: range
    """Indices of its forward ops."""
    backward: range
    """Indices of its backward ops."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A buffer that the model returns, or holds in an attribute."""

    buffer: int
    tensors: tuple[int, ...]
    """Tensors of the model's output in the buffer, counted through containers; none if an attribute
    holds it."""
    region: int
    """The region that makes it."""
    places: tuple[int, ...]
    """Outputs of that region's forward in the buffer, mutated inputs not counted."""


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Bytes that stay allocated before and throughout the step."""

    parameters_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    gradients_bytes: int = 0
    """Gradients of earlier micro-batches, to which this one adds its own."""
    pending_bytes: int = 0
    """Saved by other calls of the step whose backward is yet to come."""


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Memory of an optimizer beyond parameters and gradients."""

    name: str
    """Name of its class; `none` without an optimizer."""
    state_bytes: int
    """Bytes alive from the first step on; if the step evaluates the model, while it does so."""
    step_peak_bytes: int
    """Maximum of bytes that a step uses in addition to the state."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel that torch chooses for ops of the forward on the GPU planned for."""

    kernel: str
    """E.g. `attention by flash`."""
    modules: str
    """Qualified names of the modules, numbers in them as `*`; empty if unknown."""
    count: int
    """Number of ops; 0 if the kernel is composed of others."""
    rule: str
    """The reason for the choice; empty if torch chose on the device itself."""


@dataclass(frozen=True)
class TrainingGraph:
    """One training step: forward, loss and backward, without any recomputation."""

    ops: tuple[TrainingOp, ...]
    """In the order of execution: forward regions, loss, backward regions in reverse."""
    buffers: tuple[Buffer, ...]
    regions: tuple[Region, ...]
    resident: ResidentMemory
    device: str
    """The device planned for, e.g. `cpu` or `cuda:0`."""
    notes: tuple[str, ...] = ()
    """Notes for the user about this capture, e.g. that a cache was switched off."""
    outputs: tuple[ModelOutput, ...] = ()
    """The buffers that the model returns."""
    kernels: tuple[KernelChoice, ...] = ()
    """Kernels of a GPU among which there was a choice."""
    assumptions: tuple[str, ...] = ()
    """Assumptions about inputs whose values were unknown."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the parameters' gradients at the end of the backward."""
        return sum(buffer.size_bytes for buffer in self.buffers
                   if buffer.kept_to_end and buffer.kind is Category.GRADIENTS)

    @cached_property
    def step_flops(self) -> int:
        """FLOPs of the step without recomputation."""
        return sum(op.flops for op in self.ops)

    @cached_property
    def step_seconds(self) -> float:
        """Estimated duration of the step without recomputation."""
        return sum(op.seconds for op in self.ops)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Op name to index."""
        return {op.name: index for index, op in enumerate(self.ops)}


@dataclass(frozen=True, slots=True)
class SavingCosts:
    """Seconds of memory traffic, by buffer of the forward, where ops are fused."""

    to_save: Mapping[int, float] = field(default_factory=dict)
    """Seconds to write a result for the backward and to read it there; only for buffers that no
    kernel needs in memory otherwise, and that no two kernels would compute."""
    to_read: Mapping[int, float] = field(default_factory=dict)
    """Seconds to read a result."""


@dataclass(frozen=True, slots=True)
class GeneratedKernels:
    """The part of a step that kernels of Inductor compute, whatever they fuse."""

    pointwise: frozenset[int]
    """Ops that a kernel may compute again for each of their readers."""
    external: frozenset[int]
    """Ops that kernels of a library compute."""


@dataclass(frozen=True, slots=True)
class StepVariant:
    """A training step as one graph, and Inductor's treatment of its buffers."""

    graph: TrainingGraph
    """If Inductor compiles the step, buffers that never leave a kernel have no size
    (`graph_capture.inductor.within_kernels`)."""
    low_peak: bool = False
    """True if the backward uses less memory at the price of copies
    (`graph_capture.joint_graph.low_peak_backward`); otherwise it is the base variant."""
    chunks: int = 1
    """Number of chunks in which its widest part runs (`graph_capture.joint_graph.chunks`)."""
    inner_chunks: int = 1
    """Number of chunks in which the insides of its layers run."""
    saved_by_default: frozenset[int] = frozenset()
    """Buffers that Inductor's own partitioner saves for the backward."""
    saving_costs: SavingCosts = field(default_factory=SavingCosts)
    """Costs of Inductor's kernels to save results for the backward."""
    kernels: GeneratedKernels | None = None
    """`None`: the step is not compiled."""


_ORDER = {Phase.FORWARD: 0, Phase.LOSS: 1, Phase.BACKWARD: 2}


class MalformedGraph(AssertionError):
    """A graph that breaks its specification: a defect of the capture, not of the model."""


def check(graph: TrainingGraph) -> None:
    """Raise `MalformedGraph` with the first rule that `graph` breaks."""
    _check_order(graph)
    _check_names(graph)
    _check_buffers(graph)
    for op in graph.ops:
        _check_op(graph, op)
    _check_regions(graph)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise MalformedGraph(message)


def _check_order(graph: TrainingGraph) -> None:
    phases = [_ORDER[op.phase] for op in graph.ops]
    _require(phases == sorted(phases), "phases must come in the order forward, loss, backward")


def _check_names(graph: TrainingGraph) -> None:
    seen: set[str] = set()
    for op in graph.ops:
        _require(op.name not in seen, f"two ops are named {op.name}")
        seen.add(op.name)
        _require(bool(op.digest or op.pinned), f"{op.name} has neither a digest nor is it pinned")


def _check_buffers(graph: TrainingGraph) -> None:
    for index, buffer in enumerate(graph.buffers):
        _require(0 <= buffer.producer < len(graph.ops), f"buffer {index} has no producer")
        maker = graph.ops[buffer.producer]
        _require(index in maker.outputs, f"{maker.name} does not list buffer {index}")
        _require(buffer.size_bytes >= 0, f"buffer {index} has a negative size")
        if buffer.kind is Category.GRADIENTS:
            # A residual passes the loss's own gradient on to an input.
            _require(maker.phase is not Phase.FORWARD,
                     f"gradient {buffer.label} is made in the forward")
        if buffer.kind is Category.ACTIVATIONS:
            _require(maker.phase is not Phase.BACKWARD or buffer.kept_to_end,
                     f"{maker.name} makes an activation in the backward")


def _check_op(graph: TrainingGraph, op: TrainingOp) -> None:
    index = graph.index_of[op.name]
    _require(len(set(op.inputs)) == len(op.inputs), f"{op.name} lists an input twice")
    for buffer in op.inputs:
        _require(graph.buffers[buffer].producer < index,
                 f"{op.name} reads buffer {buffer} before it is made")
    for buffer in op.outputs:
        _require(graph.buffers[buffer].producer == index,
                 f"{op.name} lists buffer {buffer}, which another op makes")
    for amount in (op.flops, op.bytes_moved, op.workspace_bytes, op.replay_state_bytes):
        _require(amount >= 0, f"{op.name} has a negative cost")
    _require(op.seconds >= 0 and math.isfinite(op.seconds), f"{op.name} has no finite duration")
    for buffer in op.inplace:
        _require(buffer in op.inputs and len(op.outputs) == 1 and graph.buffers[buffer].size_bytes
                 == graph.buffers[op.outputs[0]].size_bytes,
                 f"{op.name} cannot write its result over buffer {buffer}")


def _check_regions(graph: TrainingGraph) -> None:
    for number, region in enumerate(graph.regions):
        for phase, indices in ((Phase.FORWARD, region.forward), (Phase.BACKWARD, region.backward)):
            mine = [index for index, op in enumerate(graph.ops)
                    if op.region == number and op.phase is phase]
            _require(mine == list(indices),
                     f"the {phase.value} range of region {number} does not hold exactly its ops")
