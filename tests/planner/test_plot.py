"""The picture of a plan: what it shows is what was predicted, and its file holds all of it."""

import sys

import pytest

import planner
from planner.reporters import figures
from planner.search.planning import plan_within
from tests.support.command_line import run
from tests.support.graphs import HandMadeStep, chain, prepared
from tests.support.models import BUILDERS


@pytest.fixture(scope="module")
def plan():
    case = BUILDERS["gpt2"](layers=2)
    return planner.plan(case.model, case.inputs, budget="85%", optimizer="adamw", accumulation=2,
                        time_limit=5)


def whole(plan):
    """Memory of the whole step at each moment of forward and backward."""
    fixed = sum(plan.memory[name] for name in ("parameters", "buffers", "inputs", "optimizer"))
    rows = (
        plan.memory_timeline.gradients,
        plan.memory_timeline.activations,
        plan.memory_timeline.temporaries,
    )
    return [fixed + sum(row) for row in zip(*rows, strict=True)]


def test_the_course_peaks_where_the_plan_and_the_plain_step_do(plan):
    assert max(whole(plan)) == plan.forward_backward_peak_bytes <= plan.budget_bytes
    assert max(plan.memory_timeline.plain.whole_bytes) == plan.baseline_peak_bytes
    assert 0 < plan.memory_timeline.backward_begins < len(plan.memory_timeline.activations)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_it_is_drawn_from_the_file(plan, tmp_path, ending, monkeypatch):
    plan.save(tmp_path / "plan.json")
    assert planner.load(tmp_path / "plan.json") == plan
    drawn = {}
    new_figure = figures.new_figure
    monkeypatch.setattr(figures, "new_figure", lambda: drawn.setdefault("figure", new_figure()))
    path = tmp_path / f"step.{ending}"
    assert "predicted peak" in run("show", tmp_path / "plan.json", "--plot", path).stdout
    assert path.stat().st_size > 5000
    figure, axes = drawn["figure"]
    plain, budget = (line.get_ydata() for line in axes.lines if line.get_label() in (
        "plain step", "budget"))
    assert max(plain) * 1e6 == pytest.approx(plan.baseline_peak_bytes)
    assert max(budget) * 1e6 == pytest.approx(plan.budget_bytes)
    top = max(path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths())
    assert top * 1e6 == pytest.approx(plan.peak_bytes)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[:2] == ["plain step", "budget"] and {"gradients", "optimizer"} < {*names}


def test_a_plan_without_a_budget_or_an_optimizer_is_drawn(tmp_path):
    for budget in (None, 1900):
        plan_within(prepared(HandMadeStep(chain(12), 2600)), budget).plot(tmp_path / "step.svg")
        assert ("budget" in (tmp_path / "step.svg").read_text()) == (budget is not None)


def test_what_cannot_be_drawn_is_told(plan, tmp_path, monkeypatch):
    plan.save(tmp_path / "plan.json")
    assert "missing" in run("show", tmp_path / "plan.json", "--plot",
                            tmp_path / "missing" / "step.png", code=1).stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "checkpoint-planner\[plot\]"'):
        plan.plot(tmp_path / "step.png")


@pytest.mark.slow
def test_the_course_of_a_compiled_step():
    case = BUILDERS["language_model"](layers=1)
    plan = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, backend="inductor",
                        time_limit=5)
    assert max(whole(plan)) == plan.peak_bytes
    assert 0 < plan.memory_timeline.backward_begins < len(plan.memory_timeline.activations)
