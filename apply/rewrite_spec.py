"""The part of a plan that the applier needs: plain data, so that a file can contain it.

A rewrite spec names the ops that the training graph must have (in order, each with its digest) and
the actions to insert between their first runs.  It knows no costs and no budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from planner._graph_capture.training_graph import Buffer, CapturedRegion, CodeMemory, TrainingOp


@dataclass(frozen=True, slots=True)
class OpKey:
    """One op of the graph that a plan was made for."""

    name: str
    """Stable name, see `graph_capture.training_graph.TrainingOp.name`."""
    digest: str
    """Hash of op, arguments, shapes and dtypes."""
    result: str = ""
    """Dtype, shape and strides of its result, for people."""


class RunAgain(msgspec.Struct, frozen=True, tag_field="kind", tag="run"):
    """Run an op of the forward again."""

    op: str


class Stored(msgspec.Struct, frozen=True):
    """A result of an op, by its place among the storages that the op makes."""

    op: str
    output: int


class Store(Stored, frozen=True, tag_field="kind", tag="store"):
    """Begin a copy of a result to the host."""


class Release(Stored, frozen=True, tag_field="kind", tag="release"):
    """Wait for the copy, and free the device's memory."""


class Fetch(Stored, frozen=True, tag_field="kind", tag="fetch"):
    """Begin a copy of a result back to the device."""


InsertedAction: TypeAlias = RunAgain | Store | Release | Fetch
"""Action between first runs: a union of structs, distinguished in a file by their tags."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """Actions, in this order, just before an op runs for the first time."""

    before: str
    """Name of the op whose first run follows."""
    actions: tuple[InsertedAction, ...]


@dataclass(frozen=True, slots=True)
class InplaceReuse:
    """A run of an op that writes its result over an operand that dies there."""

    op: str
    run: int
    """Number of the run of the op: 0 is the first, 1 the first recomputation."""
    candidate: int
    """Number of the candidate among the op's in-place candidates."""


@dataclass(frozen=True, slots=True)
class RegionSpec(CapturedRegion):
    """One captured region: its ops, and the insertions into its forward and backward."""

    forward: tuple[OpKey, ...]
    backward: tuple[OpKey, ...]
    insertions: tuple[Insertion, ...] = ()
    """Insertions, in the order of the ops that they precede."""
    inplace_reuses: tuple[InplaceReuse, ...] = ()
    """In-place runs, in the order of the runs."""
    code: tuple[CodeMemory, ...] = ()
    """Memory of the generated forward and backward code of Inductor; empty: unknown."""


@dataclass(frozen=True, slots=True)
class ParameterKey:
    """A parameter or buffer of the model that a plan was made for."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class InputKey:
    """One argument of the call that a plan was made for."""

    name: str
    """Its name in the model's forward, with the path to a tensor within it."""
    kind: str
    """Dtype and shape of a tensor; a plain value; or a type."""
    requires_grad: bool = False
    same_as: str | None = None
    """The argument that is the very same tensor."""


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The arguments and settings of a step when it was planned."""

    inputs: tuple[InputKey, ...]
    """Inputs by name; those that are `None` are left out."""
    autocast: str
    """Device types and dtypes of autocast; empty if it was off."""
    wrapper: str | None
    """Wrapper of the forward in the instance of the model; `None`: none."""
    attention: str | None
    """The implementation of attention, if the model's configuration names one."""


@dataclass(frozen=True, slots=True)
class SizeRange:
    """A size of the inputs that may vary."""

    name: str
    smallest: int
    largest: int
    """The size planned for."""


@dataclass(frozen=True, slots=True)
class NamedDimension:
    """A dimension of an input that has a size of some name."""

    input: str
    """See `InputKey.name`."""
    dimension: int
    size: str


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Ops of the step that are called alike, whose workspace at other sizes is measured."""

    call: str
    """The op and its arguments; sizes in terms of the names (`apply.size_expressions`)."""
    result: str
    beyond_bytes: int
    """Workspace in addition to that of its kernel."""
    ops: tuple[int, ...]
    """Indices into the ops of the step."""


@dataclass(frozen=True, slots=True)
class SymbolicSizes:
    """A step as a function of sizes of its inputs."""

    ranges: tuple[SizeRange, ...]
    """The sizes that the plan serves."""
    dimensions: tuple[NamedDimension, ...]
    input_bytes: tuple[str, ...]
    """Bytes of the inputs that have such dimensions, in terms of the names."""
    buffer_bytes: tuple[str, ...]
    """Bytes of each buffer of the step, in terms of the names."""
    kernels: tuple[KernelCall, ...]
    """Ops that may use workspace; that of others is taken to be at most that at the largest
    sizes."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sizes."""
        return tuple(each.name for each in self.ranges)

    @property
    def largest(self) -> dict[str, int]:
        """The sizes planned for."""
        return {each.name: each.largest for each in self.ranges}


