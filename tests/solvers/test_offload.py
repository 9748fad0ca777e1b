"""Storing results on the host: the breakdown of memory and time against a judge written from the
rules, and the joint search against all schedules of tiny problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers import (
    Action,
    Fetch,
    IllegalSchedule,
    InfeasibleBudget,
    Link,
    Problem,
    Release,
    Storage,
    Store,
    simulate,
    solve,
    unroll,
)
from planner.solvers.offload import relaxed, with_transfers
from tests.support.offloading import random_transfers
from tests.support.oracle_small import cheapest
from tests.support.oracles import evaluate, training_chain
from tests.support.problems import without_replay_state
from tests.support.strategies_small import problems, schedules

_Actions = tuple[Action | int, ...]


def linked(problem: Problem, rate: float, start: float = 0.0) -> Problem:
    """The problem with a link, and everything that may move allowed to."""
    return replace(problem, link=Link(rate, start), storages=tuple(
        replace(storage, offloadable=not storage.kept_to_end) for storage in problem.storages))


@st.composite
def moved(draw: st.DrawFn) -> tuple[Problem, _Actions]:
    """A problem with a link and a schedule of it with transfers."""
    problem = linked(draw(problems(max_ops=8)), draw(st.sampled_from([0.5, 1.0, 3.0])),
                     draw(st.sampled_from([0.0, 0.5])))
    schedule = draw(schedules(problem, max_recomputations=3))
    return problem, random_transfers(problem, schedule, draw(st.integers(0, 9)), 0.7)


def clocks(problem: Problem, schedule: _Actions) -> float:
    """When the last op ends: every event by its causes, from the rules, with nothing carried along
    but the times of the events themselves."""
    link = problem.link
    assert link is not None
    end: list[float] = []  # of what the stream of ops is given, position by position

    def copied(position: int) -> float:
        """When the copy that begins at a position ends."""
        kind = type(schedule[position])
        others = [p for p in range(position) if type(schedule[p]) is kind]
        action = schedule[position]
        assert not isinstance(action, int)
        begin = max(end[position - 1] if position else 0.0, copied(others[-1]) if others else 0.0)
        size = problem.storages[action.storage].size_bytes
        return begin + link.start_cost + size / link.bytes_per_cost

    for position, action in enumerate(schedule):
        before = end[-1] if end else 0.0
        if isinstance(action, int):
            waits = [before]
            for storage in problem.ops[action].inputs:
                made = [p for p in range(position) if schedule[p] == Fetch(storage)
                        or schedule[p] == problem.storages[storage].producer]
                if isinstance(schedule[made[-1]], Fetch):
                    waits.append(copied(made[-1]))
            end.append(max(waits) + problem.ops[action].cost)
        elif isinstance(action, Release):
            end.append(max(before, copied(schedule.index(Store(action.storage)))))
        else:
            end.append(before)
    return end[-1]


def memory_of(problem: Problem, schedule: _Actions) -> list[int]:
    """Memory at each position, storage by storage."""
    runs = [action if isinstance(action, int) else None for action in schedule]
    timeline = unroll(problem, schedule)
    memory = [0 if run is None else problem.ops[run].workspace_bytes for run in runs]
    for index, storage in enumerate(problem.storages):
        births = [p for p, action in enumerate(schedule)
                  if action == storage.producer or action == Fetch(index)]
        reads = [p for p, run in enumerate(runs)
                 if run is not None and index in problem.ops[run].inputs]
        stored = next((p for p, action in enumerate(schedule) if action == Store(index)), None)
        released = next((p for p, action in enumerate(schedule) if action == Release(index)), -1)
        for which, birth in enumerate(births):
            until = births[which + 1] if which + 1 < len(births) else len(runs)
            end = max([birth, *(p for p in reads if birth < p < until)])
            if stored is not None and birth < stored < until:
                end = max(end, released)
            if storage.kept_to_end:
                end = len(runs) - 1 if which == 0 else birth
            for position in range(birth, end + 1):
                memory[position] += storage.size_bytes
            taker = runs[end]
            if birth < end and taker is not None and timeline.inplace_of[end] == index:
                assert index in problem.ops[taker].inplace and not storage.kept_to_end
                assert timeline.segments[birth] == timeline.segments[end]
                memory[end] -= storage.size_bytes
    for op, described in enumerate(problem.ops):
        positions = [p for p, run in enumerate(runs) if run == op]
        if len(positions) > 1:
            for position in range(positions[0], positions[-1] + 1):
                memory[position] += described.replay_state_bytes
    return memory


@settings(max_examples=80, deadline=None)
@given(moved())
def test_memory_and_time_are_those_of_the_rules(case: tuple[Problem, _Actions]) -> None:
    problem, schedule = case
    timeline = unroll(problem, schedule)
    assert timeline.memory_bytes == tuple(memory_of(problem, schedule))
    assert timeline.cost == pytest.approx(clocks(problem, schedule))
    assert timeline.waiting_cost == pytest.approx(
        timeline.cost - sum(problem.ops[op].cost for _, op in timeline.runs))


@settings(max_examples=60, deadline=None)
@given(moved())
def test_without_its_transfers_a_schedule_is_one_of_the_relaxation(
        case: tuple[Problem, _Actions]) -> None:
    problem, schedule = case
    order = tuple(action for action in schedule if isinstance(action, int))
    found = evaluate(relaxed(problem), order)
    assert found is not None
    peak, cost = simulate(problem, schedule)
    assert found[0] <= peak and found[1] <= cost + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_transfers_of_an_order_change_neither_its_runs_nor_make_it_worse(
        data: st.DataObject) -> None:
    problem = linked(data.draw(problems(max_ops=9)), 1.0)
    order = data.draw(schedules(problem, max_recomputations=3))
    plain, _ = simulate(problem, order)
    budget = data.draw(st.integers(0, plain))
    found = with_transfers(problem, order, budget)
    assert tuple(action for action in found if isinstance(action, int)) == order
    assert simulate(problem, found).peak_bytes <= plain


def test_a_chain_by_hand() -> None:
    problem = linked(training_chain(3), 0.5)  # a copy takes two units
    timeline = unroll(problem, (0, Store(0), 1, Release(0), 2, 3, Fetch(0), 4, 5))
    assert timeline.memory_bytes == (1, 1, 2, 2, 2, 3, 3, 4, 3)
    assert timeline.waiting_cost == 1.0 + 1.0  # each copy takes two units and has one op beside it
    assert timeline.offloaded == (0,)
    late = unroll(problem, (0, Store(0), 1, Release(0), 2, 3, 4, Fetch(0), 5))
    assert late.waiting_cost == 1.0 + 2.0 and late.peak_bytes == 3


@pytest.mark.parametrize(("schedule", "message"), [
    ((0, Store(0), Store(0), 1, 2, Release(0), 3, 4, 5), "stored twice"),
    ((0, Store(0), 1, 2, 3, Release(0), 4, 5), "began in this segment"),
    ((0, Store(0), 1, 2, 3, 4, 5), "never released"),
    ((0, 1, 2, 3, 4, Fetch(0), 5), "before it was stored"),
    ((Store(0), 0, Release(0), 1, 2, 3, 4, 5), "must not move it"),
    ((0, 1, 2, 3, Store(9), 4, 5), "must not move it"),
])
def test_transfers_against_a_rule_are_refused(schedule: _Actions, message: str) -> None:
    with pytest.raises(IllegalSchedule, match=message):
        simulate(linked(training_chain(3), 1.0), schedule)


def test_only_what_may_be_stored_is_and_only_by_a_link() -> None:
    problem = linked(training_chain(3), 1.0)
    schedule = (0, Store(0), 1, Release(0), 2, 3, 4, Fetch(0), 5)
    simulate(problem, schedule)
    for refused in (replace(problem, link=None),
                    replace(problem, storages=tuple(map(_stays, problem.storages)))):
        with pytest.raises(IllegalSchedule, match="must not move it"):
            simulate(refused, schedule)
    with pytest.raises(ValueError, match="kept to the end and cannot be offloadable"):
        replace(problem, storages=(Storage(1, 0, True, True), *problem.storages[1:]))
    with pytest.raises(ValueError, match="finite rate > 0"):
        replace(problem, link=Link(0.0))


def _stays(storage: Storage) -> Storage:
    return replace(storage, offloadable=False)


def everything(problem: Problem, budget: int) -> Iterator[float]:
    """The costs of all schedules of a tiny problem within the budget that run each op at most twice
    and move each storage at most once, fetched once."""

    def extend(prefix: _Actions, expected: int) -> Iterator[_Actions]:
        if expected == len(problem):
            yield prefix
        options: list[Action | int] = [expected] if expected < len(problem) else []
        options += [op for op in range(expected) if prefix.count(op) < 2
                    and expected < len(problem) and problem.may_replay(op, expected)]
        for storage in range(len(problem.storages)):
            if expected < len(problem) and problem.may_transfer(storage, expected):
                options += [action for action in (Store(storage), Release(storage), Fetch(storage))
                            if action not in prefix]
        for action in options:
            after = (*prefix, action)
            if legal_so_far(after):
                yield from extend(after, expected + (action == expected))

    def legal_so_far(prefix: _Actions) -> bool:
        for position, action in enumerate(prefix):
            before = prefix[:position]
            if isinstance(action, Release) and Store(action.storage) not in before:
                return False
            if isinstance(action, Fetch) and Release(action.storage) not in before:
                return False
        return True

    for schedule in extend((), 0):
        try:
            peak, cost = simulate(problem, schedule)
        except IllegalSchedule:
            continue
        if peak <= budget:
            yield cost


@pytest.mark.parametrize("rate", [
    0.5, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.25, 1.0, 4.0))])
def test_no_schedule_is_cheaper_than_the_bound_and_the_search_finds_the_best(rate: float) -> None:
    problem = training_chain(3)
    problem = replace(linked(problem, rate), storages=tuple(
        replace(storage, offloadable=index == 0) for index, storage in enumerate(problem.storages)))
    best = min(everything(problem, 3))
    result = solve(problem, 3, time_limit=5.0)
    assert result.lower_bound <= best + 1e-9
    assert result.cost == pytest.approx(best)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_it_is_never_worse_than_recomputation_alone_nor_better_than_its_bound(
        data: st.DataObject) -> None:
    alone = without_replay_state(data.draw(problems(max_ops=6)))
    problem = linked(alone, data.draw(st.sampled_from([0.2, 1.0, 5.0])))
    peak, _ = simulate(problem, problem.keep_all_schedule)
    budget = data.draw(st.integers(peak // 2, peak))
    least, free = cheapest(alone, budget), cheapest(relaxed(problem), budget)
    try:
        result = solve(problem, budget, time_limit=1.0)
    except InfeasibleBudget:  # where an op must run again for another to take its place over
        with pytest.raises(InfeasibleBudget):
            solve(alone, budget, time_limit=1.0)
        return
    assert result.peak_bytes <= budget
    if least is not None:  # recomputation alone fits too
        assert result.cost <= least + 1e-6
    assert free is not None and result.lower_bound <= free + 1e-6 <= result.cost + 2e-6


@pytest.mark.slow
def test_a_refusal_names_a_budget_that_is_met() -> None:
    problem = linked(training_chain(12), 0.5)
    with pytest.raises(InfeasibleBudget) as refused:
        solve(problem, 1, time_limit=2.0)
    least = refused.value.minimum_bytes
    assert least <= 3
    assert solve(problem, least, time_limit=2.0).peak_bytes == least


def test_results_without_a_link_are_what_they_were() -> None:
    problem = training_chain(8)
    plain = solve(problem, 6, time_limit=5.0)
    movable = replace(problem, storages=tuple(
        replace(storage, offloadable=True) for storage in problem.storages))
    again = solve(movable, 6, time_limit=5.0)
    assert again.schedule == plain.schedule and again.cost == plain.cost


def test_where_the_link_is_fast_enough_nothing_runs_again() -> None:
    problem = linked(training_chain(12), 4.0)
    assert solve(replace(problem, link=None), 9, time_limit=5.0).overhead > 0
    result = solve(problem, 9, time_limit=5.0)
    assert result.overhead == 0 and result.status == "optimal"
    assert solve(problem, 9, time_limit=5.0, warm_start=result.schedule).cost == result.cost
