"""Code that `torch.compile` makes of a module's forward under a rewrite spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from planner._apply.errors import PlanMismatch
from planner._apply.plan_backend import Fallback, PlanBackend
from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.module_forward import Forward
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.torch_compat import (
    BackendCompilerFailed,
    compile_forward,
    compile_settings,
    sizes_as_they_are,
    uncompiled_operations,
)

DID_MORE_OUTSIDE = (
    "a part of the model that torch.compile does not capture (code under torch.compiler.disable, "
    "or code that torch gave up on) did more in this step than when it was planned; that part ran "
    "as it is written, and the step may have taken more than the budget. Let it do in the first "
    "step the most that it ever does, or take it out of the model")


class PlannedCode:
    """Compiled code of the model, or of blocks that share it, under one rewrite spec; raises
    `PlanMismatch` if the rewrite spec is for another graph."""

    def __init__(self, name: str, model: nn.Module, spec: RewriteSpec,
                 regions: Sequence[int] | None = None) -> None:
        """Create the code.  `regions`: those of the rewrite spec that may be met here, by default
        all."""
        self._name, self._backend = name, _backend_of(model, spec, regions)
        self._compiled: dict[tuple[bool, ...], Callable[..., Any]] = {}
        """By trainable parameters: torch 2.11 does not check again when these change."""
        self._donated_buffers = spec.backend == "inductor"
        self._has_several_regions = len(spec.regions if regions is None else regions) > 1
        self._operations_outside: int | None = None
        """Number of ops that autograd recorded outside of all regions in the first call; `None`
        before it."""
        self.did_more_outside = False
        """True if the last call recorded more ops outside than the first."""

    @property
    def has_begun(self) -> bool:
        """True if the last call has progressed so far that it cannot start over under another
        rewrite spec."""
        return self._backend.has_begun

    def fall_back(self, fallback: Fallback) -> None:
        """From now on, once a step has begun, run a region that is not the plan's by the result of
        `fallback`, with a warning, instead of ending the step with `PlanMismatch`."""
        self._backend.fallback = fallback

    def compare_with(self, earlier: object) -> None:
        """Use the ops outside of the regions of earlier code of the same graph as planned, instead
        of those of the first call."""
        if isinstance(earlier, PlannedCode):
            self._operations_outside = earlier._operations_outside

    @property
    def is_trial(self) -> bool:
        """True if a region that is not the plan's ends the call although others have run."""
        return self._backend.is_trial

    @is_trial.setter
    def is_trial(self, value: bool) -> None:
        self._backend.is_trial = value

    @property
    def compilations(self) -> int:
        """Number of graphs compiled so far."""
        return self._backend.compilations

    @property
    def planned_runs(self) -> int:
        """Number of regions of the plan that have run in the last call."""
        return self._backend.planned_runs

    def __call__(self, module: nn.Module, own: Forward | None, /, *args: Any, **kwargs: Any
                 ) -> Any:
        """Call the module.  `own`: the forward that the instance has; `None`: that of its class."""
        backend = self._backend
        backend.has_run = backend.has_begun = False
        backend.planned_runs, backend.running = 0, module
        trained = tuple(p.requires_grad for p in module.parameters())
        if trained not in self._compiled:
            self._compiled[trained] = compile_forward(self._name, backend)
        with (compile_settings(donated_buffers=self._donated_buffers),
              sizes_as_they_are((args, kwargs))):
            try:
                output = self._compiled[trained](module, own, *args, **kwargs)
            except BackendCompilerFailed as error:
                if isinstance(error.inner_exception, PlanMismatch):
                    raise error.inner_exception from None
                raise
            finally:
                backend.running = None
        outside = uncompiled_operations(output_tensors(output), (args, kwargs),
                                        behind_regions=self._has_several_regions)
        if self._operations_outside is None:
            self._operations_outside = outside
        self.did_more_outside = outside > self._operations_outside
        if self.did_more_outside and self.is_trial:
            raise PlanMismatch(DID_MORE_OUTSIDE)
        return output

    def why_unplanned(self) -> str | None:
        """Reason why the last successful call ran without the plan; `None` if it ran under it."""
        if not self._backend.has_run:
            return ("torch.compile ran this step as it is written, without the plan: it gave up on "
                    "the model's code, or a dispatch mode is active. If the model sets something "
                    "up in its first call, call it once before the plan is applied")
        if not self.planned_runs:
            return "nothing that was captured of this step needed a gradient"
        if self.did_more_outside:
            return DID_MORE_OUTSIDE
        return None


def _backend_of(model: nn.Module, spec: RewriteSpec, regions: Sequence[int] | None) -> PlanBackend:
    """Return the Dynamo backend that runs a rewrite spec's graphs, by default those of all regions.
    """
    if spec.backend == "inductor":
        from planner._apply.inductor import InductorBackend

        return InductorBackend(model, spec, regions)
    return PlanBackend(model, spec, regions)
