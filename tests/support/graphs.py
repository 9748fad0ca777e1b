"""Training graphs made by hand and at random, for tests that need no torch.

`chain` is the textbook network: layers in a row, each backward reading its layer's input.  `steps`
draws small graphs with skips, pinned ops, several regions, a loss, workspace and replay state.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass

from hypothesis import strategies as st

from planner._apply.rewrite_spec import ParameterKey
from planner._graph_capture.training_graph import (
    Buffer,
    Category,
    OptimizerMemory,
    Phase,
    Region,
    ResidentMemory,
    StepVariant,
    TrainingGraph,
    TrainingOp,
)
from planner.step.prepared import PreparedStep, prepare


@dataclass(frozen=True)
class Baseline:
    """The captured data of the plain step."""

    peak_bytes: int
    """Peak above resident memory."""
    backward_begins: int = 1

    @property
    def memory_timeline(self) -> tuple[int, ...]:
        """Memory up to the peak, and down again."""
        return (self.peak_bytes // 2, self.peak_bytes, 0)


@dataclass(frozen=True)
class HandMadeStep:
    """The input of the planner, as from capture."""

    graph: TrainingGraph
    baseline_peak_bytes: int
    """Peak of the whole plain step."""
    optimizer: OptimizerMemory | None = None
    training: bool = True
    overrides: tuple[tuple[str, object], ...] = (("use_cache", False),)
    compiled: None = None
    holds_output: bool = True

    @property
    def variants(self) -> tuple[StepVariant, ...]:
        return (StepVariant(self.graph),)

    @property
    def baseline(self) -> Baseline:
        state = 0 if self.optimizer is None else self.optimizer.state_bytes
        return Baseline(self.baseline_peak_bytes - sum(astuple(self.graph.resident)) - state)


def prepared(step: HandMadeStep) -> PreparedStep:
    """Return the step, ready to be planned."""
    return prepare(step, tensors=(ParameterKey("weight", (2, 3), "float32", True),),
                   inputs={"args": [{"shape": [2, 3], "dtype": "float32"}], "kwargs": {}})


class GraphBuilder:
    """Adds ops one by one; every op makes its own buffers."""

    def __init__(self) -> None:
        self.ops: list[TrainingOp] = []
        self.buffers: list[Buffer] = []

    def op(self, name: str, phase: Phase, inputs: tuple[int, ...], sizes: tuple[int, ...], *,
           region: int = 0, seconds: float = 1.0, flops: int = 10, workspace_bytes: int = 0,
           pinned: str = "", replay_state_bytes: int = 0, kept: bool = False, label: str = "",
           kind: Category | None = None, inplace: tuple[int, ...] = (),
           captured: bool = True) -> tuple[int, ...]:
        """Add an op; return its outputs, one for each of `sizes` (bytes).  An op that was not
        captured is a pseudo-op."""
        index = len(self.ops)
        outputs = tuple(range(len(self.buffers), len(self.buffers) + len(sizes)))
        if kind is None:
            kind = Category.TEMPORARIES if phase is Phase.BACKWARD else Category.ACTIVATIONS
        if label:
            kind = Category.GRADIENTS
        self.buffers.extend(Buffer(size, index, kind, kept, label) for size in sizes)
        module = name.rsplit("/", 1)[0] if "/" in name else ""
        self.ops.append(TrainingOp(
            name=name, target="aten.fake.default", module=module.lstrip("~"), source="net.py:1",
            phase=phase, region=region, inputs=inputs, outputs=outputs, flops=flops,
            seconds=float(seconds), workspace_bytes=workspace_bytes, inplace=inplace,
            pinned=pinned if captured else "no op of the model",
            replay_state_bytes=replay_state_bytes, result=f"float32{list(sizes)}",
            digest=hashlib.sha256(f"{name}{sizes}".encode()).hexdigest()[:16] if captured else ""))
        return outputs

    def graph(self, regions: tuple[Region, ...], *, parameters_bytes: int = 1000,
              buffers_bytes: int = 10, inputs_bytes: int = 100) -> TrainingGraph:
        """Return the finished graph."""
        return TrainingGraph(
            ops=tuple(self.ops), buffers=tuple(self.buffers), regions=regions,
            resident=ResidentMemory(parameters_bytes, buffers_bytes, inputs_bytes), device="cpu")


def chain(layers: int, size_bytes: int = 100, *, gradient_bytes: int = 7) -> TrainingGraph:
    """Return layers in a row with equal activations.  The backward of layer i reads the result of
    layer i - 1 and the gradient of its own, and makes a parameter's gradient."""
    build = GraphBuilder()
    results: list[int] = []
    for layer in range(layers):
        inputs = (results[-1],) if results else ()
        results.append(build.op(f"net.layers.{layer}/aten.linear#0", Phase.FORWARD, inputs,
                                (size_bytes,))[0])
    cotangent = build.op("loss/backward#0", Phase.LOSS, (results[-1],), (size_bytes,),
                         region=-1, kind=Category.TEMPORARIES, seconds=0.0, flops=0,
                         captured=False)[0]
    for layer in reversed(range(layers)):
        saved = (results[layer - 1],) if layer else ()
        cotangent, _ = build.op(f"net.layers.{layer}/~aten.linear#0", Phase.BACKWARD,
                                (*saved, cotangent), (size_bytes, 0))
        build.op(f"net.layers.{layer}/~aten.sum#0", Phase.BACKWARD, (cotangent,),
                 (gradient_bytes,), kept=True, label=f"layers.{layer}.weight")
    region = Region(range(layers), range(layers + 1, len(build.ops)), cotangents=(True,))
    return build.graph((region,))


