"""The applied model: the user's module, whose training step runs the planned graphs.

A planned forward is an attribute of the instance (`apply.planned_forward`).  `torch.compile`
captures the model's own forward again, now with its real tensors; AOTAutograd keeps aliasing, input
mutation and tied weights right; the backend in `plan_backend` replaces captured graphs by the
plan's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn

from planner._apply.blocks import check_blocks
from planner._apply.call_signature import tensor_keys
from planner._apply.errors import PlanMismatch
from planner._apply.planned_forward import PlannedForward, Replan
from planner._apply.rewrite_spec import ParameterKey, RewriteSpec
from planner._graph_capture.module_forward import (
    ForwardOverride,
    own_forward,
    rebound,
    set_forward,
    take_down,
)

__all__ = ["Replan", "apply_spec", "attach", "detach"]


def apply_spec(
    model: nn.Module, spec: RewriteSpec, *, replan: Replan | None = None,
) -> nn.Module:
    """Return a module that trains as `model` does, with the rewrite spec's recomputations; see
    `attach`.

    Raises `PlanMismatch`, here if parameters or buffers differ from those of the plan, and in the
    first training step if the captured graph does (and there is no `replan`).
    """
    _check_tensors(model, spec.tensors)
    return attach(model, (spec,), replan=replan, in_place=False)


def attach(model: nn.Module, specs: Sequence[RewriteSpec] = (), *, replan: Replan | None = None,
           in_place: bool) -> nn.Module:
    """Return a module that trains as `model` does, each step under one of the rewrite specs.

    In place, it is `model` itself, until `detach`.  Otherwise it is another module of the same
    class, which shares every submodule, parameter and buffer with `model` (which itself stays as it
    was); blocks that are compiled one by one have their planned forwards while the model runs.
    Both have the `state_dict` keys of `model`.  Without gradients it runs the plain forward.
    Without `replan`, it also does so in the other of train and eval mode than that of the rewrite
    specs.

    A step with inputs of another size runs a rewrite spec if its graph is the same except for sizes
    and no tensor is larger than planned.  For a step that no rewrite spec serves, `replan` is
    called with the model and the arguments; its result is then tried like the others.  Rewrite
    specs that were attached before are dropped.

    Raises `PlanMismatch` if the model lacks the blocks of a rewrite spec; a step raises it if no
    rewrite spec serves it (and there is no `replan`).
    """
    for spec in specs:
        check_blocks(model, spec)
    if in_place:
        take_down(model)
    attached = model if in_place else _copy(model)
    set_forward(attached, PlannedForward(attached, own_forward(attached), specs, replan))
    return attached


def detach(model: nn.Module) -> None:
    """Undo `attach`; the model then runs unchanged."""
    take_down(model)


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
    set_forward(copied, rebound(own_forward(module), module, copied))
    return copied


def _check_tensors(model: nn.Module, expected: Sequence[ParameterKey]) -> None:
    found = tensor_keys(model)
    for have, want in zip(found, expected, strict=False):
        if have != want:
            raise PlanMismatch(
                "the plan was made for another model; the first difference: the plan has "
                f"{_describe_tensor(want)}, this model has {_describe_tensor(have)}. "
                "Make a plan for this model")
    if len(found) != len(expected):
        longer, side = ((found, "this model") if len(found) > len(expected)
                        else (expected, "the plan"))
        extra = longer[min(len(found), len(expected))]
        raise PlanMismatch(
            "the plan was made for another model; the first difference: only "
            f"{side} has {_describe_tensor(extra)}. Make a plan for this model")


def _describe_tensor(key: ParameterKey) -> str:
    frozen = "" if key.requires_grad else ", frozen"
    return f"{key.name} ({key.dtype}{list(key.shape)}{frozen})"
