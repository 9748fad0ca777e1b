"""The memory of the training step as Inductor compiles it.

The model of the world: the code that Inductor generates says which ops share a kernel, in which
order kernels run, and which buffers they share.  So this code is generated, as for a real run, and
executed with kernels that do nothing, while the storages that it makes and releases are tracked.
It runs on fake tensors, or on storage-less ones if blocks are compiled one by one and uncaptured
code runs between them.  Forward, loss and backward run under the real autograd, so memory that
AOTAutograd and the user's loss keep alive counts as well.

Blind spots: those of `memory.tracker`; temporary memory of a generated kernel (on a CPU from the
C++ heap, which torch's allocator does not see either).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from planner._graph_capture.dynamo.captured_graphs import CapturedGraphs, GraphCode
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.fake_copies.storage_less import StorageLessMode
from planner._graph_capture.inductor.shortened import LeftOut
from planner._graph_capture.memory.trace import MemoryTrace
from planner._graph_capture.memory.tracker import MemoryTracker
from planner._graph_capture.op_costs.costs import OpCosts
from planner._graph_capture.plain_step.loss import LossFn, objective
from planner._graph_capture.rank import Wrapper
from planner._graph_capture.torch_compat import (
    FakeTensor,
    InfraMode,
    OpOverload,
    compile_settings,
)
from planner._graph_capture.training_graph import MADE_BY_STEP, Category, CodeMemory


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """Memory of one compiled training step, above what is resident."""

    peak_bytes: int
    by_category: Mapping[str, int]
    """Bytes of each category at the peak; they sum to `peak_bytes`.  Workspace is a temporary."""
    memory_timeline: Mapping[Category, Sequence[int]]
    """Bytes of each kind after each allocation and release."""
    backward_begins: int
    """Number of allocations and releases before the backward."""


@dataclass(frozen=True)
class CompiledTracer:
    """A fake copy whose step can be compiled and traced any number of times."""

    fake_copy: FakeCopy
    loss_fn: LossFn | None
    costs: OpCosts
    graphs: CapturedGraphs
    """The graphs of the fake copy's model."""
    wrapper: Callable[[], Wrapper] = Wrapper
    """Makes what data parallelism runs along with a step."""
    holds_output: bool = True
    """True if the caller keeps the model's output alive until the backward ends."""
    capture_seconds: float = 0.0
    """Wall-clock time to trace and lower the step."""

    def trace(self, code_of: Callable[[str], GraphCode],
              left_out: Callable[[], Sequence[LeftOut]] = tuple) -> CompiledStep:
        """Compile the step without kernels, and trace its memory.

        `code_of`: for each block (the whole model is "") the backend that compiles it; code from an
        earlier trace is reused.  `left_out`: called afterwards, returns the layers that the code
        lacks and that are counted in addition.  The step runs twice, so that allocations of the
        compilation do not count.  Errors of the backends propagate.
        """
        from planner._graph_capture.torch_compat.inductor import stub_code

        fake_copy = self.fake_copy
        with (compile_settings(donated_buffers=True), stub_code(around=self._around),
              self.graphs.installed()):
            self.graphs.compile_with(code_of)
            with fake_copy.mode:
                self._run(self.graphs.call, None)
                copies = list(fake_copy.fake_of.values())
                tracker = MemoryTracker(self.costs.workspace_bytes, device=fake_copy.device,
                                        trace_device=fake_copy.trace_device, resident=copies)
                return self._run(self.graphs.call, tracker, left_out)

    def seconds(self, code_of: Callable[[str], GraphCode]) -> float:
        """Duration of the compiled step, from timing each kernel and each op by itself; the code
        must not be reused."""
        from planner._graph_capture.torch_compat.inductor import KernelCall, stub_code

        kernels: list[KernelCall] = []
        ops = _OpLog()
        with (compile_settings(donated_buffers=True), stub_code(kernels.append, self._around),
              self.graphs.installed()):
            self.graphs.compile_with(code_of)
            with self.fake_copy.mode:
                self._run(self.graphs.call, None)
                kernels.clear()
                with ops:
                    self._run(self.graphs.call, None)
        return self.costs.seconds_of_kernels(kernels) + sum(
            self.costs.seconds(*run) for run in ops.runs)

    def _around(self) -> AbstractContextManager[object]:
        """Context of generated code: storage-less tensors lack the values that it would write."""
        mode = self.fake_copy.mode
        return mode.without_values() if isinstance(mode, StorageLessMode) else nullcontext()

    def _run(self, compiled: Callable[..., Any], tracker: MemoryTracker | None,
             left_out: Callable[[], Sequence[LeftOut]] = tuple) -> CompiledStep:
        fake_copy, wrapper = self.fake_copy, self.wrapper()
        args, kwargs = fake_copy.arguments()
        leaves = [tensor for tensor in fake_copy.fake_of.values() if tensor.is_leaf]

        def make_untracked(size_bytes: int, kind: Category) -> torch.Tensor:
            return torch.empty(size_bytes, dtype=torch.uint8, device=fake_copy.trace_device)

        make_buffer = make_untracked if tracker is None else tracker.make_buffer
        try:
            with wrapper.attached(fake_copy.model, make_buffer), tracker or nullcontext():
                with fake_copy.forward_context():
                    output = compiled(*args, **kwargs)
                    goal = objective(output, self.loss_fn)
                if not self.holds_output:
                    output = None
                backward_begins = 0 if tracker is None else tracker.start_of_backward()
                goal.backward()
                left = wrapper.finish()
                if tracker is None:
                    return CompiledStep(0, {}, {}, 0)
                end = tracker.event_count
            seeds = {tracker.number_of(seed) for seed in goal.seeds if seed is not None}
            gradients = {tracker.number_of(tensor.grad) for tensor in leaves
                         if tensor.grad is not None}
            del left
        finally:
            if tracker is not None:
                tracker.close()
            for tensor in leaves:
                tensor.grad = None

        trace = tracker.trace(tracker.categories(gradients, seeds)).until(end)
        memory_timeline = {kind: trace.levels_of(kind) for kind in MADE_BY_STEP}
        for stretch in left_out():
            _count(stretch, trace, backward_begins, memory_timeline)
        levels = [0, *map(sum, zip(*memory_timeline.values(), strict=True))]
        peak_bytes = max(levels)
        moment = levels.index(peak_bytes) - 1
        return CompiledStep(
            peak_bytes,
            {kind: row[moment] if moment >= 0 else 0 for kind, row in memory_timeline.items()},
            memory_timeline, backward_begins)


