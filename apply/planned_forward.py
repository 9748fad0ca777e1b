"""The forward of a module whose training step runs planned graphs.

It is an attribute of the instance, so every caller of the module reaches it, and its hooks run
around it as around any forward.  It knows rewrite specs, tries those that may fit the call, and
asks for another if none does.  A copy and a pickle of the module include the rewrite specs, and
compile again.  An outer `torch.compile` does not trace it: its graph breaks there, and the plan
runs.

Blind spots: a rewrite spec that has served calls of some kind may not fit another such call, after
a part of it has run.  No other rewrite spec is tried then, since random state and buffers may have
changed.  Hooks of the model that change its arguments have run before a rewrite spec is requested,
and run again if that captures the model.
"""

from __future__ import annotations

import copy
import copyreg
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from planner._apply.blocks import Code, check_blocks, code_of, run_step
from planner._apply.call_signature import Call, differences, tensor_keys
from planner._apply.errors import PlanMismatch
from planner._apply.planned_code import is_exchangeable
from planner._apply.rewrite_spec import ParameterKey, RewriteSpec
from planner._graph_capture.dynamo.traced_code import keep_code, take_code
from planner._graph_capture.foreign_calls import foreign_call
from planner._graph_capture.module_forward import (
    Forward,
    ForwardOverride,
    hooks_within,
    in_place_of_forward,
    own_forward,
    rebound,
    set_forward,
)

Replan = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], RewriteSpec]
"""Makes a rewrite spec for a model called with these positional and keyword arguments."""


@dataclass(slots=True)
class StepCounts:
    """Counts of the steps of one model.  A step is a call with gradients enabled; the first one
    that does not run under the plan for some reason warns of it."""

    planned: int = 0
    """Steps that ran under a plan."""
    unplanned: int = 0
    """Steps that ran unchanged."""
    last_reason: str | None = None
    """Reason why the last unplanned step did not run under the plan; `None`: there was none."""
    _warned: set[str] = field(default_factory=set, repr=False)

    def count(self, reason: str | None) -> None:
        """Count a step; `reason`: why it did not run under the plan, `None` if it did."""
        if reason is None:
            self.planned += 1
            return
        self.unplanned += 1
        self.last_reason = reason
        self.warn(reason)

    def warn(self, words: str) -> None:
        """Warn, once."""
        if words not in self._warned:
            self._warned.add(words)
            warnings.warn(words, stacklevel=3)


class CountingForward(ForwardOverride):
    """A forward override of a whole model that counts its steps."""

    def __init__(self, module: nn.Module, inner: Forward | None) -> None:
        super().__init__(module, inner)
        self.steps = StepCounts()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "steps": StepCounts()}

    def is_foreign(self) -> bool:
        """Return whether this call is no training step that a plan may serve, and runs unchanged;
        one with gradients is counted."""
        foreign = foreign_call()
        if foreign is None:
            return False
        if torch.is_grad_enabled() and not foreign.is_traced:
            self.steps.count(foreign.reason)
        return True

    def call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Describe a call of the forward beneath this one."""
        return Call.of(self.__self__, self.inner, args, kwargs)

    def explained(self, spec: RewriteSpec, error: PlanMismatch, call: Call) -> PlanMismatch:
        """Return the error with the differences from the rewrite spec's call signature in front."""
        words = differences(spec, self.__self__, call.signature)
        return PlanMismatch(f"{'; '.join(words)}: {error}") if words else error


