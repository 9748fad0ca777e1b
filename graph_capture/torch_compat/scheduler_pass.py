"""Inductor's scheduler: the order of a plan's kernels.

Imported only if a step is planned for or run by Inductor, as `inductor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from planner._graph_capture.torch_compat.requirements import require

require(__name__)

import torch
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V

from planner._graph_capture.torch_compat.compilation import OpOverload

KERNEL_ORDER = "_pre_fusion_custom_pass"
"""Name of the setting in `torch._inductor.config` that takes a `KernelOrder`."""

# Inductor caches only with a pass of this class.
_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


class KernelOrder(_Pass):
    """Keeps the kernels of the backward in the order of the plan, before the scheduler fuses them.

    Recomputations in the backward depend on no gradient, so Inductor may fuse them with the first
    kernel of the backward, or run them then, and all recomputed values would be alive at once.
    This pass adds an ordering dependency on the last external kernel before them that depends on a
    gradient: kernels are not fused across those anyway.

    Random kernels of either graph get one on the previous random kernel, since the numbers that a
    kernel draws depend on earlier draws.

    `strict`: every kernel gets one on the last external kernel before it, and external kernels on
    all before them.  This uses less memory still, and more time: two kernels that could be one each
    read their operands.
    """

    def __init__(self, strict: bool = False) -> None:
        self._of_user = getattr(inductor_config, KERNEL_ORDER)
        self._strict = strict

    def uuid(self) -> tuple[object, ...] | None:
        """Key of this pass and the user's in the compilation caches; `None`, for no caching, if the
        user's is a plain function."""
        version = ("checkpoint-planner: order of kernels 3", self._strict)
        if self._of_user is None:
            return version
        return (*version, self._of_user.uuid()) if isinstance(self._of_user, _Pass) else None

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Add dependencies to the scheduler's nodes, which are in the order of execution; a pass
        that the user had set runs first."""
        nodes = self._of_user(nodes) if self._of_user else nodes
        _keep_order([node for node in nodes if _is_random(node) and node.get_buffer_names()])
        if V.graph.is_backward:
            self._hold_back(nodes)
        V.graph.scheduler.compute_ancestors()
        return nodes

    def _hold_back(self, nodes: list[Any]) -> None:
        dependent = {name for name in V.graph.graph_input_names if "tangents" in name}
        barrier = ""
        since: list[str] = []  # buffers made after the barrier
        for node in nodes:
            made = node.get_buffer_names()
            depends = any(dep.name in dependent for dep in node.read_writes.reads)
            if barrier and made and (self._strict or not depends):
                _run_after(node, barrier)
            if depends:
                dependent.update(made)
            if node.is_extern() and made and (self._strict or depends):
                for buffer in since:
                    _run_after(node, buffer)
                barrier, since = next(iter(made)), []
            elif self._strict:
                since.extend(made)


def _keep_order(nodes: Sequence[Any]) -> None:
    """Make scheduler nodes run in the given order."""
    for earlier, later in pairwise(nodes):
        _run_after(later, next(iter(earlier.get_buffer_names())))


def _run_after(node: Any, buffer: str) -> None:
    # An op's name in place of a mutated buffer: the dependency is for order alone.
    node.add_fake_dep(WeakDep(buffer, node.get_name(), is_fake=True))


def _is_random(node: Any) -> bool:
    """True if a scheduler node draws from one of torch's generators."""
    op = getattr(node.node, "op_overload", None)
    return (node.is_extern() and isinstance(op, OpOverload)
            and torch.Tag.nondeterministic_seeded in op.tags)
