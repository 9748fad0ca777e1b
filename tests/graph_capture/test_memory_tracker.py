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


class Keeping(torch.autograd.Function):
    """Keeps the gradient that it returns."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.kept.append(gradient * 2)
        return ctx.kept[-1], None


def test_no_gradient_is_summed_into_one_that_somebody_keeps():
    x = torch.ones(4, requires_grad=True)
    hidden = x.exp()
    kept: list[torch.Tensor] = []
    total = hidden.sin().sum() + Keeping.apply(hidden, kept).sum() + hidden.cos().sum()
    last = Keeping.apply(hidden, kept)  # its gradient arrives first, and others are added to it
    with MemoryTracker(lambda *call: 0, device=CPU, trace_device=CPU, resident=[x]):
        (total + last.sum()).backward()
    assert all(torch.equal(each, torch.full((4,), 2.0)) for each in kept)
    hidden = x.detach().exp()
    expected = hidden * (hidden.cos() - hidden.sin() + 4)
    torch.testing.assert_close(x.grad, expected)
