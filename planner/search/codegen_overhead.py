"""Estimate the codegen overhead of a schedule: memory of its generated code minus the scheduling
problem's breakdown, which counts ops where Inductor generates kernels."""

from __future__ import annotations

from collections.abc import Sequence

_USUALLY, _UNSURE = 0.004, 0.015
"""Assumed fraction of the budget until some code was traced (Llama of 12 layers -0.7 to -0.1%, Swin
-1.9 to -1%), and if counted workspace depends on layouts that Inductor chooses (ConvNeXt 1.5%)."""
_MOST = 0.05
"""Upper estimate as a fraction of the budget, if there is time for one try only (Swin at 30%, on
its way to the least, 4.6%)."""
_MORE = 0.02
"""Fraction of the budget by which it may exceed that of traced schedules."""
_NEAR_DEFAULT = 0.75
"""Above this fraction of the memory of Inductor's default, a plan is similar enough to have the
same overhead (at 80% Llama -1.6 and -1.7% of it, ConvNeXt -9.5 and -10.1%)."""
MARGIN = 0.004
"""The next proposal stays below the budget by this fraction: code with other decisions has a
slightly different overhead (Swin 0.4%)."""


class CodegenOverhead:
    """Codegen overhead observed in one search; mutable, since it learns."""

    def __init__(self, default_bytes: int) -> None:
        """`default_bytes`: the breakdown of Inductor's default."""
        self._default_bytes = default_bytes
        self.default_code: int | None = None
        """Memory of the default's code, if it was traced."""
        self.of_whole: dict[bool, int] = {}
        """Overhead of a whole step that did not fit, by `kernel_order`."""

    def expected(self, net_bytes: int, is_unsure: bool = False) -> tuple[int, int]:
        """Expected overhead for a budget of `net_bytes`, and the error tolerated for a try.

        `is_unsure`: True if Inductor's layouts decide on counted workspace.
        """
        usual = int((_UNSURE if is_unsure else _USUALLY) * net_bytes)
        if self.default_code is None:
            return usual, usual // 2
        by_default = self.default_code - self._default_bytes
        if net_bytes > _NEAR_DEFAULT * self._default_bytes:
            return by_default + int(MARGIN * net_bytes), usual // 2
        return max(usual, by_default), usual // 2


def at_most(net_bytes: int, of_tries: Sequence[int] = ()) -> int:
    """Overhead that code for a budget of `net_bytes` is very unlikely to exceed; `of_tries`: that
    of other tries."""
    return max(0, *of_tries) + int(_MORE * net_bytes) if of_tries else int(_MOST * net_bytes)
