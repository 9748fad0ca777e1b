"""Code that `torch.compile` makes of a module's forward under a rewrite spec."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from planner._apply.call_signature import input_tensors
from planner._apply.errors import PlanMismatch
from planner._apply.plan_backend import Fallback, PlanBackend
from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.dynamo.traced_code import TracedCode
from planner._graph_capture.errors import raised_behind
from planner._graph_capture.module_forward import Forward, modules_of, parameters_of
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.torch_compat import (
    BackendCompilerFailed,
    as_plain_code,
    compile_forward,
    compile_settings,
    pytree,
    sizes_as_they_are,
    sizes_may_vary,
    symbolic_dimensions,
    uncompiled_operations,
    varying_numbers,
)

DID_MORE_OUTSIDE = (
    "a part of the model that torch.compile does not capture (code under torch.compiler.disable, "
    "or code that torch gave up on) did more in this step than when it was planned; that part ran "
    "as it is written, and the step may have taken more than the budget. Let it do in the first "
    "step the most that it ever does, or take it out of the model")


class CompiledCode:
    """Compiled code of the model, or of blocks that share it."""

    def __init__(self, name: str, backend: Any, *, is_compiled: bool = False,
                 is_of_blocks: bool = False, has_several_regions: bool = False) -> None:
        """`backend`: a `Backend`."""
        self._name, self.backend = name, backend
        self._compiled: dict[tuple[bool, ...], Callable[..., Any]] = {}
        """By which parameters are trained: torch 2.11 does not look again where that changes."""
        self._is_compiled, self._is_of_blocks = is_compiled, is_of_blocks
        self._has_several_regions = has_several_regions
        self._sizes_vary = False
        self._operations_outside: dict[str, int] = {}
        """Number of ops that autograd recorded outside of all regions in the first call, by the
        block that was called."""
        self.did_more_outside = False
        """True if the last call recorded more ops outside than the first."""

    @property
    def has_begun(self) -> bool:
        """True if the last call has progressed so far that it cannot start over under another
        rewrite spec."""
        return bool(self.backend.has_begun)

    @property
    def met_unplanned_gradient(self) -> bool:
        """True if a gradient came through an output that the plan took for one without."""
        return bool(self.backend.met_unplanned_gradient)

    def fall_back(self, fallback: Fallback, *, may_take_other_paths: bool = False,
                  sizes_vary: bool = False) -> None:
        """From now on, once a step has begun, run a region that is not the plan's by the result of
        `fallback`, with a warning, instead of ending the step with `PlanMismatch`.
        `may_take_other_paths`: values of tensors decide which regions run.  `sizes_vary`: graphs of
        smaller sizes, which run under the plan, are compiled once, with symbolic sizes."""
        self.backend.fallback = fallback
        self._sizes_vary = sizes_vary
        self.backend.may_take_other_paths = may_take_other_paths

    def take_larger(self) -> None:
        """From now on, run larger sizes, which values decide, under the plan's schedule, too."""
        self.backend.take_larger()

    def compare_with(self, earlier: object) -> None:
        """Take what ran outside of the regions of earlier code of the same graph for what was
        planned, instead of what does in the first call."""
        if isinstance(earlier, CompiledCode):
            self._operations_outside |= earlier._operations_outside

    @property
    def is_trial(self) -> bool:
        """True if a region that is not the plan's ends the call though others have run."""
        return bool(self.backend.is_trial)

    @is_trial.setter
    def is_trial(self, value: bool) -> None:
        self.backend.is_trial = value

    @property
    def compilations(self) -> int:
        """Graphs that were compiled so far."""
        return int(self.backend.compilations)

    @property
    def planned_runs(self) -> int:
        """Regions of the plan that have run in the last call."""
        return int(self.backend.planned_runs)

    def __call__(self, module: nn.Module, own: Forward | None, /, *args: Any, **kwargs: Any
                 ) -> Any:
        """Call the module.  `own`: the forward that the instance has; `None`: that of its class."""
        return self.call_block("", module, own, *args, **kwargs)

    def call_block(self, block: str, module: nn.Module, own: Forward | None, /, *args: Any,
                   **kwargs: Any) -> Any:
        """Call a module that is this block of the model; empty: the model."""
        backend = self.backend
        backend.begin_call(block, module)
        trained = tuple(p.requires_grad for p in parameters_of(modules_of(module)))
        if trained not in self._compiled:
            self._compiled[trained] = self._compile()
        # Around blocks that is so already.
        plain = (nullcontext() if self._is_compiled or self._is_of_blocks
                 else as_plain_code(partial(known_tensors, module, args, kwargs)))
        with (compile_settings(donated_buffers=self._is_compiled), plain,
              self._around_call(module, own, args, kwargs)):
            try:
                output = self._compiled[trained](module, own, *args, **kwargs)
            except BackendCompilerFailed as error:
                if isinstance(error.inner_exception, PlanMismatch):
                    raise error.inner_exception from None
                raise
            except AttributeError as error:
                if mismatch := raised_behind(error, PlanMismatch):
                    raise mismatch from None
                raise
            finally:
                backend.running = None
        outside = uncompiled_operations(output_tensors(output), (args, kwargs),
                                        behind_regions=self._has_several_regions)
        self.did_more_outside = outside > self._operations_outside.setdefault(block, outside)
        if self.did_more_outside and self.is_trial:
            raise PlanMismatch(DID_MORE_OUTSIDE)
        return output

    def _compile(self) -> Callable[..., Any]:
        return compile_forward(self._name, self.backend)

    def _around_call(self, module: nn.Module, own: Forward | None, args: tuple[Any, ...],
                     kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Inside, sizes of these arguments are marked as the code takes them, and what is compiled
        is compiled by this backend."""
        return sizes_as_they_are((args, kwargs))

    def why_unplanned(self) -> str | None:
        """Reason why the last successful call ran without the plan; `None` if it ran under it."""
        if not self.backend.has_run:
            return ("torch.compile ran this step as it is written, without the plan: it gave up on "
                    "the model's code, or a dispatch mode is active. If the model sets something "
                    "up in its first call, call it once before the plan is applied")
        if not self.planned_runs:
            return "nothing that was captured of this step needed a gradient"
        if self.did_more_outside:
            return DID_MORE_OUTSIDE
        return None


class PlannedCode(CompiledCode):
    """Compiled code under one rewrite spec; raises `PlanMismatch` where that is for another
    graph."""

    def __init__(self, model: nn.Module, module: nn.Module, spec: RewriteSpec,
                 regions: Sequence[int] | None = None, *, may_exchange: bool = False,
                 traced: TracedCode | None = None) -> None:
        """`module`: the model, or one of the blocks that share the code; `regions`: those of the
        rewrite spec that may be met here, by default all; `may_exchange`, `traced`: as for
        `code_of`."""
        super().__init__(
            type(module).__name__, _backend_of(model, spec, regions),
            is_compiled=spec.backend == "inductor", is_of_blocks=regions is not None,
            has_several_regions=len(spec.regions if regions is None else regions) > 1)
        blocks = [each.block for index, each in enumerate(spec.regions)
                  if regions is None or index in regions]
        # Code that runs several times in a step has a schedule for each time.
        self.backend.is_exchangeable = may_exchange or (
            is_exchangeable(spec) and len(set(blocks)) < len(blocks))
        self.varying: dict[str, set[int]] = {}
        """Dimensions of inputs of the model that have had several sizes: they are symbolic, also in
        the first call of another size."""
        self._traced = traced
        if traced is not None:
            self.backend.run_kept(traced)
            self._compiled |= traced.functions_of(module)

    def __call__(self, module: nn.Module, own: Forward | None, /, *args: Any, **kwargs: Any
                 ) -> Any:
        self.begin()
        return super().__call__(module, own, *args, **kwargs)

    def begin(self) -> None:
        """Tell that the model is called, whose blocks may run several times."""
        self.backend.runs.clear()

    def has_run_all(self, block: str) -> bool:
        """True if, since the model was called, a block has run as often as planned."""
        return bool(0 < self.backend.count_regions(block) <= self.backend.runs[block])

    def exchange(self, spec: RewriteSpec, regions: Sequence[int] | None = None) -> bool:
        """Run under another rewrite spec of the same graphs from the next call on, without tracing;
        return whether that is possible.  `regions`: as for the constructor."""
        is_of_blocks = regions is not None
        return (self.backend.is_exchangeable and is_exchangeable(spec)
                and bool(spec.blocks) == is_of_blocks
                and bool(self.backend.exchange(spec, regions)))

    def _compile(self) -> Callable[..., Any]:
        return compile_forward(self._name, self.backend,
                               dynamic=None if self._sizes_vary else False)

    @contextlib.contextmanager
    def _around_call(self, module: nn.Module, own: Forward | None, args: tuple[Any, ...],
                     kwargs: dict[str, Any]) -> Iterator[None]:
        tensors = input_tensors(module, own, args, kwargs) if self.varying else {}
        with (super()._around_call(module, own, args, kwargs),
              symbolic_dimensions([(tensor, sorted(self.varying.get(name, ())))
                                   for name, tensor in tensors.items()]),
              sizes_may_vary(True) if self._sizes_vary else nullcontext(),
              nullcontext() if self._is_compiled else varying_numbers(),
              nullcontext() if self._traced is None else
              mock.patch.object(self._traced, "backend", self.backend)):
            yield


def is_exchangeable(spec: RewriteSpec) -> bool:
    """True if code under this rewrite spec may run under another: AOTAutograd runs the graphs, and
    returns all outputs."""
    return (spec.backend == "eager" and spec.sizes is None
            and not any(region.elided for region in spec.regions))


def known_tensors(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
                  ) -> Mapping[int, torch.Tensor]:
    """The tensors that a module is called with and its buffers, by identity."""
    leaves = (*pytree.tree_leaves((args, kwargs)), *module.buffers())
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}


def _backend_of(model: nn.Module, spec: RewriteSpec, regions: Sequence[int] | None) -> PlanBackend:
    """Return the Dynamo backend that runs a rewrite spec's graphs, by default those of all regions.
    """
    if spec.backend == "inductor":
        from planner._apply.inductor import InductorBackend

        return InductorBackend(model, spec, regions)
    return PlanBackend(model, spec, regions)
