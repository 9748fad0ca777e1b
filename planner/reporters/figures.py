"""Figures drawn with matplotlib, which is imported on first use."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.units import BYTES_PER_UNIT, format_bytes, format_fraction

if TYPE_CHECKING:
    from planner.plans.plan import Plan


def draw_frontier(plans: Iterable[Plan], path: str | PathLike[str]) -> None:
    """Draw extra time over peak memory, found and proven, with the plain step for comparison."""
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


_COLORS = {"parameters": "#4c5b70", "buffers": "#77869b", "inputs": "#a3afbf",
           "optimizer": "#c9d1db", "gradients": "#3f8f6b", "activations": "#4a86c5",
           "temporaries": "#e2a03f"}
"""Resident memory in greys, at the bottom of the stack; then transient memory."""
_OPTIMIZER_SHARE = 0.06
"""Width of the optimizer's step, as a fraction of forward and backward; its timeline is not
known."""


def draw_plan(plan: Plan, path: str | PathLike[str]) -> None:
    """Draw a plan's memory timeline by category, that of the plain step, and the budget."""
    memory_timeline = plan.memory_timeline
    figure, axes = new_figure()
    figure.set_size_inches(9, 5)
    unit, scale = _unit(max(plan.peak_bytes, plan.baseline_peak_bytes))
    count = len(memory_timeline.activations)
    moments = [*range(count + 1)]
    rows = {name: [plan.memory[name]] * (count + 1)
            for name in ("parameters", "buffers", "inputs", "optimizer")}
    for name in ("gradients", "activations", "temporaries"):
        sizes = getattr(memory_timeline, name)
        rows[name] = [*sizes, sizes[-1]]
    end = count
    if plan.optimizer is not None:
        end += max(1, round(_OPTIMIZER_SHARE * count))
        moments += [count, end]
        rows["temporaries"][-1] = 0
        held = {**{name: row[-1] for name, row in rows.items()},
                "temporaries": plan.optimizer.step_peak_bytes}
        # Gradients of earlier micro-batches have been added to the new ones.
        held["gradients"] += plan.optimizer_step_peak_bytes - sum(held.values())
        for name, row in rows.items():
            row += [held[name]] * 2
        axes.axvline(count, color="black", linewidth=0.8, linestyle=":")
    shown = [name for name in _COLORS if any(rows[name])]
    axes.stackplot(moments, *([size / scale for size in rows[name]] for name in shown),
                   labels=shown, colors=[_COLORS[name] for name in shown], linewidth=0,
                   step="post")
    plain, turn = memory_timeline.plain, memory_timeline.backward_begins
    if plain.whole_bytes:
        # The timelines are aligned at the start, the begin of the backward, and the end.
        places = [*_spread(0, turn, plain.backward_begins),
                  *_spread(turn, count, len(plain.whole_bytes) - plain.backward_begins)]
        axes.plot(places, [size / scale for size in plain.whole_bytes], color="black",
                  linewidth=1.1, drawstyle="steps-post", label="plain step")
    if plan.budget_bytes is not None:
        axes.axhline(plan.budget_bytes / scale, color="#c0392b", linewidth=1.2, linestyle="--",
                     label="budget")
    axes.axvline(turn, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.08 * max(plan.peak_bytes, plan.baseline_peak_bytes,
                                plan.budget_bytes or 0) / scale)
    axes.set_xticks([turn / 2, (turn + count) / 2, *([(count + end) / 2] if end > count else [])],
                    ["forward and loss", "backward", *(["optimizer"] if end > count else [])])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(f"memory ({unit})")
    axes.set_title(
        f"Peak {format_bytes(plan.peak_bytes)}, of the plain step "
        f"{format_bytes(plan.baseline_peak_bytes)}; extra time {format_fraction(plan.overhead)}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    # In the order of the stack, the highest first.
    order = [*range(len(shown), len(labels)), *reversed(range(len(shown)))]
    figure.legend([handles[place] for place in order], [labels[place] for place in order],
                  loc="outside right upper", frameon=False)
    figure.savefig(path)


def _spread(first: float, last: float, count: int) -> list[float]:
    """`count` evenly spaced positions from `first`, excluding `last`."""
    return [first + (last - first) * place / max(count, 1) for place in range(count)]


def check_format(path: Path) -> None:
    """Raise `ImportError` if matplotlib is missing, and `ValueError` if it cannot write this
    format."""
    new_figure()
    from matplotlib.backend_bases import FigureCanvasBase

    known, ending = FigureCanvasBase.get_supported_filetypes(), path.suffix[1:].lower()
    if ending and ending not in known:
        raise ValueError(f"{path}: a figure cannot be written as .{ending}; known: "
                         f"{', '.join(known)}")


def new_figure(panels: int = 1) -> tuple[Any, Any]:
    """A new figure, independent of the process's drawing backend.

    Raises `ImportError` with the install command if matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("drawing needs matplotlib: "
                          'pip install "checkpoint-planner[plot]"') from missing
    figure = Figure(figsize=(4 + 3 * panels, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels)


def _unit(highest_bytes: int) -> tuple[str, int]:
    """A readable axis unit for sizes up to `highest_bytes`, and its bytes."""
    unit = next((name for name in ("TB", "GB", "MB") if highest_bytes >= BYTES_PER_UNIT[name]),
                "kB")
    return unit, BYTES_PER_UNIT[unit]
