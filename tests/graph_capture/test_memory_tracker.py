"""The memory tracker beside real tensors; traced steps are judged in `test_eager_step`."""

import torch

from planner._graph_capture.memory.tracker import MemoryTracker

CPU = torch.device("cpu")


def test_a_storage_in_the_place_of_a_released_one_counts():
    resident = [torch.empty(8) for _ in range(50)]
    tracker = MemoryTracker(lambda *call: 0, device=CPU, trace_device=CPU, resident=resident)
    with tracker:
        resident.clear()
        made = [torch.empty(8) for _ in range(50)]
    assert tracker.live_bytes == sum(tensor.nbytes for tensor in made)
