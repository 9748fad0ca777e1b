"""The measuring instrument, against allocations of known size."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from planner._graph_capture.memory.allocator import AllocationRecord, allocated_bytes, record_peak
from tests.support.stages import record_stages

pytestmark = pytest.mark.compat


def test_peak_and_end_of_known_allocations():
    kept = []

    def run() -> None:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(700)
        del second
        kept.append(third)

    assert record_peak(run, "cpu") == AllocationRecord(peak_bytes=6000, end_bytes=2800)


def test_temporary_inside_an_expression_counts():
    x = torch.ones(1000)
    assert record_peak(lambda: (x + 1) * (x + 2), "cpu") == AllocationRecord(12000, 0)


def test_nothing_allocated():
    x = torch.ones(10)
    assert record_peak(lambda: x.view(2, 5).t(), "cpu") == AllocationRecord(0, 0)


def test_backward_is_seen():
    """Gradients of weight and bias stay; the peak has the seed and the weight's gradient."""
    layer = nn.Linear(256, 128)
    out = layer(torch.ones(64, 256))
    seed = torch.ones(64, 128)
    record = record_peak(lambda: out.backward(seed), "cpu")
    assert record.end_bytes == 4 * (256 * 128 + 128) == record.peak_bytes


def test_backward_inside_a_reentrant_checkpoint_is_seen():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(64, 64)
    out = checkpoint(layer, torch.ones(8, 64, requires_grad=True), use_reentrant=True)
    record = record_peak(lambda: out.sum().backward(), "cpu")
    assert record.peak_bytes >= 4 * (64 * 64 + 2 * 8 * 64)


def test_repeated_measurements_agree():
    layer = nn.Linear(64, 64)
    x = torch.ones(32, 64)
    assert len({record_peak(lambda: layer(x).relu(), "cpu") for _ in range(5)}) == 1


@pytest.mark.slow
def test_quiet():
    """In a process of its own: the profiler's library takes its log level at its first use."""
    code = ("import torch; from planner._graph_capture.memory.allocator import record_peak;"
            "print(record_peak(lambda: torch.ones(3), 'cpu').peak_bytes)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          timeout=120)
    assert (done.stdout, done.stderr) == ("12\n", "")


def test_refusals():
    with pytest.raises(ValueError, match="expected a cpu or cuda device, got `meta`"):
        record_peak(lambda: None, "meta")
    with (profile(activities=[ProfilerActivity.CPU], acc_events=True),
          pytest.raises(RuntimeError, match="while a profiler is running")):
        record_peak(lambda: None, "cpu")


def test_error_in_the_run_passes_and_ends_the_measurement():
    with pytest.raises(ZeroDivisionError):
        record_peak(lambda: 1 // 0, "cpu")
    assert record_peak(lambda: torch.empty(4), "cpu").peak_bytes == 16


def test_granularity():
    assert allocated_bytes(1, torch.device("cuda")) == 512
    assert allocated_bytes(1024, torch.device("cuda")) == 1024
    assert allocated_bytes(0, torch.device("cuda")) == 0
    assert allocated_bytes(1, torch.device("cpu")) == 1


def test_stages_are_measured_one_by_one_in_one_recording():
    held = []

    def first() -> None:
        held.append(torch.empty(1000, dtype=torch.uint8))
        torch.empty(500, dtype=torch.uint8)

    def second() -> None:
        held.append(torch.empty(200, dtype=torch.uint8))
        held.pop(0)  # what the first one made

    records = record_stages([first, lambda: None, second])
    assert [(r.peak_bytes, r.end_bytes) for r in records] == [
        (1500, 1000), (1000, 1000), (1200, 200)]


def test_a_block_at_the_address_of_an_earlier_one_is_another():
    """What a recording has seen allocated and not released stays in the profiler's table; another
    block at that address, made before a recording and released within, is not taken for it."""
    def blocks() -> list[torch.Tensor]:
        return [torch.empty(1 << 12) for _ in range(100)]

    seen: list[torch.Tensor] = []
    record_peak(lambda: seen.extend(blocks()), "cpu")
    addresses = {block.data_ptr() for block in seen}
    seen.clear()
    others = blocks()
    assert addresses & {block.data_ptr() for block in others}
    assert record_peak(others.clear, "cpu") == AllocationRecord(0, 0)
