"""The parts of a training loop as plain PyTorch runs it, each traced once, on demand.

Nothing of the model is executed or changed; see `graph_capture.fake_copies.fake`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.fake import FakeCopy, device_planned_for, make_fake_copy
from planner._graph_capture.memory.trace import Block, MemoryTrace, MicroBatch
from planner._graph_capture.memory.tracker import MemoryTracker, ModuleLocator, Workspace
from planner._graph_capture.op_costs.costs import OpCosts
from planner._graph_capture.op_costs.devices import Gpu, compute_capability
from planner._graph_capture.optimizer.in_backward import (
    EarlyGradients,
    UsesGradients,
    early_gradients,
)
from planner._graph_capture.optimizer.step import (
    OptimizerSettings,
    OptimizerTrace,
    trace_optimizer_steps,
)
from planner._graph_capture.plain_step.loss import LossFn
from planner._graph_capture.plain_step.micro_batch import (
    EagerStep,
    resident_blocks,
    run_without_data,
    trace_eager_step,
    trace_micro_batch,
)
from planner._graph_capture.plain_step.observed_loss import without_watches
from planner._graph_capture.rank import RankLayout, Wrapper
from planner._graph_capture.torch_compat import quiet_fake_tensors
from planner._graph_capture.training_graph import Category


@dataclass(frozen=True, slots=True)
class Tracing:
    """Retraces a captured step; no tensor has memory."""

    fake_copy: FakeCopy
    """The fake copy as the user calls it, without the arguments that capture forced."""
    loss_fn: LossFn | None
    """Loss function of the fake copy; `None`: the step was captured without one."""
    workspace: Workspace
    holds_output: bool = True
    """True if the caller keeps the output alive until the backward ends."""
    layout: RankLayout | None = None
    """Layout of the model on one rank of a data-parallel run; `None`: one rank."""
    early: EarlyGradients = field(default_factory=dict)
    """Gradients that the loop uses and frees as they come."""

    @property
    def wrapper(self) -> Wrapper:
        """Code that data parallelism runs along with a step."""
        return UsesGradients(self.early) if self.layout is None else self.layout.wrapper()

    def optimizer(self, optimizer: object, with_gradient: Set[str], *,
                  sparse: Mapping[str, torch.Tensor] | None = None,
                  settings: OptimizerSettings | None = None) -> OptimizerTrace | None:
        """Memory of the steps of an optimizer; `None` without one.

        `with_gradient`: names of the parameters that have a gradient.  The other arguments and the
        errors are those of `graph_capture.optimizer.step.trace_optimizer_steps`.
        """
        if optimizer is None:
            return None
        if self.layout is not None:
            found = replace(trace_optimizer_steps(*self.layout.share_of(optimizer),
                                                  settings=settings, workspace=self.workspace),
                            parameters=frozenset(self.fake_copy.parameters))
            return found if self.layout.holds_optimizer else found.without_memory()
        found = trace_optimizer_steps(optimizer, self.fake_copy, with_gradient=with_gradient,
                                      sparse=sparse, settings=settings, workspace=self.workspace)
        # Where gradients are left for the end, no parameter's step takes more than in the whole.
        return found.in_backward() if self.early and with_gradient <= self.early.keys() else found

    def plain_step(self, loss_fn: LossFn | None, with_gradient: Set[str] = frozenset()
                   ) -> EagerStep:
        """The step as plain PyTorch runs it."""
        return trace_eager_step(
            self.fake_copy, loss_fn, workspace=self.workspace, with_gradient=with_gradient,
            holds_output=self.holds_output, wrapper=self.wrapper)


class PlainLoop:
    """Model, batch and loss of a loop, and the memory of each of its parts."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...] = (),
                 kwargs: Mapping[str, Any] | None = None, *, loss_fn: LossFn | None = None,
                 device: torch.device | str | None = None, probe: bool = True,
                 gpu: str | Gpu | None = None,
                 autocast: torch.dtype | None = None, grad_scaler: bool = False,
                 holds_output: bool = True,
                 make_layout: Callable[[FakeCopy], RankLayout] | None = None,
                 in_backward_of: object = None) -> None:
        """`autocast`: forward and loss run within `torch.autocast` to this dtype.  `make_layout`:
        the loop is that of one rank of a data-parallel run.  `holds_output`: as for
        `trace_micro_batch`.  `gpu`: as for `compute_capability`.  `in_backward_of`: the optimizer
        that hooks of the parameters step, freeing the gradients; `None`: it steps at the end.  The
        other arguments are those of `make_fake_copy` and `OpCosts`.

        Raises `CaptureError` if no fake copy of the model can be made.
        """
        self.fake_copy = replace(make_fake_copy(model, args, kwargs, device=device,
                                                extra=() if loss_fn is None else (loss_fn,),
                                                capability=compute_capability(
                                                    device_planned_for(model, device), gpu)),
                                 autocast=autocast)
        self.gpu = gpu
        """The named GPU, if any."""
        self.layout = None if make_layout is None else make_layout(self.fake_copy)
        """That of the rank, if any."""
        self._costs = OpCosts(self.fake_copy.device, probe=probe, gpu=gpu)
        self._scaled = grad_scaler
        self._micro_batches: dict[frozenset[str], MicroBatch] = {}
        self._tracing = Tracing(
            self.fake_copy, None if loss_fn is None else self.fake_copy.extra[0],
            self._costs.workspace_bytes, holds_output, self.layout,
            {} if in_backward_of is None else early_gradients(
                in_backward_of, self.fake_copy, self._costs.workspace_bytes))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about the traces made so far."""
        notes = []
        if any(not step.storage_less for step in self._micro_batches.values()):
            notes.append("the model's code does not run on plain tensors without values; it was "
                         "traced on fake ones, which some libraries treat in another way")
        if self.fake_copy.kernels is not None:
            notes += self.fake_copy.kernels.notes()
        return (*notes, *self._costs.notes)

    def resident(self) -> tuple[Block, ...]:
        """Parameters, buffers and inputs, a block for each storage."""
        layout = self.layout
        return resident_blocks(
            self.fake_copy, self.fake_copy.resident if layout is None else layout.resident,
            is_sharded=layout is not None)

    @without_watches()
    @quiet_fake_tensors()
    def micro_batch(self, with_gradient: frozenset[str] = frozenset()) -> MicroBatch:
        """Trace forward, loss and backward, with earlier gradients for the parameters of these
        names.

        Raises `CaptureError` if the step cannot be traced.
        """
        growing = with_gradient and self.micro_batch().sparse_gradients.keys() & with_gradient
        if growing:
            raise CaptureError(
                f"the gradient of {min(growing)} is sparse, and grows with each micro-batch: it is "
                "followed with accumulation=1 and set_to_none=True only")
        if with_gradient not in self._micro_batches:
            with _explained("the training step"):
                self._micro_batches[with_gradient] = trace_micro_batch(
                    self.fake_copy, self._tracing.loss_fn, workspace=self._tracing.workspace,
                    with_gradient=with_gradient, scaled=self._scaled,
                    holds_output=self._tracing.holds_output, wrapper=self._tracing.wrapper)
        return self._micro_batches[with_gradient]

    @without_watches()
    @quiet_fake_tensors()
    def inference(self) -> MemoryTrace:
        """The forward in `eval()` mode without gradients, until its output is computed."""
        with _explained("the forward without gradients"):
            return run_without_data(self.fake_copy, None, self._trace_inference)

    @without_watches()
    @quiet_fake_tensors()
    def optimizer(self, optimizer: object, settings: OptimizerSettings | None = None
                  ) -> OptimizerTrace | None:
        """As `Tracing.optimizer`; the parameters that a micro-batch reaches have gradients."""
        batch = self.micro_batch()
        return self._tracing.optimizer(optimizer, batch.with_gradient,
                                       sparse=batch.sparse_gradients, settings=settings)

    def _trace_inference(self, fake_copy: FakeCopy, _: LossFn | None, __: bool) -> MemoryTrace:
        locate = ModuleLocator(fake_copy.model)
        tracker = MemoryTracker(
            self._costs.workspace_bytes, device=fake_copy.device,
            trace_device=fake_copy.trace_device, resident=fake_copy.fake_of.values(),
            module_of_op=locate)
        with (_evaluating(fake_copy.model), torch.no_grad(), fake_copy.as_on_device(),
              fake_copy.forward_context(), locate):
            with fake_copy.mode, tracker:
                args, kwargs = fake_copy.arguments()
                output = fake_copy.model(*args, **kwargs)
            tracker.close()
            del output
        torch.clear_autocast_cache()
        return tracker.trace(lambda number: Category.ACTIVATIONS)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in `eval()` mode; afterwards each module is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{what} fails on fake tensors: {type(error).__name__}: {error}"
                           ) from error
