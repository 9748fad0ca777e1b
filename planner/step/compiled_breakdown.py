"""Memory of the compiled step under a sequence of rewrite specs.

Code is generated once per distinct decision about a block (or about the whole model), and shared by
all rewrite specs with the same decision.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from planner._apply.blocks import SharedCode, shared_code
from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.dynamo.captured_graphs import GraphCode
from planner.solvers.repetition import find_runs

if TYPE_CHECKING:
    from planner._apply.inductor import InductorBackend
    from planner._graph_capture.inductor.compiled_step import CompiledStep, CompiledTracer
    from planner._graph_capture.training_graph import GeneratedKernels, SavingCosts


_TO_CAPTURE = 1.3
"""Time to generate the code of a whole step, relative to its capture, until some was generated."""


class _Generated(NamedTuple):
    backend: InductorBackend
    code: GraphCode
    shared: SharedCode
    """The blocks that the code was generated for."""


@dataclass
class CompiledBreakdown:
    """Traces of compiled steps, by rewrite spec."""

    tracer: CompiledTracer | None
    """`None`: Inductor generates no code, since the device is absent."""
    saved_by_default: frozenset[int]
    """Buffers that Inductor's own partitioner saves for the backward."""
    saving_costs: SavingCosts
    """Time of Inductor's kernels to save results for the backward."""
    kernels: GeneratedKernels
    whole_seconds: float = 0.0
    """Approximate time to generate the code of a whole step with a single region."""
    _known: dict[RewriteSpec, CompiledStep] = field(default_factory=dict)
    _estimated: dict[RewriteSpec, CompiledStep] = field(default_factory=dict)
    _seconds: dict[RewriteSpec, float] = field(default_factory=dict)
    _generated: dict[tuple[object, ...], _Generated] = field(default_factory=dict)
    _backend: InductorBackend | None = None

    def __post_init__(self) -> None:
        if self.tracer is not None:
            self.whole_seconds = _TO_CAPTURE * self.tracer.capture_seconds

    @property
    def _tracer(self) -> CompiledTracer:
        assert self.tracer is not None, "without code there is nothing to trace"
        return self.tracer

    def estimate(self, spec: RewriteSpec) -> CompiledStep:
        """Like `trace`, but from the code of a step without most of its repeated layers, if it has
        any; the time does not grow with depth."""
        if spec in self._known or len(spec.regions) > 1:
            return self.trace(spec)
        if spec not in self._estimated:
            (shared,) = shared_code(spec)
            short = self._new_code(spec, shared)
            short.backend.leave_out_layers(find_runs)
            short.backend.keep_code()
            step = self._tracer.trace(lambda _: short.code, lambda: short.backend.left_out)
            self._estimated[spec] = step
            if not short.backend.left_out:  # it was the whole step
                self._known[spec] = step
                self._generated[_decided(shared, spec)] = short
        return self._estimated[spec]

    def trace(self, spec: RewriteSpec) -> CompiledStep:
        """The memory of the step under a rewrite spec, above resident memory."""
        if spec not in self._known:
            of_block: dict[str, GraphCode] = {}
            begun = time.monotonic()
            for shared in shared_code(spec):
                key = _decided(shared, spec)
                if key not in self._generated:
                    self._generated[key] = self._new_code(spec, shared)
                    self._generated[key].backend.keep_code()
                of_block.update(dict.fromkeys(shared.blocks, self._generated[key].code))
            self._known[spec] = self._tracer.trace(of_block.__getitem__)
            if len(spec.regions) == 1:
                self.whole_seconds = max(self.whole_seconds, time.monotonic() - begun)
        return self._known[spec]

    def seconds(self, spec: RewriteSpec) -> float:
        """Duration of the step under a rewrite spec, by timing its kernels."""
        if spec not in self._seconds:
            of_block = {name: code for shared in shared_code(spec)
                        for code in (self._new_code(spec, shared).code,)
                        for name in shared.blocks}
            self._seconds[spec] = self._tracer.seconds(of_block.__getitem__)
        return self._seconds[spec]

    def with_code(self, spec: RewriteSpec) -> RewriteSpec:
        """The rewrite spec with the memory of its graphs' code, if it was traced."""
        if spec not in self._known:
            return spec
        regions = list(spec.regions)
        for shared in shared_code(spec):
            found = self._generated[_decided(shared, spec)]
            memory = found.backend.memory_of_code()
            count = len(shared.regions) // len(shared.blocks)
            for position, index in enumerate(shared.regions):
                # Of equal regions, use the one that code was generated for.
                code = next((memory[i] for i in found.shared.regions[position % count::count]
                             if memory[i]), ())
                regions[index] = replace(regions[index], code=code)
        return replace(spec, regions=tuple(regions))

    def _new_code(self, spec: RewriteSpec, shared: SharedCode) -> _Generated:
        from planner._apply.inductor import InductorBackend

        if self._backend is None:
            self._backend = InductorBackend(self._tracer.fake_copy.model, spec)
        backend = self._backend.with_spec(spec, shared.regions)
        return _Generated(backend, GraphCode(backend), shared)


def _decided(shared: SharedCode, spec: RewriteSpec) -> tuple[object, ...]:
    """Everything that the code of a block depends on."""
    return shared.kind, spec.kernel_order, spec.low_memory_codegen
