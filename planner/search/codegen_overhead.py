"""What the code of a schedule takes beside the breakdown of the scheduling problem, as it is
expected before the code is there: the problem sees ops, and Inductor makes kernels of them."""

from __future__ import annotations

from collections.abc import Sequence

_USUALLY, _UNSURE = 0.004, 0.015
"""Part of the budget that code is taken to need, until some was followed (Llama of 12 layers -0.7
to -0.1%, Swin -1.9 to -1%), and where the workspace that is accounted for depends on layouts that
Inductor decides on (ConvNeXt 1.5%)."""
_MOST = 0.05
"""Part of the budget that code needs at most, where there is time for one try (Swin at 30%, on its
way to the least, 4.6%)."""
_MORE = 0.02
"""Part of the budget by which that may be more than for schedules that were followed."""
_NEAR_DEFAULT = 0.75
"""Part of what Inductor takes by itself from which on a plan is enough like that to take as much
beside the breakdown (at 80% Llama -1.6 and -1.7% of it, ConvNeXt -9.5 and -10.1%)."""
MARGIN = 0.004
"""Part of the budget by which the next proposal is to stay below it: code that decides otherwise
takes a little more or less beside the breakdown (Swin 0.4%)."""


class CodegenOverhead:
    """What is known of that for one search; mutable, since it learns."""

    def __init__(self, default_bytes: int) -> None:
        """`default_bytes`: the breakdown of what Inductor does by itself."""
        self._default_bytes = default_bytes
        self.default_code: int | None = None
        """What the code of that takes, if it was followed."""
        self.of_whole: dict[bool, int] = {}
        """What a whole step that did not fit took beside the breakdown, by the order of kernels."""

    def expected(self, net_bytes: int, is_unsure: bool = False) -> tuple[int, int]:
        """Bytes for a budget of `net_bytes`, and how far they may be off for a try.  `is_unsure`:
        whether Inductor decides on a workspace that is accounted for."""
        usual = int((_UNSURE if is_unsure else _USUALLY) * net_bytes)
        if self.default_code is None:
            return usual, usual // 2
        by_default = self.default_code - self._default_bytes
        if net_bytes > _NEAR_DEFAULT * self._default_bytes:
            return by_default + int(MARGIN * net_bytes), usual // 2
        return max(usual, by_default), usual // 2


def at_most(net_bytes: int, of_tries: Sequence[int] = ()) -> int:
    """Bytes that code for a budget of `net_bytes` is very likely not to exceed, by what that of
    other tries took."""
    return max(0, *of_tries) + int(_MORE * net_bytes) if of_tries else int(_MOST * net_bytes)
