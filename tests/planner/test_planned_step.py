"""A planned step as blocks: at each run, what the simulator says."""

from hypothesis import given, settings
from hypothesis import strategies as st

from planner._graph_capture.training_graph import Category
from planner.solvers.simulator import unroll
from planner.step.breakdown import memory_over
from planner.step.lowering import lower
from planner.step.planned_micro_batch import planned_micro_batch
from tests.support.graphs import legal_schedule, steps


def labels(graph):
    return {buffer.label for buffer in graph.buffers if buffer.label}


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_every_run_takes_what_the_simulator_says(step, data):
    problem = lower(step.graph)
    timeline = unroll(problem, legal_schedule(data, problem))
    made = planned_micro_batch(step.graph, timeline, labels(step.graph))
    trace, levels = made.trace, made.trace.levels()
    starts = [run.event for run in trace.runs] + [len(trace.events)]
    assert len(trace.runs) == len(timeline.schedule)
    for position, size in enumerate(timeline.memory_bytes):
        assert max(levels[starts[position]:starts[position + 1] + 1]) == size
    assert trace.peak_bytes == timeline.peak_bytes
    first = timeline.memory_bytes.index(timeline.peak_bytes)
    alive = trace.alive_after(levels.index(trace.peak_bytes))
    assert {k.value: v for k, v in trace.by_category(alive).items() if v} == {
        kind: row[first] for kind, row in memory_over(step.graph, timeline).items() if row[first]}


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_what_is_left_at_the_end_is_what_is_kept(step, data):
    graph, problem = step.graph, lower(step.graph)
    timeline = unroll(problem, legal_schedule(data, problem))
    made = planned_micro_batch(graph, timeline, labels(graph))
    left = set(made.trace.alive_after(len(made.trace.events)))
    groups = (set(made.gradients), made.output_blocks, made.loss_blocks, made.left_blocks)
    assert left == set().union(*groups) and len(left) == sum(map(len, groups))
    assert made.trace.levels()[-1] == sum(b.size_bytes for b in graph.buffers if b.kept_to_end)
    assert made.loss_begins <= made.backward_begins <= len(made.trace.events)

    before = frozenset(labels(graph))
    again = planned_micro_batch(graph, timeline, before, before)
    assert not again.gradients
    kept = sum(b.size_bytes for b in graph.buffers if b.kept_to_end
               and not (b.kind is Category.GRADIENTS and b.label in before))
    assert again.trace.levels()[-1] == kept
    assert {block.category for block in again.trace.blocks} <= set(Category)
