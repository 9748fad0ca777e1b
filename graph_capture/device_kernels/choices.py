"""Summary of the kernels of a captured step among which torch could choose."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from planner._graph_capture.device_kernels.attention import AttentionKernel
from planner._graph_capture.training_graph import KernelChoice, Phase, TrainingOp

_KERNELS = {
    f"aten._scaled_dot_product_{part}attention.default": f"attention by {kernel}"
    for part, kernel in (("flash_", AttentionKernel.FLASH),
                         ("efficient_", AttentionKernel.EFFICIENT),
                         ("cudnn_", AttentionKernel.CUDNN))}
"""Names of kernels by their op in a joint graph."""

_COMPOSED = f"attention by {AttentionKernel.MATH}"


def kernels_of(ops: Iterable[TrainingOp], rules: Mapping[str, Iterable[str]]
               ) -> tuple[KernelChoice, ...]:
    """The attention kernels of a step, by kernel and module pattern; `rules`: by kernel, the rules
    that chose it."""
    found = Counter((_KERNELS[op.target], re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", op.module))
                    for op in ops if op.phase is Phase.FORWARD and op.target in _KERNELS)
    chosen = [KernelChoice(kernel, modules, count, " | ".join(rules.get(kernel, ())))
              for (kernel, modules), count in found.items()]
    if _COMPOSED in rules:
        chosen.append(KernelChoice(_COMPOSED, "", 0, " | ".join(rules[_COMPOSED])))
    return tuple(chosen)
