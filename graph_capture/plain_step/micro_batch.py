"""One forward, loss and backward as plain PyTorch runs it: every block that it allocates, in order.

The model of the world: the code runs on tensors without memory under the real autograd, and
storages live as long as there are references to them.  The caller is assumed to run `output =
model(...); loss = loss_fn(output); loss.backward()` and to keep the output and the loss beyond the
end of the backward; the result lists their blocks.  Under autocast, forward and loss run inside and
the backward outside, as torch's documentation recommends: the casts of the weights are cached until
then.

Gradients that a parameter has before the step are added to in place.

Blind spots: those of `memory.tracker`; memory in reference cycles is freed when the garbage
collector runs, at another time than in the real step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from planner._graph_capture.errors import DataDependentValue
from planner._graph_capture.fake_copies.data_dependent_values import data_dependent_value
from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.fake_copies.input_values import keep_values
from planner._graph_capture.fake_copies.storage_less import (
    may_be_storage_less,
    storage_less_copy,
)
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.memory.sparse import is_sparse, strided_tensors
from planner._graph_capture.memory.trace import COMMUNICATION, Block, MicroBatch
from planner._graph_capture.memory.tracker import MemoryTracker, ModuleLocator, Workspace
from planner._graph_capture.plain_step.loss import (
    LossFn,
    LossFootprint,
    Objective,
    objective,
    trace_loss,
)
from planner._graph_capture.rank import Wrapper
from planner._graph_capture.torch_compat import NoStaticShape, pytree, storage_key
from planner._graph_capture.training_graph import Category, ResidentMemory

_Made = TypeVar("_Made")


def trace_micro_batch(
    fake_copy: FakeCopy, loss_fn: LossFn | None = None, *, workspace: Workspace,
    with_gradient: Collection[str] = (), scaled: bool = False, holds_output: bool = True,
    look: Callable[[FakeCopy, Any, LossFn | None], None] | None = None,
    wrapper: Wrapper | None = None,
) -> MicroBatch:
    """Trace forward, loss and backward of the fake copy, whose tensors are restored afterwards.

    `with_gradient`: names of the parameters that already have a gradient.  `scaled`: the loss is
    scaled by a `GradScaler`.  `holds_output`: the caller keeps the output alive to the end of the
    backward, not only until the loss is computed.  `look` receives the running fake copy, the
    output of its model and its loss before the loss is computed.  `wrapper`: data parallelism
    during the step.

    Raises `CaptureError` if there is nothing to differentiate; an error of the model propagates.
    """
    return run_without_data(fake_copy, loss_fn, lambda running, loss, storage_less: _trace(
        running, loss, workspace, with_gradient, scaled, holds_output, look,
        wrapper or Wrapper(), storage_less=storage_less))


def run_without_data(fake_copy: FakeCopy, loss_fn: LossFn | None,
                     run: Callable[[FakeCopy, LossFn | None, bool], _Made]) -> _Made:
    """`run(fake_copy, loss, True)` on a storage-less copy of the fake copy, which looks real to the
    code, if that works; otherwise `run(fake_copy, loss, False)` on the fake one."""
    if may_be_storage_less(fake_copy):
        try:
            copy = storage_less_copy(fake_copy, extra=(loss_fn,))
            made = run(copy, copy.extra[-1], True)
            if getattr(copy.mode, "told_values", False):
                keep_values(fake_copy)
            return made
        except Exception:  # a fake tensor may work instead
            pass
    try:
        return run(fake_copy, loss_fn, False)
    except (*NoStaticShape, DataDependentValue) as error:
        raise data_dependent_value(error) from error


def _trace(fake_copy: FakeCopy, loss_fn: LossFn | None, workspace: Workspace,
           with_gradient: Collection[str], scaled: bool, holds_output: bool,
           look: Callable[[FakeCopy, Any, LossFn | None], None] | None, wrapper: Wrapper, *,
           storage_less: bool) -> MicroBatch:
    copies = list(fake_copy.fake_of.values())
    parameters = {id(tensor): name for name, tensor in [*fake_copy.parameters.items()][::-1]}
    with fake_copy.mode:
        for name in with_gradient:
            fake_copy.parameters[name].grad = torch.empty_like(fake_copy.parameters[name])
    before = [tensor.grad for tensor in copies if tensor.is_leaf and tensor.grad is not None]
    locate = ModuleLocator(fake_copy.model)
    tracker = MemoryTracker(workspace, device=fake_copy.device, trace_device=fake_copy.trace_device,
                            resident=(*copies, *before), module_of_op=locate)
    freed: dict[int, str] = {}  # gradients that the loop frees as they come
    observed = [fake_copy.parameters[name].register_post_accumulate_grad_hook(
        lambda parameter: freed.update(dict.fromkeys(
            tracker.numbers_of(parameter.grad), parameters[id(parameter)])))
                for name in wrapper.frees if fake_copy.parameters[name].requires_grad]

    try:
        with (fake_copy.as_on_device(), locate,
              wrapper.attached(fake_copy.model, tracker.make_buffer)):
            with fake_copy.forward_context():
                with fake_copy.mode, tracker:
                    output = fake_copy.call(has_backward=True)
                if look is not None:
                    look(fake_copy, output, loss_fn)
                loss_begins = tracker.event_count
                with fake_copy.mode, tracker:
                    goal = objective(output, loss_fn, fake_copy)
                if scaled:
                    goal = _scaled(goal, fake_copy, tracker)
            # As when a user's outermost autocast ends: casts of parameters are not kept.
            torch.clear_autocast_cache()
            if not holds_output:
                output = None
            backward_begins = tracker.start_of_backward()
            with (fake_copy.behind_call(), fake_copy.mode, _no_autocast(fake_copy.trace_device),
                  tracker):
                goal.backward()
                left = wrapper.finish()
        seeds = {tracker.number_of(seed) for seed in goal.seeds if seed is not None}
        gradients: dict[int, str] = {}  # of inputs, too
        sparse: dict[str, torch.Tensor] = {}
        for tensor in copies:
            if tensor.is_leaf and tensor.grad is not None:
                name = parameters.get(id(tensor), "")
                gradients |= dict.fromkeys(tracker.numbers_of(tensor.grad), name)
                if is_sparse(tensor.grad):
                    sparse[name] = tensor.grad
        end, alive = tracker.event_count, tracker.live_numbers()
        del output
        without_output = tracker.live_numbers()
        del goal
        without_loss = tracker.live_numbers()
        del left
    finally:
        tracker.close()
        for hook in observed:
            hook.remove()
        for tensor in copies:
            if tensor.is_leaf:
                tensor.grad = None

    kept = {number: name for number, name in gradients.items() if name}
    labels = freed | gradients | {number: COMMUNICATION for number, kind in tracker.kind_of.items()
                                  if kind is Category.TEMPORARIES}
    loss_blocks = without_output - without_loss
    return MicroBatch(
        trace=tracker.trace(tracker.categories({*gradients, *freed}, seeds), labels).until(end),
        loss_begins=loss_begins,
        backward_begins=backward_begins, gradients=kept,
        output_blocks=frozenset(alive - without_output), loss_blocks=frozenset(loss_blocks),
        left_blocks=frozenset(without_loss - kept.keys()), storage_less=storage_less,
        sparse_gradients=sparse, freed_gradients=frozenset(freed.values()))


def _scaled(goal: Objective, fake_copy: FakeCopy, tracker: MemoryTracker) -> Objective:
    """The objective with its roots multiplied by the scale of a `GradScaler`."""
    scaler = torch.amp.GradScaler(fake_copy.trace_device.type)
    with fake_copy.mode:
        scaler.scale(torch.ones((), device=fake_copy.trace_device))  # makes its state, untracked
        with tracker:
            return Objective(tuple(scaler.scale(root) for root in goal.roots), goal.seeds)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@dataclass(frozen=True)
class EagerStep:
    """One plain training step, above what is resident."""

    blocks: MicroBatch
    """All blocks that it allocates and frees, in order."""
    loss: LossFootprint

    @cached_property
    def peak_bytes(self) -> int:
        """Maximum of its memory."""
        return self.blocks.trace.peak_bytes

    @cached_property
    def forward_peak_bytes(self) -> int:
        """Maximum before the backward begins, the loss included."""
        return self.blocks.trace.until(self.blocks.backward_begins).peak_bytes

    @property
    def with_gradient(self) -> frozenset[str]:
        """Names of the parameters that get a gradient."""
        return self.blocks.with_gradient

    @property
    def memory_timeline(self) -> list[int]:
        """Maximum of bytes from each op's run to the next one."""
        return self.blocks.trace.levels_by_run()

    @property
    def backward_begins(self) -> int:
        """Number of runs before the backward."""
        return sum(run.event < self.blocks.backward_begins for run in self.blocks.trace.runs)


