"""Figures from the literature that the tables of this folder print beside the measured ones.

Overheads in percent of the cost of running every op once, at a budget that is a fraction of the
peak of the plain order.  Seconds are those of the authors' machines.

Sources: Checkmate: Jain et al., MLSys 2020 (arXiv:1910.02653), as rerun by the authors of MOCCASIN;
MOCCASIN: Bartan et al., ICML 2023 (arXiv:2304.14463), on 16 cores; FastSA: Yonetsu et al., NeurIPS
2023, which also reorders the ops.
"""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """One published result."""

    method: str
    overhead_percent: float
    seconds: str
    """Solving time as published; empty where it is not known."""

    def __str__(self) -> str:
        time = f" ({self.seconds} s)" if self.seconds else ""
        return f"{self.method} {self.overhead_percent:g}{time}"


PUBLISHED: dict[tuple[str, float], tuple[Figure, ...]] = {
    ("resnet50_b256", 0.9): (Figure("Checkmate", 0.1, "434-485"), Figure("MOCCASIN", 0.2, "65-69"),
                             Figure("FastSA", 0.2, "")),
    ("resnet50_b256", 0.8): (Figure("Checkmate", 0.3, "434-485"), Figure("MOCCASIN", 0.3, "65-69"),
                             Figure("FastSA", 0.4, "")),
    ("resnet50_b256", 0.7): (Figure("FastSA", 0.8, "11"),),
    ("random_layered_n100", 0.9): (Figure("MOCCASIN", 0.8, ""),),
    ("random_layered_n100", 0.8): (Figure("MOCCASIN", 2.3, ""),),
    ("random_layered_n100", 0.7): (Figure("FastSA", 2.2, ""),),
    ("random_layered_n500", 0.9): (Figure("MOCCASIN", 0.7, "1803"),),
    ("random_layered_n500", 0.8): (Figure("MOCCASIN", 3.4, "1803"),),
}
"""By instance (stem of its file) and budget."""
