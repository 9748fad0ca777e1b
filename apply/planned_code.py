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
    `PlanMismatch` where the rewrite spec is for another graph."""

    def __init__(self, name: str, model: nn.Module, spec: RewriteSpec,
                 regions: Sequence[int] | None = None) -> None:
        """`regions`: those of the rewrite spec that may be met here, by default all."""
        self._name, self._backend = name, _backend_of(model, spec, regions)
        self._compiled: dict[tuple[bool, ...], Callable[..., Any]] = {}
        """By which parameters are trained: torch 2.11 does not look again where that changes."""
        self._donated_buffers = spec.backend == "inductor"
        self._has_several_regions = len(spec.regions if regions is None else regions) > 1
        self._operations_outside: int | None = None
        """What autograd recorded outside of all regions in the first call; `None`: there was none.
        """
        self.did_more_outside = False
        """Whether it recorded more there in the last call."""

    @property
    def has_begun(self) -> bool:
        """Whether the last call has got so far that it cannot begin anew under another rewrite
        spec."""
        return self._backend.has_begun

    def fall_back(self, fallback: Fallback) -> None:
        """In a step that has begun, a region that is not the plan's is from now on run by what
        `fallback` makes of it, with a warning, instead of ending the step with `PlanMismatch`."""
        self._backend.fallback = fallback

    def compare_with(self, earlier: object) -> None:
        """Take what ran outside of the regions of earlier code of the same graph for what was
        planned, instead of what does in the first call."""
        if isinstance(earlier, PlannedCode):
            self._operations_outside = earlier._operations_outside

    @property
    def is_trial(self) -> bool:
        """Whether a region that is not the plan's ends the call though others have run."""
        return self._backend.is_trial

    @is_trial.setter
    def is_trial(self, value: bool) -> None:
        self._backend.is_trial = value

    @property
    def compilations(self) -> int:
        """Graphs that were compiled so far."""
        return self._backend.compilations

    @property
    def planned_runs(self) -> int:
        """Regions of the plan that have run in the last call."""
        return self._backend.planned_runs

    def __call__(self, module: nn.Module, own: Forward | None, /, *args: Any, **kwargs: Any
                 ) -> Any:
        """`own`: the forward that the instance has, `None`: that of its class."""
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
        """Why the last call, which went well, did not run under the plan; `None` where it did."""
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
    """The Dynamo backend that runs a rewrite spec's graphs, by default those of all regions."""
    if spec.backend == "inductor":
        from planner._apply.inductor import InductorBackend

        return InductorBackend(model, spec, regions)
    return PlanBackend(model, spec, regions)