class PlannedForward(CountingForward):
    """The planned forward of a model, which is compiled as a whole or by blocks."""

    def __init__(self, module: nn.Module, inner: Forward | None, spec: RewriteSpec,
                 replan: Replan | None) -> None:
        super().__init__(module, inner)
        self.specs: tuple[RewriteSpec, ...] = (spec,)
        """Known rewrite specs; results of `replan` come last."""
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
        if not known and self._replan is None:
            planned, now = ("train", "eval") if self.specs[0].training else ("eval", "train")
            self.steps.count(f"the plan was made in {planned} mode; this step in {now} mode runs "
                             "without it")
            return self.plain(*args, **kwargs)
        hooks = hooks_within(self.__self__)
        has_other_hooks = hooks != self._hooks and not self._is_first_step
        try:
            try:
                result = self._step(known, args, kwargs)
            except PlanMismatch:
                # A model may register hooks in its first call; the plan is for later ones.
                before, hooks = hooks, hooks_within(self.__self__)
                if hooks == before or any(code.has_begun for code in self._codes.values()):
                    raise
                self._codes.clear()
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
        if len(known) == 1 and self._replan is None:  # without a choice, no description is needed
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
            # A mismatch may show when a part has run; then another one is tried from the start.
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
            number, refusal = refusals[0]
            raise self.explained(self.specs[number], refusal, call) from None
        # The plan is for the forward beneath this one, called as it is called here.
        with in_place_of_forward(module, self.inner):
            self.specs += (self._replan(module, args, kwargs),)
        result = self._run(len(self.specs) - 1, args, kwargs)
        self._served[call] = len(self.specs) - 1
        return result

    def _run(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], *,
             is_trial: bool = False) -> Any:
        module, spec = self.__self__, self.specs[number]
        if number not in self._codes:
            self._codes[number] = self._code_of(spec)
        code = self._codes[number]
        result = run_step(code, spec, module, self.inner, args, kwargs, is_trial=is_trial)
        self.steps.count(code.why_unplanned())
        return result

    def _code_of(self, spec: RewriteSpec) -> Code:
        traced = take_code(self.__self__)
        if (traced is not None and is_exchangeable(spec)
                and bool(traced.blocks) == bool(spec.blocks)):
            with suppress(PlanMismatch):  # it is that of another plan
                return code_of(self.__self__, spec, may_exchange=True, traced=traced)
        return code_of(self.__self__, spec)


def apply_spec(
    model: nn.Module, spec: RewriteSpec, *, replan: Replan | None = None,
) -> nn.Module:
    """Return a module that trains as `model` does, with the rewrite spec's recomputations.

    It is another module of the same class, which shares every submodule, parameter and buffer with
    `model` (which itself stays as it was) and has its `state_dict` keys; blocks that are compiled
    one by one have their planned forwards while the model runs.  Without gradients it runs the
    plain forward; without `replan` also in the other of train and eval mode than that of the spec.

    A step with inputs of another size runs the rewrite spec if its graph is the same except for
    sizes and no tensor is larger than planned.  For any other step `replan` is called with the
    model and the arguments; its result is then tried like the others.

    Raises `PlanMismatch`, here if parameters, buffers or blocks differ from those of the plan, and
    in a training step that no rewrite spec serves (where there is no `replan`).
    """
    _check_tensors(model, spec.tensors)
    check_blocks(model, spec)
    applied = _copy(model)
    set_forward(applied, PlannedForward(applied, own_forward(applied), spec, replan))
    keep_code(applied, take_code(model))
    return applied


def _copy(model: nn.Module) -> nn.Module:
    """Return a shallow copy of a model, which shares everything except modules with a forward
    override, and their parents."""
    copies = {"": _shallow(model)}

    def copy_of(path: str) -> nn.Module:
        if path not in copies:
            outer, _, name = path.rpartition(".")
            parent = copy_of(outer)
            copies[path] = _shallow(getattr(parent, name))
            parent.__dict__["_modules"] = {**parent._modules, name: copies[path]}
        return copies[path]

    for path, module in model.named_modules():
        if isinstance(vars(module).get("forward"), ForwardOverride):
            copy_of(path)
    return copies[""]


def _shallow(module: nn.Module) -> nn.Module:
    try:
        copied = copy.copy(module)
    except Exception as error:  # A wrapper has replaced its class by one that cannot be copied.
        raise TypeError(
            f"cannot make another {type(module).__name__} that shares everything with the model "
            f"({type(error).__name__}: {error}); apply the plan before the model is wrapped, as by "
            "fully_shard, and wrap what plan.apply returns, or, in place, "
            "planner.within(model, plan=plan)") from error
    set_forward(copied, rebound(own_forward(module), {id(module): copied}))
    return copied


def _check_tensors(model: nn.Module, expected: Sequence[ParameterKey]) -> None:
    for want, have in zip_longest(expected, tensor_keys(model)):
        if want == have:
            continue
        words = (f"only this model has {_describe_tensor(have)}" if want is None else
                 f"only the plan has {_describe_tensor(want)}" if have is None else
                 f"the plan has {_describe_tensor(want)}, this model has {_describe_tensor(have)}")
        raise PlanMismatch(f"the plan was made for another model; the first difference: {words}. "
                           "Make a plan for this model")


def _describe_tensor(key: ParameterKey) -> str:
    frozen = "" if key.requires_grad else ", frozen"
    return f"{key.name} ({key.dtype}{list(key.shape)}{frozen})"


def can_be_pickled(value: object) -> bool:
    """Return whether the value can be pickled."""
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
