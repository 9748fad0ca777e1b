"""Frontiers: what crosses, and which of them bound the blocks of a network."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers import Problem, unroll
from planner.solvers.frontiers import Frontier, frontiers, narrow_frontiers, region_after, waists
from tests.support.strategies_small import problems
from tests.support.synthetic_gpt import gpt


@settings(max_examples=80, deadline=None)
@given(problem=problems(max_ops=10), data=st.data())
def test_a_frontier_is_what_the_ops_behind_it_need(problem: Problem, data: st.DataObject) -> None:
    region = region_after(problem, data.draw(st.integers(0, len(problem) - 1)))
    for frontier in frontiers(problem, region):
        before = {s for op in region.ops if op < frontier.position
                  for s in problem.ops[op].outputs}
        after = {s for op in region.ops if op >= frontier.position for s in problem.ops[op].inputs}
        assert frontier.storages == (before & after) - region.forced
        assert frontier.size_bytes == sum(
            problem.storages[s].size_bytes for s in frontier.storages)


def test_the_waists_of_a_transformer_lie_between_its_additions() -> None:
    layers = 5
    problem = gpt(layers)
    region = region_after(problem, unroll(problem, problem.keep_all_schedule).peak_position)
    found = waists(narrow_frontiers(problem, region, len(problem)))
    sizes = {problem.ops[f.position].name.split(".")[-1]: f.size_bytes for f in found}
    assert len(found) >= 2 * layers
    assert max(sizes.values()) <= 2.5 * min(sizes.values())


def test_a_frontier_between_much_narrower_ones_is_no_waist() -> None:
    chain = [Frontier(i, frozenset(), size) for i, size in enumerate((10, 50, 12, 20, 110, 40))]
    assert [f.position for f in waists(chain)] == [0, 2, 3, 5]
