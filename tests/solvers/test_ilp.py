"""The parts of the time-cut MILP: bounds that hold, schedules that realise what was chosen."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers import simulate, unroll
from planner.solvers.candidate_model import best_of_candidates, block_offers, offers_of, template
from planner.solvers.cut_model import CutModel
from planner.solvers.frontiers import narrow_frontiers, region_after
from planner.solvers.incremental import drop_recomputes
from planner.solvers.schedule_from_cuts import schedule_from_cuts
from tests.support.oracle_small import cheapest
from tests.support.oracles import evaluate, training_chain
from tests.support.strategies_small import problems, schedules

SECONDS = 10.0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_bound_holds_for_every_schedule_within_the_budget(data: st.DataObject) -> None:
    problem = data.draw(problems())
    known = data.draw(schedules(problem))
    peak, cost = simulate(problem, known)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(problem) - 1), min_size=1, max_size=4)))
    budget = peak + data.draw(st.integers(0, 3))
    solution = CutModel(problem, budget, tuple(cuts)).solve(SECONDS)
    assert solution.solved
    assert solution.retained is not None
    assert problem.keep_all_cost + solution.extra_bound <= cost + 1e-6


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_bound_with_every_cut_is_below_the_optimum(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=6).filter(
        lambda p: not any(op.replay_state_bytes for op in p.ops)))
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budget = data.draw(st.integers(plain // 2, plain))
    best = cheapest(problem, budget)
    solution = CutModel(problem, budget, problem.keep_all_schedule).solve(SECONDS)
    if best is not None:
        assert problem.keep_all_cost + solution.extra_bound <= best + 1e-6


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_choice_of_retained_storages_becomes_a_legal_schedule(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=10))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(problem) - 1), max_size=3)))
    storages = st.frozensets(st.integers(0, max(0, len(problem.storages) - 1)))
    schedule = schedule_from_cuts(problem, cuts, [data.draw(storages) for _ in cuts])
    assert evaluate(problem, schedule) is not None


def test_what_is_not_retained_is_recomputed_just_in_time() -> None:
    problem = training_chain(4)
    assert schedule_from_cuts(problem, (4,), [{1}]) == (0, 1, 2, 3, 4, 2, 5, 6, 0, 7)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_polish_saves_cost_and_keeps_to_the_budget(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=10))
    schedule = data.draw(schedules(problem))
    before = simulate(problem, schedule)
    budget = data.draw(st.integers(0, before.peak_bytes + 5))
    after = evaluate(problem, drop_recomputes(problem, budget, schedule))
    assert after is not None
    assert after[0] <= max(budget, before.peak_bytes)
    assert after[1] <= before.cost


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slots_find_the_best_part_of_a_template(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=7))
    whole = data.draw(schedules(problem, max_recomputations=3))
    other = data.draw(schedules(problem, max_recomputations=3))
    offered = template(problem, whole, offers_of(problem, [other]))
    peak, _ = simulate(problem, offered)
    budget = data.draw(st.integers(max(0, peak - 8), peak))
    found = best_of_candidates(
        problem, budget, offered, deadline=time.monotonic() + SECONDS
    ).schedule
    best = min((cost for held, cost in _parts(problem, offered) if held <= budget), default=None)
    if found is not None:
        held, cost = evaluate(problem, found)
        assert held <= budget
        assert best is not None and cost >= best
        # The model may refuse to take a buffer over, or hold replay state too long; else it is
        # exact up to the gap at which it stops.
        simple = not any(op.inplace or op.replay_state_bytes for op in problem.ops)
        if simple:
            assert cost <= best + 1e-3 * problem.keep_all_cost
    elif best is not None:
        assert any(op.inplace or op.replay_state_bytes for op in problem.ops)


def _parts(problem, offered):
    """Peak and cost of every schedule that drops some of the recomputations of another."""
    seen: set[int] = set()
    slots = []
    for position, op in enumerate(offered):
        if op in seen:
            slots.append(position)
        seen.add(op)
    for chosen in range(1 << len(slots)):
        out = {slot for bit, slot in enumerate(slots) if not chosen >> bit & 1}
        yield evaluate(problem, [op for p, op in enumerate(offered) if p not in out])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_template_keeps_the_order_of_its_base(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=8))
    base, other = (data.draw(schedules(problem, max_recomputations=5)) for _ in range(2))
    assert template(problem, base) == base
    offered = iter(template(problem, base, offers_of(problem, [other])))
    assert all(op in offered for op in base)  # as a subsequence


def test_blocks_offer_what_their_readers_need() -> None:
    problem = training_chain(6)
    pivot = unroll(problem, problem.keep_all_schedule).peak_position
    region = region_after(problem, pivot)
    offers = block_offers(problem, region, narrow_frontiers(problem, region, 2))
    simulate(problem, template(problem, problem.keep_all_schedule, offers))
    assert set().union(*offers.values()) >= set(region.ops) - {pivot}
