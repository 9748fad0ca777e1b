"""A schedule of a step that Inductor compiles, and what its code takes."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from apply.recipe import Recipe
from solvers.problem import Schedule

if TYPE_CHECKING:
    from graph_capture.inductor.compiled_step import CompiledStep


@dataclass(frozen=True)
class Candidate:
    """A schedule and what its compiled step takes."""

    schedule: Schedule
    recipe: Recipe
    step: CompiledStep
    cost: float

    @property
    def peak_bytes(self) -> int:
        """What the compiled step takes at most, above what is resident."""
        return self.step.peak_bytes


peak_bytes_of = attrgetter("peak_bytes")
