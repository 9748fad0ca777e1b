"""Figures, through matplotlib, which is imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

from planner.units import BYTES_PER_UNIT

if TYPE_CHECKING:
    from planner.plans.plan import Plan
    from planner.plans.timeline import StepTimeline


def draw_frontier(plans: Iterable[Plan], path: str | PathLike[str]) -> None:
    """Extra time over peak memory, found and proven, with the plain step for comparison."""
    figure, axes = new_figure()
    points = sorted(plans, key=lambda plan: plan.peak_bytes)
    unit, scale = _unit(points[0].baseline_peak_bytes)
    sizes = [plan.peak_bytes / scale for plan in points]
    axes.plot(sizes, [100 * plan.overhead for plan in points], marker="o", label="found")
    axes.plot(sizes, [100 * plan.overhead_bound for plan in points], linestyle=":",
              label="proven lower bound")
    axes.axvline(points[0].baseline_peak_bytes / scale, color="grey", linestyle="--",
                 label="plain step")
    axes.set_xlabel(f"peak memory of the step ({unit})")
    axes.set_ylabel("extra time (%)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def draw_timeline(timelines: dict[str, StepTimeline], path: str | PathLike[str]) -> None:
    """Memory over the runs of the step, one panel for each timeline, stacked by category."""
    figure, panels = new_figure(len(timelines))
    highest = max(timeline.peak_bytes for timeline in timelines.values())
    unit, scale = _unit(highest)
    for axes, (title, timeline) in zip(panels if len(timelines) > 1 else [panels],
                                       timelines.items(), strict=True):
        runs = range(len(timeline))
        layers = {name: [size / scale for size in sizes]
                  for name, sizes in timeline.by_category().items() if any(sizes)}
        axes.stackplot(runs, *layers.values(), labels=list(layers), step="mid", linewidth=0)
        axes.set_title(title)
        axes.set_xlabel("runs of ops")
        axes.set_ylim(0, 1.05 * highest / scale)
        if timeline.backward_begins is not None:
            axes.axvline(timeline.backward_begins, color="black", linewidth=0.8, linestyle="--")
    (panels[0] if len(timelines) > 1 else panels).set_ylabel(f"memory ({unit})")
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path)


def new_figure(panels: int = 1) -> tuple[Any, Any]:
    """A figure of its own, whatever backend the process draws with.

    Raises `ImportError` with the command to install matplotlib where it is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("drawing needs matplotlib: "
                          'pip install "checkpoint-planner[plot]"') from missing
    figure = Figure(figsize=(4 + 3 * panels, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    return figure, axes


def _unit(highest_bytes: int) -> tuple[str, int]:
    """The unit, and its bytes, in which sizes up to `highest_bytes` read well on an axis."""
    unit = next((name for name in ("TB", "GB", "MB") if highest_bytes >= BYTES_PER_UNIT[name]),
                "kB")
    return unit, BYTES_PER_UNIT[unit]