@dataclass(frozen=True, slots=True)
class RewriteSpec:
    """The part of a plan that the applier uses."""

    tensors: tuple[ParameterKey, ...]
    """Every parameter and buffer, in the order of `named_parameters()`, then `named_buffers()`."""
    regions: tuple[RegionSpec, ...]
    """Regions in the order of their forwards."""
    training: bool
    """True if the model was in training mode when it was captured."""
    overrides: tuple[tuple[str, object], ...] = ()
    """Keyword arguments that capture forced (`use_cache=False`) and the applied model repeats."""
    backend: str = "eager"
    """Executor of the graphs: op by op (`eager`), or compiled by Inductor (`inductor`)."""
    low_peak: bool = False
    """True if gradients are copied so that the backward uses less memory
    (`graph_capture.joint_graph.low_peak_backward`)."""
    chunks: int = 1
    """Number of chunks in which its widest part runs (`graph_capture.joint_graph.chunks`)."""
    inner_chunks: int = 1
    """Number of chunks in which the insides of its layers run."""
    kernel_order: bool = False
    """True if Inductor may not move or fuse kernels of the backward across calls of libraries.  It
    then stores results that are read after them (`apply.inductor`)."""
    low_memory_codegen: bool = False
    """True if Inductor's code is to use less memory at a small cost: a buffer is reused only where
    that raises no peak, and kernels that read the same inputs stay apart if the fused kernel would
    set the peak."""
    signature: CallSignature | None = None
    """For errors, not for choosing; `None`: unknown."""
    device: str = ""
    """The planned device; for errors."""
    holds_output: bool = True
    """True if the caller is assumed to keep the model's output alive until the backward ends."""
    ops: tuple[TrainingOp, ...] = ()
    """The whole step that the plan was made for, in the order of execution, without the fields that
    no check needs (source, target, bytes moved).  Empty while a search only compares rewrite specs.
    """
    buffers: tuple[Buffer, ...] = ()
    """Buffers that these ops exchange."""
    sizes: SymbolicSizes | None = None
    """The step at other sizes of its inputs, if it was captured with symbolic sizes."""
    fits: Callable[[dict[str, int]], bool] | None = field(default=None, compare=False, repr=False)
    """Tells whether sizes within the ranges are within the budget; `None`: all are."""

    @property
    def is_variant(self) -> bool:
        """True if the graph differs from the captured one: low-peak, or chunked."""
        return self.low_peak or self.chunks > 1 or self.inner_chunks > 1

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the submodules that are compiled one by one; none for the whole model."""
        return tuple(dict.fromkeys(region.block for region in self.regions if region.block))


def decisions_of(spec: RewriteSpec, regions: Sequence[int]) -> tuple[object, ...]:
    """The decisions for these regions of a block; they are equal for blocks that may share code."""
    return tuple(_decisions(spec.regions[index], index) for index in regions)


def _decisions(region: RegionSpec, index: int) -> object:
    def local(name: str) -> str:
        """Return the op's name within the block."""
        bare = name.removeprefix(f"{index}:")
        mark = "~" if bare.startswith("~") else ""
        return mark + bare.removeprefix(mark).removeprefix(region.block)

    def ops(keys: tuple[OpKey, ...]) -> tuple[tuple[str, str], ...]:
        return tuple((local(key.name), key.result) for key in keys)

    sizes = region.region_signature and (
        region.region_signature.storage_bytes, region.region_signature.input_bytes)
    return (ops(region.forward), ops(region.backward), region.cotangents, sizes, region.hoisted,
            tuple((local(group.before), tuple(
                msgspec.structs.replace(action, op=local(action.op)) for action in group.actions))
                  for group in region.insertions),
            tuple((local(reuse.op), reuse.run, reuse.candidate) for reuse in region.inplace_reuses))
