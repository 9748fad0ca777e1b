"""The forward of a module whose training step runs planned graphs.

It stands in the instance, so that whoever calls the module meets it, and its hooks run around it as
they do around any forward.  It knows rewrite specs, tries those that may be for the call, and asks
for another where none is.  A copy and a pickle of the module take the rewrite specs along, and
compile anew. An outer `torch.compile` does not trace it: its graph breaks there, and the plan is
run.

Blind spots: where a rewrite spec has served calls of some kind before, and in another one does not
fit when a part of that has run, no other rewrite spec is tried, since random state and buffers may
have changed.  Hooks of the model that change its arguments have run when a rewrite spec is asked
for, and run again where that captures the model.
"""

from __future__ import annotations

import copyreg
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from planner._apply.blocks import Code, code_of, run_step
from planner._apply.call_signature import Call, differences
from planner._apply.errors import PlanMismatch
from planner._apply.rewrite_spec import RewriteSpec
from planner._apply.step_counts import StepCounts, reason_of_mode
from planner._graph_capture.foreign_calls import foreign_call
from planner._graph_capture.module_forward import Forward, ForwardOverride, in_place_of_forward
from planner._graph_capture.module_hooks import hooks_within

Replan = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], RewriteSpec]
"""Makes a rewrite spec for a model called with these positional and keyword arguments."""


class CountingForward(ForwardOverride):
    """A stand-in for the forward of a whole model, which counts its steps."""

    def __init__(self, module: nn.Module, inner: Forward | None) -> None:
        super().__init__(module, inner)
        self.steps = StepCounts()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "steps": StepCounts()}

    def is_foreign(self) -> bool:
        """Whether this call is no training step that a plan may serve, and runs as it is written;
        one with gradients is counted."""
        foreign = foreign_call()
        if foreign is None:
            return False
        if torch.is_grad_enabled() and not foreign.is_traced:
            self.steps.count(foreign.reason)
        return True

    def call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call of the forward beneath this one."""
        with in_place_of_forward(self.__self__, self.inner):
            return Call.of(self.__self__, args, kwargs)

    def explained(self, spec: RewriteSpec, error: PlanMismatch, call: Call) -> PlanMismatch:
        """The error with what differs from the rewrite spec's call signature in front."""
        words = differences(spec, self.__self__, call.signature)
        return PlanMismatch(f"{'; '.join(words)}: {error}") if words else error


class PlannedForward(CountingForward):
    """The planned forward of a model, which is compiled as one chunk or by blocks."""

    def __init__(self, module: nn.Module, inner: Forward | None, specs: Sequence[RewriteSpec],
                 replan: Replan | None) -> None:
        super().__init__(module, inner)
        self.specs = tuple(specs)
        """Those known; what `replan` made comes last."""
        self._replan = replan
        self._codes: dict[int, Code] = {}  # by number of the rewrite spec
        self._served: dict[Call, int] = {}  # the rewrite spec that such calls ran under
        self._is_first_step = True
        self._hooks: tuple[int, ...] = ()  # of the submodules, in the step before

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_codes": {}, "_served": {}, "_is_first_step": True}

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.__getstate__()
        if self._replan is not None and not can_be_pickled(self._replan):
            warnings.warn("the function that plans other inputs cannot be pickled: the loaded "
                          "model knows the present plans alone, and refuses a step that none of "
                          "them serves", stacklevel=2)
            state["_replan"] = None
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self.without_self(args)
        if self.is_foreign() or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        known = [number for number, spec in enumerate(self.specs)
                 if spec.training == self.__self__.training]
        if not known and self.specs and self._replan is None:
            self.steps.count(reason_of_mode(self.specs[0].training))
            return self.plain(*args, **kwargs)
        hooks = hooks_within(self.__self__)
        has_other_hooks = hooks != self._hooks and not self._is_first_step
        try:
            result = self._step(known, args, kwargs)
        except PlanMismatch as error:
            if not (self._is_first_step or has_other_hooks):
                raise
            hint = _FIRST_CALL_HINT if self._is_first_step else f". {_OTHER_HOOKS}"
            raise PlanMismatch(f"{error}{hint}") from None
        if has_other_hooks and any(spec.blocks for spec in self.specs):
            warnings.warn(f"{_OTHER_HOOKS}. Those of blocks run around the plan, and what they "
                          "allocate is not in it", stacklevel=2)
        self._is_first_step, self._hooks = False, hooks
        return result

    def _step(self, known: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(known) == 1 and self._replan is None:  # no choice, which a description would help
            number, = known
            try:
                return self._run(number, args, kwargs)
            except PlanMismatch as error:
                raise self.explained(
                    self.specs[number], error, self.call_of(args, kwargs)) from None
        module, call = self.__self__, self.call_of(args, kwargs)
        served = self._served.get(call)
        if served is not None:
            known = [served, *(number for number in known if number != served)]
        elif len(known) > 1:
            known = sorted(known, key=lambda number: len(
                differences(self.specs[number], module, call.signature)))
        refusals: list[tuple[int, PlanMismatch]] = []
        for number in known:
            # What does not fit may show when a part has run; then another is tried from the start.
            is_trial = number != served
            try:
                result = self._run(number, args, kwargs, is_trial=is_trial)
            except PlanMismatch as error:
                if self._codes[number].has_begun and not is_trial:
                    raise self.explained(self.specs[number], error, call) from None
                refusals.append((number, error))
            else:
                self._served[call] = number
                return result
        if self._replan is None:
            if not refusals:
                raise PlanMismatch("there is no plan for this model. Make one")
            number, refusal = refusals[0]
            raise self.explained(self.specs[number], refusal, call) from None
        # What is planned is the forward beneath this one, called as it is called here.
        with in_place_of_forward(module, self.inner):
            self.specs += (self._replan(module, args, kwargs),)
        result = self._run(len(self.specs) - 1, args, kwargs)
        self._served[call] = len(self.specs) - 1
        return result

    def _run(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], *,
             is_trial: bool = False) -> Any:
        module, spec = self.__self__, self.specs[number]
        if number not in self._codes:
            self._codes[number] = code_of(module, spec)
        code = self._codes[number]
        result = run_step(code, spec, module, self.inner, args, kwargs, is_trial=is_trial)
        self.steps.count(code.why_unplanned())
        return result


def can_be_pickled(value: object) -> bool:
    """Whether a pickle of the value can be made."""
    try:
        pickle.dumps(value)
    except Exception:  # whatever a `__reduce__` raises
        return False
    return True


_OTHER_HOOKS = ("Hooks of its submodules have come or gone since the step before: plan with the "
                "hooks in place, or call planner.within(model, ...), which plans anew")
# Models of transformers may install hooks then, which breaks the captured graph once.
_FIRST_CALL_HINT = ("; or, if the model sets something up in its first call, call it once before "
                    "the plan is applied")

