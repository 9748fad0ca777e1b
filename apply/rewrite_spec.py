"""What the applier needs of a plan, and nothing else: plain data, so that a file can hold it.

A rewrite spec names the ops that the training graph must have (in order, each with its digest) and
the actions to insert between their first runs.  It knows no costs and no budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from planner._graph_capture.training_graph import Buffer, CodeMemory, RegionSignature, TrainingOp


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
    """An op of the forward runs again."""

    op: str


class Stored(msgspec.Struct, frozen=True):
    """A result of an op, by its place among the storages that the op makes."""

    op: str
    output: int


class Store(Stored, frozen=True, tag_field="kind", tag="store"):
    """A copy of a result to the host begins."""


class Release(Stored, frozen=True, tag_field="kind", tag="release"):
    """The copy is waited for; the device's memory is let go."""


class Fetch(Stored, frozen=True, tag_field="kind", tag="fetch"):
    """A copy of a result back to the device begins."""


InsertedAction: TypeAlias = RunAgain | Store | Release | Fetch
"""What can happen between first runs: a union of structs that a file tells apart by their tags."""


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
    """Which run of the op: 0 is the first, 1 the first recomputation."""
    candidate: int
    """Which of the op's in-place candidates."""


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """One captured region: its ops and what is inserted into its forward and backward."""

    forward: tuple[OpKey, ...]
    backward: tuple[OpKey, ...]
    cotangents: tuple[bool, ...]
    """For each differentiable output of the joint graph, whether a gradient flows into it."""
    insertions: tuple[Insertion, ...] = ()
    """In the order of the ops before which they stand."""
    inplace_reuses: tuple[InplaceReuse, ...] = ()
    """In the order of the runs."""
    region_signature: RegionSignature | None = None
    """Which other sizes of inputs the rewrite spec serves; `None`: no others."""
    block: str = ""
    """The submodule that is compiled by itself; empty where the whole model is."""
    hoisted: tuple[int, ...] = ()
    """Positions, in the clean joint graph, of backward ops that belong to the forward here."""
    code: tuple[CodeMemory, ...] = ()
    """What the forward and the backward code that Inductor generated take; empty: not known."""
    released: tuple[int, ...] = ()
    """Which outputs of its forward the caller lets go before the backward, mutated inputs not
    counted."""
    elided: tuple[int, ...] = ()
    """Which outputs of its forward are not made: nobody is to read them."""


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
    """As the model's forward names it, with what leads to a tensor within it."""
    kind: str
    """Dtype and shape of a tensor; a plain value; or a type."""
    requires_grad: bool = False
    same_as: str | None = None
    """The argument that is the very same tensor."""


@dataclass(frozen=True, slots=True)
class CallSignature:
    """What a step was called with and under when it was planned."""

    inputs: tuple[InputKey, ...]
    """By name; those that are `None` are left out."""
    autocast: str
    """Device types and dtypes of autocast; empty where it was off."""
    wrapper: str | None
    """What wraps the forward in the instance of the model; `None`: nothing does."""
    attention: str | None
    """The implementation of attention, where the model's configuration names one."""


@dataclass(frozen=True, slots=True)
class RewriteSpec:
    """A plan as the applier sees it."""

    tensors: tuple[ParameterKey, ...]
    """Every parameter and buffer, in the order of `named_parameters()`, then `named_buffers()`."""
    regions: tuple[RegionSpec, ...]
    """In the order of their forwards."""
    training: bool
    """Whether the model was in training mode when it was captured."""
    overrides: tuple[tuple[str, object], ...] = ()
    """Keyword arguments that capture forced (`use_cache=False`) and the applied model repeats."""
    backend: str = "eager"
    """What runs the graphs: op by op (`eager`), or compiled by Inductor (`inductor`)."""
    low_peak: bool = False
    """Whether gradients are copied so that the backward holds less
    (`graph_capture.joint_graph.low_peak_backward`)."""
    chunks: int = 1
    """In how many chunks its widest part runs (`graph_capture.joint_graph.chunks`)."""
    inner_chunks: int = 1
    """In how many chunks the insides of its layers run."""
    kernel_order: bool = False
    """Whether Inductor may not move or fuse kernels of the backward across calls of libraries, and
    stores what is read behind them (`apply.realized`)."""
    low_memory_codegen: bool = False
    """Whether Inductor's code is to take less memory where that costs little.  It then lays out for
    convolutions only what they read and make, and neither what its graphs hand on to the backward,
    weights and images, nor what has its elements in other dimensions; and kernels that read the
    same are two where as one they would set the peak."""
    signature: CallSignature | None = None
    """For errors, not for choosing; `None`: not known."""
    device: str = ""
    """The device planned for; for errors."""
    holds_output: bool = True
    """Whether the caller is taken to hold the model's output until the backward ends."""
    ops: tuple[TrainingOp, ...] = ()
    """The whole step that the plan was made for, in the order of execution, without what no check
    needs (source, target, bytes moved); empty while rewrite specs are only compared in a search."""
    buffers: tuple[Buffer, ...] = ()
    """What these ops exchange."""

    @property
    def is_variant(self) -> bool:
        """Whether the graph is another one than that captured at first: low-peak, or in chunks."""
        return self.low_peak or self.chunks > 1 or self.inner_chunks > 1

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the submodules that are compiled one by one; none for the whole model."""
        return tuple(dict.fromkeys(region.block for region in self.regions if region.block))
