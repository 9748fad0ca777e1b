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


def test_a_copy_counts_where_autograd_does_not_divide_the_op_that_makes_it():
    x = torch.ones(2, 4)
    tracker = MemoryTracker(lambda *call: 0, device=CPU, trace_device=CPU, resident=[x])
    with torch.inference_mode(), tracker:
        views = [x.to(torch.float32), x.reshape(8)]
        assert tracker.live_bytes == 0
        copies = [x.to(torch.float64), x.t().reshape(8)]
    assert tracker.live_bytes == sum(tensor.nbytes for tensor in copies)
    del views