@st.composite
def steps(draw: st.DrawFn, max_ops: int = 6) -> HandMadeStep:
    """Draw a captured step of one or two regions, each with up to `max_ops` forward ops."""
    build = GraphBuilder()
    sizes = st.integers(0, 50)
    forwards: list[range] = []
    carried: tuple[int, ...] = ()
    saved_of: list[list[int]] = []
    for number in range(draw(st.integers(1, 2))):
        start, made = len(build.ops), list(carried)
        for position in range(draw(st.integers(1, max_ops))):
            inputs = tuple(draw(st.sets(st.sampled_from(made), max_size=2))) if made else ()
            inplace = inputs[:1] if draw(st.booleans()) else ()
            made += build.op(
                f"block.{number}/aten.op#{position}", Phase.FORWARD, inputs,
                tuple(build.buffers[taken].size_bytes for taken in inplace)
                or (draw(sizes),) * draw(st.integers(1, 2)), region=number, inplace=inplace,
                seconds=draw(st.integers(0, 4)), flops=draw(st.integers(0, 9)),
                workspace_bytes=draw(st.integers(0, 5)),
                replay_state_bytes=draw(st.sampled_from([0, 0, 3])),
                pinned=draw(st.sampled_from(["", "", "", "effect"])))
        if draw(st.booleans()):
            build.op(f"{number}:/update of mutated inputs#0", Phase.FORWARD, (made[-1],), (),
                     region=number, seconds=0.0, flops=0, captured=False)
        forwards.append(range(start, len(build.ops)))
        saved_of.append(made)
        carried = (made[-1],)
    gradient = build.op("loss/backward#0", Phase.LOSS, carried, (draw(sizes),), region=-1,
                        kept=True, captured=False)[0]
    backwards: list[range] = []
    for number in reversed(range(len(forwards))):
        start = len(build.ops)
        for position in range(draw(st.integers(1, max_ops))):
            saved = draw(st.sets(st.sampled_from(saved_of[number]), max_size=2))
            kept = draw(st.booleans())
            made_here = build.op(
                f"block.{number}/~aten.op#{position}", Phase.BACKWARD, (*saved, gradient),
                (draw(sizes),), region=number, seconds=draw(st.integers(0, 4)), kept=kept,
                label=f"block.{number}.weight{position}" if kept else "")
            gradient = gradient if kept else made_here[0]
        if draw(st.booleans()):
            build.op(f"block.{number}/~layout of the gradient#0", Phase.BACKWARD, (gradient,),
                     (draw(sizes),), region=number, seconds=0.0, flops=0, kept=True,
                     label=f"block.{number}.bias", captured=False)
        backwards.append(range(start, len(build.ops)))
    regions = tuple(Region(forward, backward, cotangents=(True,))
                    for forward, backward in zip(forwards, reversed(backwards), strict=True))
    optimizer = draw(st.sampled_from(
        [None, OptimizerMemory("sgd", 0, 11), OptimizerMemory("adam", 2000, 400)]))
    return HandMadeStep(graph=build.graph(regions), baseline_peak_bytes=draw(
        st.integers(3200, 9000)), optimizer=optimizer)


def legal_schedule(data, problem):
    """Draw a schedule with recomputations at random places where they are allowed."""
    schedule = []
    for index in range(len(problem)):
        allowed = [op for op in range(index) if problem.may_replay(op, index)]
        if allowed:
            again = data.draw(st.lists(st.sampled_from(allowed), max_size=2, unique=True))
            schedule.extend(sorted(again))
        schedule.append(index)
    return tuple(schedule)
