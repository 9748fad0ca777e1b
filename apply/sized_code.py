"""Compiled code of a model under a plan for a range of sizes: one trace serves all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner._apply.call_signature import input_tensors
from planner._apply.errors import PlanMismatch
from planner._apply.plan_backend import different_op
from planner._apply.rewrite_spec import RewriteSpec, SymbolicSizes
from planner._apply.same_step import difference_from_step
from planner._apply.size_expressions import number
from planner._apply.symbolic_code import SizesNotPlanned, SymbolicCallable, SymbolicCode
from planner._graph_capture.module_forward import Forward


class SizedCode(SymbolicCode):
    """Code under one rewrite spec; raises `PlanMismatch` for another graph, and for sizes that it
    does not serve."""

    def __init__(self, model: nn.Module, spec: RewriteSpec) -> None:
        assert spec.sizes is not None, "a rewrite spec for a range of sizes"
        super().__init__(model, spec.regions[0].cotangents, self._tensors)
        self._spec, self._sizes = spec, spec.sizes
        self._called: tuple[nn.Module, Forward | None] | None = None
        for each in spec.sizes.dimensions:
            self.dimensions.setdefault(each.input, {})[each.dimension] = each.size

    def __call__(self, module: nn.Module, own: Forward | None, /, *args: Any, **kwargs: Any
                 ) -> Any:
        """Call the module.  `own`: the forward that the instance has; `None`: that of its class."""
        self._called = module, own
        try:
            check_ranges(self._sizes, self._tensors(args, kwargs))
            try:
                return super().__call__(module, own, *args, **kwargs)
            except SizesNotPlanned as unknown:
                self._adopt(unknown.graph)
            return super().__call__(module, own, *args, **kwargs)
        finally:
            self._called = None

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        assert self._called is not None, "it is being called"
        return input_tensors(*self._called, args, kwargs)

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
