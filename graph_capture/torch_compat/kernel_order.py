"""Inductor's scheduler: in which order the kernels of a plan run.

Imported only where a step is planned for or run by Inductor, as `inductor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from graph_capture.torch_compat.requirements import require

require(__name__)

import torch
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from graph_capture.torch_compat.compilation import OpOverload

# Only with a pass of this class does Inductor cache.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


class KernelOrder(_SchedulerPass):
    """`torch._inductor.config._pre_fusion_custom_pass`: kernels of the backward keep to the plan.

    What the backward recomputes depends on no gradient, so that Inductor may fuse it with the first
    kernel of the backward, or run it then, and all recomputed values would be alive at once.  Here
    it gets an ordering dependency on the last call of an external kernel that does depend on a
    gradient and comes before it: kernels are not fused across those anyway.

    Random kernels of either graph get one on the random kernel before them: which numbers a kernel
    draws depends on how many were drawn before.

    `strict`: every kernel gets one on the last external kernel before it, and external kernels on
    all before them.  That takes less memory still, and more time: of two kernels that could be one,
    each then reads its operands.
    """

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._of_user = inductor_config._pre_fusion_custom_pass

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Add the dependencies to the scheduler's nodes, which are in the order of the graph; a
        pass that the user had set runs first."""
        return self._add_dependencies(self._of_user(nodes) if self._of_user else nodes)

    def _add_dependencies(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.virtualized import V

        _keep_order([node for node in nodes if _is_random(node) and node.get_buffer_names()])
        if V.graph.is_backward:
            self._hold_back(nodes)
        V.graph.scheduler.compute_ancestors()
        return nodes

    def _hold_back(self, nodes: list[Any]) -> None:
        from torch._inductor.virtualized import V

        dependent = {name for name in V.graph.graph_input_names if "tangents" in name}
        barrier = ""
        since: list[str] = []  # what was made behind it
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

    def uuid(self) -> tuple[object, ...] | None:
        """What the caches know it by; to be changed with the code above.  `None`, for no caching,
        where the user's pass is a mere function."""
        mine = ("checkpoint-planner: order of kernels 3", self._strict)
        if self._of_user is None:
            return mine
        if not isinstance(self._of_user, _SchedulerPass):
            return None
        return (*mine, self._of_user.uuid())


def _keep_order(nodes: Sequence[Any]) -> None:
    """Make scheduler nodes run in the order given."""
    for earlier, later in pairwise(nodes):
        _run_after(later, next(iter(earlier.get_buffer_names())))


def _run_after(node: Any, buffer: str) -> None:
    from torch._inductor.dependencies import WeakDep

    # An op's name in the place of a mutated buffer: the dependency is for order alone.
    node.add_fake_dep(WeakDep(buffer, node.get_name(), is_fake=True))


def _is_random(node: Any) -> bool:
    """Whether a scheduler node draws from one of torch's generators."""
    op = getattr(node.node, "op_overload", None)
    return (node.is_extern() and isinstance(op, OpOverload)
            and torch.Tag.nondeterministic_seeded in op.tags)