def trace_eager_step(fake_copy: FakeCopy, loss_fn: LossFn | None = None, *, workspace: Workspace,
                     with_gradient: Collection[str] = (), holds_output: bool = True,
                     wrapper: Wrapper | None = None) -> EagerStep:
    """Trace forward, loss and backward of the fake copy.  It has no gradients before and after,
    except those of the parameters in `with_gradient`, which are resident.  `wrapper`: data
    parallelism during the step.

    Raises `CaptureError` if there is nothing to differentiate; an error of the model propagates.
    """
    footprint: list[LossFootprint] = []

    def look(running: FakeCopy, output: Any, loss: LossFn | None) -> None:
        footprint[:] = [trace_loss(loss, output, running, workspace)]

    blocks = trace_micro_batch(fake_copy, loss_fn, workspace=workspace,
                               with_gradient=with_gradient, holds_output=holds_output, look=look,
                               wrapper=wrapper)
    return EagerStep(blocks, footprint[0])


def resident_blocks(fake_copy: FakeCopy, resident: ResidentMemory, *, is_sharded: bool = False
                    ) -> tuple[Block, ...]:
    """A block for each storage of the fake copy's parameters, buffers and inputs; other memory in
    `resident` is a block of its own.  `is_sharded`: the parameters are sharded or bucketed on this
    rank."""
    seen: set[int] = set()
    blocks = _blocks(fake_copy, Category.PARAMETERS, fake_copy.parameters.items(), seen)
    if is_sharded:
        blocks = [Block(resident.parameters_bytes, Category.PARAMETERS,
                        label="parameters of this rank")]
    blocks += _blocks(fake_copy, Category.BUFFERS, fake_copy.buffers.items(), seen)
    inputs = [(f"input {number}", leaf) for number, leaf
              in enumerate(pytree.tree_leaves((fake_copy.args, fake_copy.kwargs)))
              if isinstance(leaf, torch.Tensor)]
    blocks += _blocks(fake_copy, Category.INPUTS, inputs, seen)
    for category, total in ((Category.BUFFERS, resident.buffers_bytes),
                            (Category.INPUTS, resident.inputs_bytes)):
        rest = total - sum(b.size_bytes for b in blocks if b.category is category)
        if rest > 0:
            blocks.append(Block(rest, category, label="other tensors"))
    return tuple(blocks)


def _blocks(fake_copy: FakeCopy, category: Category, named: Iterable[tuple[str, torch.Tensor]],
            seen: set[int]) -> list[Block]:
    blocks = []
    for name, whole in named:
        for tensor in strided_tensors([whole]):
            key = storage_key(tensor)
            if key not in seen:
                seen.add(key)
                size = allocated_bytes(tensor.untyped_storage().nbytes(), fake_copy.device)
                blocks.append(Block(size, category, label=name))
    return blocks
