"""Tracks the lifetimes of storages while code runs on fake tensors under autograd.

The model of the world: memory changes when an op makes a storage, and when the last reference to a
storage goes: that of a Python variable, a saved tensor, autograd's buffers.  Storages are tracked
by weak references, as `torch.distributed._tools.MemTracker` does, and while an op runs its
workspace counts as well.

Autograd treats fake tensors differently in two places that matter: it sums the gradients of a
tensor that is used twice, and scatters the gradient of `gather`, in place for plain tensors, and
makes another tensor for a subclass.  The tracker writes in place where autograd would have.

An op belongs to the innermost running module; in the backward, to the module that was running when
autograd numbered its node in the forward.

Blind spots: a node made outside of every module belongs to none, and sums that autograd computes
between two nodes to the next node's; the formula of a rare derivative (`prod` over all elements)
that autograd also writes differently for subclasses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from planner._graph_capture.joint_graph.reduced_losses import in_its_storage
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.memory.trace import Block, MemoryTrace, OpRun
from planner._graph_capture.torch_compat import (
    GradientsInPlace,
    InfraMode,
    OpOverload,
    active_modes,
    bytes_made_before,
    is_zero_tensor,
    next_node_number,
    running_node_number,
    runs_its_own_ops,
    schema_of,
    storage_key,
)
from planner._graph_capture.torch_compat.dispatch import as_composed, may_copy
from planner._graph_capture.training_graph import Category

Workspace = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any], Any], int]
"""Bytes of temporary memory of an op, e.g. `OpProbe.workspace_bytes`."""


class MemoryTracker(InfraMode):
    """Log of the storages made and released on one device; must be entered above the fake mode."""

    def __init__(self, workspace: Workspace, *, device: torch.device, trace_device: torch.device,
                 resident: Iterable[torch.Tensor],
                 module_of_op: Callable[[], str] = lambda: "") -> None:
        """`device`: the one planned for, whose allocator determines sizes; `trace_device`: the
        device of the fake tensors.  `resident`: tensors that do not count.  `module_of_op`: called
        while an op runs, returns the name of its module."""
        super().__init__()
        self._workspace, self._device, self._trace_device = workspace, device, trace_device
        self._module_of_op = module_of_op
        # By key, as long as they live: later another storage may have the same key.
        self._resident: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in strided_tensors(list(resident)):
            self._leave_out(tensor)
        self._number_of: dict[int, int] = {}  # key of a live storage -> its number
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: list[int] = []  # by number; workspace has a number too
        self._makers: list[tuple[str, str]] = []  # op and module, by number
        self._workspaces: set[int] = set()
        self._events: list[int] = []  # as in `MemoryTrace`
        self._runs: list[OpRun] = []
        self._running = ("", "")
        self._in_place = GradientsInPlace()
        self._first_of_backward: int | None = None
        self.is_closed = False
        """True if it no longer takes notice."""
        self.kind_of: dict[int, Category] = {}
        """Kinds of the buffers that `make_buffer` allocated, by number."""
        self.live_bytes = 0
        """Bytes of the storages alive now."""
        self.peak_bytes = 0
        """Maximum since the tracker was made or `restart_peak` was called, workspace included."""

    @property
    def event_count(self) -> int:
        """Number of events so far: a moment of the trace."""
        return len(self._events)

    def follow(self, tensor: torch.Tensor) -> None:
        """From here on also count a tensor that was made outside the tracker."""
        for part in strided_tensors([tensor]):
            self._resident.pop(storage_key(part), None)
            self._follow(part)

    def _leave_out(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        self._resident[key] = weakref.ref(
            tensor.untyped_storage(), lambda _: self._resident.pop(key, None))

    def restart_peak(self) -> None:
        """Restart the peak from the current memory."""
        self.peak_bytes = self.live_bytes

    def start_of_backward(self) -> int:
        """From here on autograd's engine runs; returns the number of events so far."""
        self._first_of_backward = len(self._sizes)
        return self.event_count

    def close(self) -> None:
        """Ignore all later releases."""
        self.is_closed = True

    def leave(self) -> bool:
        """Leave the mode, where nothing was entered above it; return whether it is left."""
        modes = active_modes()
        if self in modes and modes[-1] is not self:
            return False
        if self in modes:
            self.__exit__(None, None, None)
        return True

    def make_buffer(self, size_bytes: int, kind: Category) -> torch.Tensor:
        """Allocate a buffer of data parallelism, and note its kind."""
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self._trace_device)
        number = self.number_of(buffer)
        assert number is not None
        self.kind_of[number] = kind
        return buffer

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the tensor's storage, in the order in which storages were made."""
        return self._number_of.get(storage_key(tensor))

    def numbers_of(self, tree: Any) -> list[int]:
        """Numbers of the storages of all tensors in a tree, also of sparse ones."""
        return [number for tensor in strided_tensors(tree)
                if (number := self.number_of(tensor)) is not None]

    def live_numbers(self) -> set[int]:
        """Numbers of the storages alive now."""
        return set(self._references)

    def categories(self, gradients: Collection[int | None], seeds: Collection[int | None]
                   ) -> Callable[[int], Category]:
        """The category of a storage of forward, loss and backward, by number; `gradients`: numbers
        of the parameters' gradients, `seeds`: of the cotangents with which the backward starts."""
        def category_of(number: int) -> Category:
            if number in gradients:
                return Category.GRADIENTS
            assert self._first_of_backward is not None
            return self.kind_of.get(number, (
                Category.TEMPORARIES if number >= self._first_of_backward or number in seeds
                else Category.ACTIVATIONS))

        return category_of

    def trace(self, category_of: Callable[[int], Category],
              labels: Mapping[int, str] | None = None) -> MemoryTrace:
        """The trace so far; `category_of`: the category of a storage by number (workspace is
        temporary)."""
        labels = labels or {}
        return MemoryTrace(
            tuple(Block(size, Category.TEMPORARIES if number in self._workspaces
                        else category_of(number), op, module, labels.get(number, ""))
                  for number, (size, (op, module))
                  in enumerate(zip(self._sizes, self._makers, strict=True))),
            tuple(self._events), tuple(self._runs))

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if runs_its_own_ops(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        func = self._in_place.op_for(func, args)
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if may_copy(func):
            with self:
                return as_composed(func)(*args, **kwargs)
        begun = len(self._events)
        self._running = (str(func.overloadpacket), self._module_of_op())
        out = in_its_storage(func, args, kwargs, func(*args, **kwargs))
        if func is torch.ops.aten.lift_fresh.default:
            # Made from Python numbers, which no other op reports.  A single one, such as an
            # optimizer's count of steps, stays in host memory unless it is moved.
            if out.dim() or self._device.type == self._trace_device.type:
                self._follow(out)
        elif not func.is_view:
            self._follow_new(func, args, kwargs, out)
        workspace = self._workspace(func, args, kwargs, out) + self._made_before(func, args)
        if not func.is_view:
            self._note_run(begun, (args, kwargs, out), workspace)
        return out

    def _made_before(self, func: OpOverload, args: tuple[Any, ...]) -> int:
        """Bytes alive while an op runs, though under a mode they are allocated after it."""
        return bytes_made_before(func, args) if self._device.type == "cpu" else 0

    def _note_run(self, begun: int, values: object, workspace_bytes: int) -> None:
        if workspace_bytes:
            number = self._new_number(workspace_bytes)
            self._workspaces.add(number)
            self._events += (number, ~number)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes)
        if workspace_bytes or any(True for _ in self.numbers_of(values)):
            self._runs.append(OpRun(begun, *self._running))

    def _follow_new(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                    out: Any) -> None:
        # An in-place result is no new storage, even if it was made outside the tracker.
        written = ({storage_key(tensor) for tensor in strided_tensors((args, kwargs))}
                   if schema_of(func).is_mutable else ())
        for tensor in strided_tensors(out):
            if storage_key(tensor) not in written:
                self._follow(tensor)

    def _follow(self, tensor: torch.Tensor) -> None:
        if (tensor.device.type != self._trace_device.type or tensor.layout is not torch.strided
                or is_zero_tensor(tensor)):
            return
        key = storage_key(tensor)
        if key not in self._number_of and key not in self._resident:
            self._follow_storage(key, tensor.untyped_storage())

    def _follow_storage(self, key: int, storage: torch.UntypedStorage) -> None:
        size = allocated_bytes(storage.nbytes(), self._device)
        number = self._new_number(size)
        self._number_of[key] = number
        self._references[number] = weakref.ref(storage, lambda _: self._released(key, number))
        self._events.append(number)
        self._change(number, size)

    def _new_number(self, size_bytes: int) -> int:
        self._sizes.append(size_bytes)
        self._makers.append(self._running)
        return len(self._sizes) - 1

    def _released(self, key: int, number: int) -> None:
        if self.is_closed:
            return
        del self._number_of[key], self._references[number]
        self._events.append(~number)
        self._change(number, -self._sizes[number])

    def _change(self, number: int, change: int) -> None:
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class ModuleLocator:
    """Tracks the running modules of one model; a context in which they run."""

    def __init__(self, model: nn.Module) -> None:
        self._name_of = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._of_node: dict[int, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleLocator:
        self._running.clear()
        # Hooks for all modules rather than on each: the model stays as it is.
        self._handles = [register_module_forward_pre_hook(self._enter),
                         register_module_forward_hook(self._leave, always_call=True)]
        return self

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self) -> str:
        """The qualified name of the module of the op that runs now; for a module that is not the
        model's, such as a loss, its class."""
        node = running_node_number()
        if node is not None and not self._running:
            return self._of_node.get(node, "")
        name = self._running[-1] if self._running else ""
        # The node was numbered just before its op runs; later ops may have no node of their own.
        self._of_node.setdefault(next_node_number() - 1, name)
        return name

    def _enter(self, module: nn.Module, args: object) -> None:
        self._running.append(self._name_of.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, args: object, result: object) -> None:
        if self._running:
            self._running.pop()