def _count(stretch: LeftOut, trace: MemoryTrace, backward_begins: int,
           memory_timeline: Mapping[Category, list[int]]) -> None:
    """Add the memory of omitted layers to the levels after each event.

    Their saved tensors count from the point where the forward has saved as much as before them to
    the point where the backward has made as many gradients; from there on their gradients count.
    """
    alive = set(trace.alive_after(backward_begins))

    def first(is_meant: Callable[[int], bool], before_bytes: int, begin: int) -> int:
        """The event by which so many bytes of the meant blocks are made."""
        for moment in range(begin, len(trace.events)):
            block = trace.events[moment]
            if before_bytes <= 0:
                return moment
            if block >= 0 and is_meant(block):
                before_bytes -= trace.blocks[block].size_bytes
        return len(trace.events)

    saved = min(backward_begins, first(
        lambda block: block in alive and trace.blocks[block].category is Category.ACTIVATIONS,
        stretch.saved_before_bytes, 0))
    done = max(backward_begins, first(
        lambda block: trace.blocks[block].category is Category.GRADIENTS,
        stretch.gradients_before_bytes, backward_begins))
    for kind, begin, end, size in (
            (Category.ACTIVATIONS, saved, done, stretch.saved_bytes),
            (Category.GRADIENTS, done, len(trace.events), stretch.gradient_bytes)):
        row = memory_timeline[kind]
        row[begin:end] = [level + size for level in row[begin:end]]


class _OpLog(InfraMode):
    """Records the ops that run, except views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[tuple[OpOverload, tuple[Any, ...], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload) and not func.is_view and "empty" not in func.name():
            self.runs.append((func, args, kwargs or {}, out))
        return out


def check_compiler(device: torch.device) -> None:
    """Raise `CaptureError` if Inductor cannot generate code for `device`, which is present."""
    from planner._graph_capture.torch_compat.inductor import missing_compiler

    missing = missing_compiler(device)
    if missing:
        raise CaptureError(
            f"Inductor compiles for {device.type} with a C++ compiler, and finds none: {missing}; "
            "install one (Debian, Ubuntu: apt-get install g++) or name it in the environment "
            'variable CXX, or plan with backend="eager"')


def memory_of_code(compiled: Any, inputs: Sequence[Any]) -> CodeMemory:
    """Memory of a graph compiled by Inductor, run on new tensors like `inputs`, which are fake.

    Input sizes decide how Inductor fuses and orders kernels.  So a plan for one size records the
    memory of each graph's code, and the code for a smaller size is compared with it.  Workspace of
    library kernels is left out on both sides: a smaller step is compiled while the user's program
    runs, where a kernel may not be measurable, and margins would hide other tensors.
    """
    from planner._graph_capture.torch_compat.inductor import stub_of

    tensors = [value for value in inputs if isinstance(value, FakeTensor)]
    if not tensors:
        return CodeMemory(0, 0)
    run = stub_of(compiled)
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"),
                  tensors[0].device)
    tracker = MemoryTracker(lambda *_: 0, device=device, trace_device=device, resident=())
    with tensors[0].fake_mode, torch.no_grad(), tracker:
        args = [torch.empty_strided(value.size(), value.stride(), dtype=value.dtype,
                                    device=value.device)
                if isinstance(value, torch.Tensor) else value for value in inputs]
        outputs = run(args)
        left = tracker.live_bytes
        tracker.close()
    del outputs
    return CodeMemory(tracker.peak_bytes, left)
