"""Steps of one model at several sizes (batch, sequence), with as few captures as possible.

The first size is captured by itself.  At the second one the model is captured with a symbol for
what differs, and all later steps follow from that graph: only the plain step is traced on fake
tensors.  Where there is no such graph, each size is captured by itself.

The user gives a function from a size to the inputs of a step.  A size at which the step cannot be
captured is skipped, with the reason; a function that returns no inputs, or the same at every size,
is an error.

Given inputs are resized: a batch is the first dimension that tensors of the inputs share; a
sequence length is the second one, and in tensors that are not floating point (tokens, labels,
masks) any later dimension of that length.  Values are repeated or left out.  Blind spot: a
dimension that happens to have the same size; a function says what is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from planner._apply.call_signature import Call
from planner._graph_capture.module_forward import own_forward
from planner._graph_capture.torch_compat import pytree
from planner.api import SymbolicTrace, prepare_step
from planner.arguments.inputs import join_inputs, split_inputs
from planner.arguments.planning import Planning
from planner.errors import CaptureError
from planner.progress import Progress
from planner.step.prepared import PreparedStep
from planner.step.wrapped import unwrapped

MakeInputs = Callable[[int], object]
"""Function from a size to the inputs of a step: a tuple, a mapping or a tensor, as in
`planner.plan`."""

MakeLoss = Callable[[int], "Callable[[Any], torch.Tensor]"]
"""Function from a size to the `loss_fn` of a step, for a loss that contains labels."""


class SizedSteps:
    """Captures of a model by size; mutable, since it caches them."""

    def __init__(self, model: nn.Module, make_inputs: MakeInputs, planning: Planning, *,
                 what: str, make_loss_fn: MakeLoss | None = None, progress: Progress | None = None,
                 accumulation_of: Callable[[int], int] | None = None, are_many: bool = True
                 ) -> None:
        """`what`: the size in words, such as `batch`; `accumulation_of`: micro-batches per
        optimizer step, by size; by default those of `planning`; `are_many`: enough sizes are
        looked at for a graph with symbolic sizes, which takes as long as two or three others."""
        if make_loss_fn is not None and not callable(make_loss_fn):
            raise TypeError(f"make_loss_fn must be a function from a {what} size to the loss "
                            f"function, got {type(make_loss_fn).__name__}")
        if make_loss_fn is not None and planning.loss_fn is not None:
            raise ValueError("give loss_fn or make_loss_fn, not both")
        if planning.backend != "eager":
            raise ValueError(f"backend={planning.backend!r}: sizes are compared by the step that "
                             "runs op by op; use backend='eager', and plan the size that was found "
                             "for the other backend with planner.plan")
        self._model = model
        self._make_inputs = make_inputs
        self._make_loss_fn = make_loss_fn
        self._what = what
        self._progress = progress
        self._accumulation_of = accumulation_of
        self.planning = planning
        self._steps: dict[int, PreparedStep | None] = {}
        self._plain: set[int] = set()  # sizes whose step was captured without chunks
        self._first: Call | None = None
        """The call of the first size."""
        self._trace: SymbolicTrace | None = None
        self._are_many = are_many
        self.skipped: dict[int, str] = {}
        """Sizes at which the step cannot be captured, with the reason."""

    @property
    def captured(self) -> Mapping[int, PreparedStep]:
        """The steps captured so far."""
        return {size: step for size, step in self._steps.items() if step is not None}

    def at(self, size: int) -> PreparedStep | None:
        """The step of this size; `None` if it cannot be captured.

        Raises `TypeError` if `make_inputs` does not return inputs, and `ValueError` if it returns
        the same for two sizes.
        """
        if size not in self._steps or size in self._plain:
            self._plain.discard(size)
            self._steps[size] = self._capture(size, self.planning)
        return self._steps[size]

    def plain_at(self, size: int) -> PreparedStep | None:
        """Like `at`, for uses of the plain step only: chunked variants, which take as long to build
        as everything else, may be missing."""
        if size in self._steps or not self.planning.chunks:
            return self.at(size)
        allow = tuple(choice for choice in self.planning.allow if choice != "chunk")
        step = self._steps[size] = self._capture(size, replace(self.planning, allow=allow))
        if step is not None:
            self._plain.add(size)
        return step

    def _capture(self, size: int, planning: Planning) -> PreparedStep | None:
        if self._progress is not None:
            self._progress(f"capturing a {self._what} of {size}")
        loss_fn = self.planning.loss_fn
        try:
            inputs = self._make_inputs(size)
            if self._make_loss_fn is not None:
                loss_fn = self._make_loss_fn(size)
        except Exception as error:  # the user's code; it may not support every size
            self.skipped[size] = f"make_inputs({size}) failed: {type(error).__name__}: {error}"
            return None
        self._check(size, inputs)
        planning = replace(planning, loss_fn=loss_fn)
        if self._accumulation_of is not None:
            planning = replace(planning, accumulation=self._accumulation_of(size))
        try:
            step = prepare_step(self._model, inputs, planning, self._progress,
                                self._trace_for(inputs))
        except CaptureError as error:
            self.skipped[size] = str(error)
            return None
        for other, known in self.captured.items():
            if other != size and known.inputs == step.inputs:
                raise ValueError(
                    f"make_inputs({other}) and make_inputs({size}) return inputs of the same "
                    f"shapes; expected inputs of the {self._what} size that it is called with")
        return step

    def _trace_for(self, inputs: object) -> SymbolicTrace | None:
        """The graph with symbolic sizes, from the second size on; `None` if there is none.

        A size of 1 is a graph of its own in torch, and what fixed sizes alone have is not traced
        with symbols: a step of several ranks, of blocks, in chunks.
        """
        planning, model = self.planning, unwrapped(self._model)
        if not self._are_many or not isinstance(model, nn.Module) or model is not self._model or (
                planning.chunks or planning.parallel is not None
                or planning.budget_of == "reserved" or planning.optimizer_in_backward
                or planning.regions not in (None, "model")):
            return None
        call = Call.of(model, own_forward(model), *split_inputs(model, inputs))
        if self._first is None:
            self._first = call
            return None
        if call.without_sizes != self._first.without_sizes:
            return None
        if self._trace is None:
            self._trace = SymbolicTrace(self._dimensions(self._first, call))
        trace = self._trace
        return trace if trace.dimensions and not trace.has_failed and (
            self._varies_as_named(call, trace.dimensions)) else None

    def _dimensions(self, first: Call, second: Call) -> dict[str, dict[int, str]]:
        """Names of the sizes that differ between two calls; sizes that are equal in both have one
        name.  None where torch captures one of them by itself."""
        names: dict[tuple[int, int], str] = {}
        found: dict[str, dict[int, str]] = {}
        for name, sizes in second.sizes.items():
            for place, pair in enumerate(zip(first.sizes[name], sizes, strict=True)):
                if pair[0] != pair[1]:
                    number = len(names)
                    size = names.setdefault(pair, f"{self._what}_{number}" if number else
                                            self._what)
                    found.setdefault(name, {})[place] = size
        return {} if any(size < 2 for _, size in names) else found

    def _varies_as_named(self, call: Call, dimensions: Mapping[str, Mapping[int, str]]) -> bool:
        """True if a call differs from the first one in the named sizes alone."""
        assert self._first is not None
        values: dict[str, int] = {}
        return all(
            values.setdefault(dimensions[name][place], size) == size
            if place in dimensions.get(name, {}) else size == first
            for name, sizes in call.sizes.items()
            for place, (first, size) in enumerate(zip(self._first.sizes[name], sizes, strict=True)))

    def _check(self, size: int, inputs: object) -> None:
        try:
            if inputs is None:
                raise TypeError("inputs must be a tuple of positional arguments, a mapping of "
                                "keyword arguments, or one tensor, got None")
            split_inputs(self._model, inputs)
        except TypeError as error:
            raise TypeError(f"make_inputs({size}) returned no inputs of a step: {error}") from None


def model_first(model: Any, inputs: Any) -> tuple[nn.Module, Any]:
    """The two arguments with the model first; the order (factory, model) is taken, too."""
    if isinstance(inputs, nn.Module) and not isinstance(model, nn.Module):
        model, inputs = inputs, model
    return model, inputs


def factory_of(model: nn.Module, inputs: object, what: str) -> MakeInputs:
    """A function from a size to inputs: `inputs` if it is one, else `inputs` with another `batch`
    or `sequence` (`what`).

    Raises `TypeError` if `inputs` is neither, and `ValueError` if no tensor has the dimension.
    """
    if callable(inputs) and not isinstance(inputs, (torch.Tensor, Mapping)):
        return cast(MakeInputs, inputs)
    try:
        args, kwargs = split_inputs(model, inputs)
    except TypeError as error:
        raise TypeError(f"{error}; or a function from a {what} size to inputs") from None
    first = 0 if what == "batch" else 1
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs))
               if isinstance(leaf, torch.Tensor) and leaf.dim() > first]
    if not tensors:
        raise ValueError(f"no tensor of the inputs has a dimension {first}, which would be the "
                         f"{what}; pass a function from a {what} size to inputs")
    size = tensors[0].size(first)

    def resized(value: object, to: int) -> object:
        if not isinstance(value, torch.Tensor) or value.dim() <= first:
            return value
        last = value.dim() if first and not value.is_floating_point() else first + 1
        for dimension in range(first, last):
            if value.size(dimension) == size:
                value = _with_size(value, dimension, to)
        return value

    def make_inputs(to: int) -> object:
        made = pytree.tree_map(lambda leaf: resized(leaf, to), (args, kwargs))
        return join_inputs(model, *made)

    return make_inputs


def _with_size(tensor: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    positions = torch.arange(size, device=tensor.device) % max(1, tensor.size(dimension))
    return tensor.detach().index_select(dimension, positions).requires_grad_(tensor.requires_grad)
