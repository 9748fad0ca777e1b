"""The report: sums that agree with the plan, and repeated layers in one row."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from planner._graph_capture.training_graph import OptimizerMemory
from planner.plans.decisions import Decision
from planner.reporters.table import Totals, layer_rows
from planner.search.planning import Effort, plan_within
from planner.sizes.frontier import trace_frontier
from planner.units import format_bytes, format_flops
from tests.support.graphs import HandMadeStep, chain, prepared


def decision(module, *, recomputations=0, flops=5, saved=10, plain=10):
    return Decision(op=f"{module}/aten.op#0", module=module,
                    action="recompute" if recomputations else "keep",
                    recomputations=recomputations, flops=flops, saved_bytes=saved,
                    plain_saved_bytes=plain)


def test_alike_layers_become_one_row_and_others_their_own():
    rows = layer_rows([
        decision("wte"),
        *(decision(f"h.{n}.{part}", recomputations=int(n == 5 and part == "mlp"))
          for n in range(8) for part in ("attn", "mlp")),
        decision("lm_head")])
    assert [(row.module, row.count) for row in rows] == [
        ("wte", 1), ("h.0-7.attn", 8), ("h.0-4,6-7.mlp", 7), ("h.5.mlp", 1), ("lm_head", 1)]
    assert rows[1].totals == Totals(8, 0, 80, 80, 0)


def test_numbers_at_two_depths_fold_together():
    rows = layer_rows([decision(f"layers.{n}.experts.{m}.up") for n in range(4) for m in range(3)])
    assert [(row.module, row.count, row.totals.ops) for row in rows] == [
        ("layers.0-3.experts.0-2.up", 12, 12)]


def test_the_root_has_a_row_too():
    assert [row.module for row in layer_rows([decision(""), decision("a")])] == ["", "a"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.builds(
    decision, st.from_regex(r"[ab](\.[0-9])?(\.[xyz])?(\.[0-9])?", fullmatch=True),
    recomputations=st.integers(0, 2), saved=st.integers(0, 9), plain=st.integers(0, 9)),
                max_size=60))
def test_no_op_or_byte_is_lost_in_folding(decisions):
    total = Totals()
    for row in layer_rows(decisions):
        total += row.totals
    assert total.ops == len(decisions)
    assert total.saved_bytes == sum(row.saved_bytes for row in decisions)
    assert total.freed_bytes == sum(r.plain_saved_bytes - r.saved_bytes for r in decisions)
    assert total.recompute_flops == sum(row.flops * row.recomputations for row in decisions)
    assert sum(row.count for row in layer_rows(decisions)) >= (1 if decisions else 0)


def test_many_different_modules_are_summed_at_a_smaller_depth():
    rows = layer_rows([decision(f"part{n}.{name}", saved=13 * n + len(name))
                       for n in range(20) for name in ("a", "bb", "ccc")])
    assert len(rows) == 20 and rows[3].module == "part3" and rows[3].totals.ops == 3


def test_the_table_shows_what_a_person_acts_on():
    step = HandMadeStep(chain(12), 2600, OptimizerMemory("adamw", 300, 20))
    plan = plan_within(prepared(step), 2300)
    text = str(plan)
    for needle in ("2,300", f"{plan.peak_bytes:,}", "2,600", f"{100 * plan.overhead:.2f}%",
                   "adamw", "gradients", "net.layers.", "optimal", "solver"):
        assert needle in text, needle
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "no optimizer" not in text
    assert "no optimizer" in str(plan_within(prepared(HandMadeStep(chain(3), 2600)), None))


def test_notes_of_the_capture_are_shown():
    graph = replace(chain(3), notes=("the cache was switched off",))
    assert "note: the cache was switched off" in str(
        plan_within(prepared(HandMadeStep(graph, 2600)), None))


def test_the_frontier_is_monotone_and_none_of_its_plans_is_dominated():
    ready = prepared(HandMadeStep(chain(9), 2600))
    curve = trace_frontier(ready, 8, Effort(time_limit=1.0))
    plans = list(curve)
    assert len(plans) == len(curve) >= 3
    assert plans[0].overhead == 0 and plans[0].peak_bytes == ready.keep_all_peak_bytes
    for cheap, small in pairwise(plans):
        assert cheap.overhead < small.overhead and cheap.peak_bytes > small.peak_bytes
    points = curve.to_dict()["points"]
    assert [point["peak_bytes"] for point in points] == [plan.peak_bytes for plan in plans]
    assert f"{plans[-1].peak_bytes:,}" in str(curve)


def test_the_frontier_is_drawn(tmp_path):
    curve = trace_frontier(prepared(HandMadeStep(chain(6), 2600)), 4, Effort(time_limit=0.5))
    curve.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_are_decimal_with_three_digits():
    assert [format_bytes(size) for size in (0, 999, 1000, 999_499, 999_500, 8_123_456_789)] == [
        "0 B", "999 B", "1.00 kB", "999 kB", "1.00 MB", "8.12 GB"]
    assert format_bytes(-2_500_000) == "-2.50 MB"
    assert format_flops(12_345_678_901_234) == "12.3 TFLOP"


def test_a_notebook_gets_the_text_too(monkeypatch):
    plan = plan_within(prepared(HandMadeStep(chain(3), 2600)), None)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "predicted peak" in str(plan)
