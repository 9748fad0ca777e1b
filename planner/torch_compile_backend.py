"""`torch.compile(model, backend="checkpoint_planner", options={"budget_gb": 8})`.

A Dynamo backend, registered by the entry point `torch_dynamo_backends`.  A model that is one graph
is planned as in `planner.captured_graph`.  After a graph break, this backend gets one graph at a
time and cannot keep one budget over all of them: the graphs of the first step run under the
schedules with the lowest peaks, and from the second step on the model is trained as by
`planner.within`, which plans them together.

Blind spots: the model of a broken graph is found only if it was compiled itself
(`torch.compile(model)`, `model.compile()`); each graph of a compiled function is planned as if it
were alone, with a warning.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import fx, nn

from planner._graph_capture.module_forward import hooks_within
from planner.arguments.planning import PlanArguments, Planning
from planner.attached.within import attach_in_step, is_within, settings_of
from planner.captured_graph import DynamoGraph, Options, with_least_memory

log = logging.getLogger("planner.torch_compile_backend")

_SAID_BY_THE_GRAPH = frozenset({"loss_fn", "backend", "device", "accumulation", "regions",
                                "autocast", "dynamic"})
"""Arguments of `planner.plan` that are not options: Dynamo's graph has one loss, device and region
and no other micro-batch, and is captured under the caller's autocast."""


def checkpoint_planner(module: fx.GraphModule, example_inputs: Sequence[Any], *,
                       options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The Dynamo backend: return a function that plans the first step of `module` and runs the
    plan.

    `options`: see `Options`.  The first call raises `InfeasibleBudget` with the smallest feasible
    budget if nothing fits, and `CaptureError` if the step cannot be captured.

    Raises `TypeError` for an unknown option.
    """
    chosen = read_options(options or {})
    if not torch.is_grad_enabled():
        return _without_plan(module, example_inputs, chosen)
    planned: Callable[..., Any] = torch.compiler.disable(_GraphOfModel(module, chosen))
    return planned


def read_options(options: Mapping[str, Any]) -> Options:
    """The options by name; raises `TypeError` for an unknown one."""
    own = [field.name for field in fields(Options)
           if field.name not in ("arguments", "takes_least")]
    known = own + [field.name for field in fields(Planning)
                   if field.name not in _SAID_BY_THE_GRAPH]
    for name in options:
        if name not in known:
            raise TypeError(f"the backend checkpoint_planner has no option {name!r}; "
                            f"known: {', '.join(known)}")
    arguments: Any = {name: value for name, value in options.items() if name not in own}
    return Options(**{name: options[name] for name in own if name in options},
                   arguments=arguments)


def _without_plan(module: fx.GraphModule, example_inputs: Sequence[Any],
                  options: Options) -> Callable[..., Any]:
    if not options.inductor:
        run: Callable[..., Any] = module
        return run
    from planner._graph_capture.torch_compat import lookup_backend

    compiled: Callable[..., Any] = lookup_backend("inductor")(module, list(example_inputs))
    return compiled


class _GraphOfModel(DynamoGraph):
    """A captured graph that may be one of several of a model."""

    def __init__(self, module: fx.GraphModule, options: Options) -> None:
        super().__init__(module, options)
        self._least = with_least_memory(module)
        self._why_broken = _why_broken(module)
        model = _compiled_model()
        self._model = None if model is None else ref(model)
        self._hooks = None if model is None else hooks_within(model)

    def __call__(self, *args: Any) -> Any:
        model = None if self._model is None else self._model()
        if model is not None and self._hooks not in (None, hooks_within(model)):
            self._hooks = None
            warnings.warn(_OTHER_HOOKS, stacklevel=2)
        return super().__call__(*args)

    def _first_call(self, key: tuple[object, ...], args: tuple[Any, ...]) -> Any:
        model = _compiled_model()
        if model is None or not (self._why_broken or is_within(model)):
            if self._why_broken:
                log.warning("torch.compile broke the code into several graphs (%s); each is "
                            "planned as if it were alone, so the budget, or a percentage, is one "
                            "of each and not of their sum; planner.within(model, ...), or a "
                            "torch.compile of the model itself, plans them together",
                            self._why_broken)
            return super()._first_call(key, args)
        if not is_within(model):
            log.info("torch.compile broke the model into several graphs (%s): in this step each "
                     "runs under the schedule that takes least; from the next on they are planned "
                     "together, as by planner.within", self._why_broken)
            options = self._options
            arguments: PlanArguments = {
                **options.arguments, "backend": "inductor" if options.inductor else "eager"}
            arguments.pop("hold_output", None)  # it is seen
            attach_in_step(model, settings_of(
                options.budget, options.budget_gb, "replan", None, arguments))
        return self._least(*args)


_OTHER_HOOKS = (
    "hooks of submodules have come or gone since torch.compile captured the model, and it runs "
    "without looking at them: call torch._dynamo.reset(), or set "
    "torch._dynamo.config.skip_nnmodule_hook_guards = False before the first step")


def _why_broken(module: fx.GraphModule) -> str:
    """Reason of the graph break at the end of the graph; empty if there was none."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    return str(getattr(reason, "reason", "")).splitlines()[0] or "a graph break"


def _compiled_model() -> nn.Module | None:
    """The innermost compiled model that is being called."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Read the locals of no other frame: reading them may make a frame keep them.
        if frame.f_code.co_name == "_wrapped_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(original := getattr(module, "_orig_mod", None), nn.Module):
                return original
            if isinstance(module, nn.Module) and module._compiled_call_impl is not None:
                return module
        frame = frame.f_back
    return None
