"""One plan for all ranks that request the same.

Model of the world: ranks exchange small values through the store of their process group, which
needs no simultaneous participation.  The first rank that needs a plan makes it and publishes its
JSON; the others with the same request (graph, sizes, budget) wait for it.  A rank with another step
makes another request, and waits for nobody.

So ranks run the same plan even if their solvers would find different ones, each plan is made once,
and if the rank that makes it stops, the others fail after the time-out of the group's store.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

from torch import distributed as dist
from torch import nn

from planner.errors import PlanMismatch, PlannerError
from planner.plans.file import dumps, loads
from planner.plans.plan import Plan
from planner.search.variants import Effort
from planner.step.prepared import PreparedStep

_PREFIX = "checkpoint-planner"
_FAILED = "no plan"
_met: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
_numbers = itertools.count()  # of models, in the order of first use


def agreed(make: Callable[[], Plan], prepared: PreparedStep, limit_bytes: int | None,
           effort: Effort, purpose: str = "") -> Plan:
    """The result of `make` for this step and limit, made by one rank of the process group, if there
    is one; `purpose`: distinguishes requests that are otherwise equal.

    Raises the errors of `make`, and `PlannerError` if the rank that makes the plan does not deliver
    it in time.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return make()
    from planner._graph_capture.torch_compat.process_group import default_store

    store, rank = default_store(), dist.get_rank()
    key = f"{_PREFIX}/{_question(prepared, limit_bytes, effort, purpose)}"
    if store.add(f"{key}/asked", 1) > 1:
        text = _wait(store, f"{key}/plan", f"{key}/maker")
        if text != _FAILED:
            return loads(text, name="the plan of another rank")  # which checks its fingerprint
        return make()  # which raises here, too
    store.set(f"{key}/maker", str(rank))
    try:
        plan = make()
    except BaseException:
        store.set(f"{key}/plan", _FAILED)
        raise
    store.set(f"{key}/plan", dumps(plan))
    return plan


def check_same_model(model: nn.Module, tensors: Sequence[object], ranks: Sequence[int]) -> None:
    """On first use of a model, check that all `ranks` train the same one, by its parameters and
    buffers.

    Raises `PlanMismatch` if they do not, and `PlannerError` if a rank does not answer in time.
    Assumes that all ranks use their models in the same order.
    """
    if len(ranks) < 2 or model in _met:
        return
    from planner._graph_capture.torch_compat.process_group import default_store

    store, key = default_store(), f"{_PREFIX}/models/{_hash(list(ranks))}/{next(_numbers)}"
    mine = json.dumps([str(each) for each in tensors])
    store.set(f"{key}/{dist.get_rank()}", mine)
    for rank in ranks:
        theirs = _wait(store, f"{key}/{rank}", None, rank)
        if theirs != mine:
            pairs = zip(json.loads(theirs), json.loads(mine), strict=False)
            first = next((f"{here} here, {there} there" for there, here in pairs if here != there),
                         f"{mine.count(',')} and {theirs.count(',')} tensors")
            raise PlanMismatch(f"rank {rank} trains another model than this one, and one plan is "
                               f"for all ranks; the first difference: {first}")
    _met[model] = None


def _wait(store: dist.Store, key: str, maker: str | None, rank: object = "?") -> str:
    try:
        store.wait([key])
    except Exception as error:  # depends on the store: a time-out, a closed connection
        if maker is not None and store.check([maker]):
            rank = store.get(maker).decode()
        limit = getattr(store, "timeout", None)
        within = "the group's time-out" if limit is None else f"{limit.total_seconds():.0f} s"
        raise PlannerError(
            f"rank {rank} has not given its part of planning within {within}: it may "
            "have stopped, or plan for longer than the group's time-out (timeout= of "
            "init_process_group)") from error
    text: str = store.get(key).decode()
    return text


def _question(prepared: PreparedStep, limit_bytes: int | None, effort: Effort, purpose: str) -> str:
    """Hash of everything that a plan depends on, except measured seconds."""
    ops = [[op.name, op.digest, op.inputs, op.outputs, op.workspace_bytes, op.replay_state_bytes]
           for variant in prepared.variants for op in variant.graph.ops]
    sizes = [buffer.size_bytes for variant in prepared.variants for buffer in variant.graph.buffers]
    budgets = [repr((variant.budget, variant.problem.link)) for variant in prepared.variants]
    others = [repr(getattr(prepared, each.name)) for each in fields(prepared)
              if each.name not in ("variants", "plain", "surroundings")]
    return _hash([ops, sizes, budgets, others, limit_bytes, effort.solver, purpose])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
