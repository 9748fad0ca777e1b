"""Private names of torch that the memory breakdown needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._ops import OpOverload

# `FakeTensor` and its mode are private by module path only: there is no public way to trace a model
# without allocating its memory.  `TorchDispatchMode` and `is_traceable_wrapper_subclass` are
# documented, and private by path too.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.fake_tensor import (
    UnsupportedOperatorException as UnsupportedOperatorException,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

from planner._graph_capture.torch_compat.symbols import is_dense

# Errors of a fake tensor for an op whose result has a shape that depends on values.
NoStaticShape = (DynamicOutputShapeException, DataDependentOutputException)

# The function that a `TorchFunctionMode` sees when `Parameter.__deepcopy__` clones the data.
tensor_clone = torch._C.TensorBase.clone


def fake_tensor(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor on `device` that shares the storage object of `meta`, a tensor on the meta
    device.

    `FakeTensorMode.from_tensor` keeps the device of the tensor that it copies, and so cannot place
    a model that is on `meta` or on another device.
    """
    return FakeTensor(mode, meta, device)


def tensor_in_storage(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor in `storage` with the layout of `like`."""
    return torch.empty(0, dtype=like.dtype, device=storage.device).set_(
        storage, like.storage_offset(), like.size(), like.stride())


def no_active_modes() -> AbstractContextManager[object]:
    """Inside, real ops run, whatever fake, proxy or tracing mode is active outside.

    A mode can be left only by its owner, except through `_disable_current_modes`, which torch uses
    for the same purpose.
    """
    return _disable_current_modes()


class InfraMode(TorchDispatchMode):
    """A dispatch mode under which Dynamo compiles code, and runs what it has compiled."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


def active_modes() -> list[TorchDispatchMode]:
    """The active dispatch modes, the outermost first, to enter again inside of
    `no_active_modes`."""
    return _get_current_dispatch_mode_stack()


def no_subclass_functions() -> AbstractContextManager[object]:
    """Inside, `__torch_function__` of subclasses is not called, while modes still are."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_at(address: int, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over memory of another owner.

    `torch.frombuffer` does that for existing memory; this function lets many storages, each with
    its own identity, share one address.
    """
    make: Any = torch._C._construct_storage_from_data_pointer
    storage: torch.UntypedStorage = make(address, device, size_bytes)
    return storage


def hooks_of_gradient(tensor: torch.Tensor) -> dict[int, Any]:
    """Hooks that get a gradient before it is added to others (`register_hook`), by number."""
    return tensor._backward_hooks or {}


def hooks_of_whole_gradient(tensor: torch.Tensor) -> dict[int, Any]:
    """Those that run when it is whole (`register_post_accumulate_grad_hook`)."""
    return tensor._post_accumulate_grad_hooks or {}


@contextmanager
def no_saved_tensors_hooks() -> Iterator[bool]:
    """Inside, autograd saves tensors without hooks; yields true if there are any outside."""
    found = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield bool(found)
    finally:
        for pack, unpack in reversed(found):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """True for the zeros of forward-mode differentiation, which have no memory, and no address."""
    return bool(tensor._is_zerotensor())


def runs_in_backward() -> bool:
    """True inside of autograd's engine."""
    return running_backward() is not None


def running_backward() -> int | None:
    """The number of the backward that runs on this thread; `None` outside of one."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


def spanned_elements(tensor: Any) -> int:
    """Number of elements of a tensor's storage from its first to its last one; also of what
    describes a tensor by `shape` and `stride()`."""
    return 0 if any(size == 0 for size in tensor.shape) else 1 + sum(
        int((size - 1) * stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage: equal for views of one another, while it is alive.

    `data_ptr` is 0 for every fake tensor, and older versions make a new `UntypedStorage` object on
    each access, so only the address of the C++ storage is left.
    """
    return tensor.untyped_storage()._cdata


def is_functional(tensor: torch.Tensor) -> bool:
    """True for AOTAutograd's wrapper around a traced tensor, whose storage has no memory."""
    return torch._is_functional_tensor(tensor)


def of_class(plain: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """`plain` as a tensor of another class, without a call of the class."""
    made: torch.Tensor = torch.Tensor._make_subclass(kind, plain, plain.requires_grad)
    return made


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make a tensor of a subclass a parameter, as `nn.Parameter` does with a copy of it."""
    tensor._is_param = True


def runs_its_own_ops(types: Iterable[type]) -> bool:
    """True if one of these types is a wrapper subclass, whose `__torch_dispatch__` must run before
    a mode sees the ops on the tensors inside."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def next_node_number() -> int:
    """The number that autograd will give to the next graph node made by this thread.

    Torch's own tracing uses it to find the forward op of a node.
    """
    return torch.autograd._get_sequence_nr()


def running_node_number() -> int | None:
    """The number of the node that autograd's engine runs on this thread, `None` outside of a
    backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def runs_again() -> bool:
    """True inside of a backward that runs code of the forward once more under saved-tensor hooks,
    as a checkpoint does: it must save the same tensors as before."""
    return (running_node_number() is not None
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)


def bytes_made_before(op: object, args: tuple[Any, ...]) -> int:
    """Bytes that a derivative on this thread allocates before this op on a CPU, but after it under
    a dispatch mode or for subclass tensors.

    This is the gradient of a maximum over all elements, before those that share it are counted
    (`evenly_distribute_backward` in `torch/csrc/autograd/FunctionsManual.cpp`).
    """
    node: Any = torch._C._current_autograd_node()
    if (node is None or op is not torch.ops.aten.sum.default or args[0].dtype is not torch.bool
            or node.name() not in _EVENLY_DISTRIBUTED):
        return 0
    saved: torch.Tensor = node._saved_self
    return saved.numel() * saved.element_size()


_EVENLY_DISTRIBUTED = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0",
                                 "NanmedianBackward0"})


def profiler_is_running() -> bool:
    """True if a torch profiler is running in this thread."""
    return bool(torch.autograd._profiler_enabled())


def cpu_allocations(*stages: Callable[[], object]) -> list[list[int]]:
    """Bytes of each allocation (positive) and release (negative) of the CPU's allocator while these
    functions run one after the other, for each of them in time order; on the calling thread and on
    those to which torch passes its thread state.

    Allocations of one stage that a later one releases are seen, as in a single run.  A call of
    `begin_stage` begins another stage.

    `torch.profiler.profile`, built from the functions below, records the same events, but spends
    most of its time on unused tables, and gives access to them only by private names.
    """
    if profiler_is_running():
        raise RuntimeError("cannot measure allocations while a profiler is running; stop it first")
    config = torch.autograd.ProfilerConfig(
        torch.autograd.ProfilerState.KINETO, False, True, False, False, False,
        torch._C._profiler._ExperimentalConfig())
    activities = {torch.autograd.ProfilerActivity.CPU}
    with _quiet_kineto():
        torch.autograd._prepare_profiler(config, activities)
        torch.autograd._enable_profiler(config, activities)
        try:
            for number, stage in enumerate(stages):
                if number:
                    begin_stage()
                stage()
        finally:
            result = torch.autograd._disable_profiler()
    sizes: list[list[int]] = [[]]
    live: dict[int, int] = {}
    for event in sorted(_walk(result.experimental_event_tree()),
                        key=lambda event: event.start_time_ns):  # equal times stay in order
        if event.tag == _ALLOCATION:
            if event.typed[1].device.type == "cpu":
                sizes[-1] += _changes(event.typed[1], live)
        elif event.name == _STAGE:
            sizes.append([])
    return sizes


def _changes(block: Any, live: dict[int, int]) -> list[int]:
    """Interpret an event of the allocator by the sizes of the live blocks, by address.

    A block that was allocated within a recording and released after it stays in the profiler's own
    table; the release of another block at the same address then looks like the release of that one.
    A block that an unwatched thread released counts as freed when its address is reused.
    """
    if block.alloc_size > 0:
        gone = live.pop(block.ptr, 0)
        live[block.ptr] = block.alloc_size
        return [-gone, block.alloc_size] if gone else [block.alloc_size]
    return [-live.pop(block.ptr)] if block.ptr in live else []


def _walk(events: Sequence[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


_ALLOCATION = torch._C._profiler._EventType.Allocation
_STAGE = "checkpoint-planner: next stage"


def begin_stage() -> None:
    """Begin another stage while allocations are recorded."""
    with torch.autograd.profiler.record_function(_STAGE):
        pass


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep kineto from writing a line to stderr at each start and stop, unless the user set its log
    level."""
    variable = "KINETO_LOG_LEVEL"
    given = os.environ.get(variable)
    if given is None:
        os.environ[variable] = "99"
    try:
        yield
    finally:
        if given is None:
            del os.environ[variable]


@contextmanager
def undisturbed_autograd() -> Iterator[None]:
    """Inside, autograd saves tensors without hooks of the caller's, and anomaly mode is off: for
    what is traced or tried during the caller's step."""
    with no_saved_tensors_hooks(), torch.autograd.set_detect_anomaly(False):
        yield


_IN_PLACE = {torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor,
             torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default}


class GradientsInPlace:
    """Detects where autograd, without modes, would write a gradient in place.

    If a tensor is used twice, the engine adds the second gradient to the first one if it alone
    refers to it and its storage; the gradient of `gather` is scattered into zeros.  For tensors of
    a subclass, such as fake ones, or under a dispatch mode, both always make another tensor
    (`torch/csrc/autograd/input_buffer.cpp` and `isTensorSubclassLike`).  The reference counts,
    `Tensor._use_count`, `torch._C._storage_Use_Count` and Python's, show if there is no other
    reference.  Their values in that case depend on the version, so they are read from known
    gradients, of fake and of plain tensors.  Of several modes the outermost decides: to the others
    its own references look like those of somebody else.
    """

    _alone: dict[tuple[type, OpOverload], tuple[int, int, int]] | None = None

    def __init__(self) -> None:
        if GradientsInPlace._alone is None:
            with no_active_modes(), FakeTensorMode():
                of_fakes = _counts_of_gradients_held_by_autograd_alone()
            with no_active_modes():
                of_plain = _counts_of_gradients_held_by_autograd_alone()
            GradientsInPlace._alone = {
                **{(FakeTensor, op): counts for op, counts in of_fakes.items()},
                **{(torch.Tensor, op): counts for op, counts in of_plain.items()}}

    def op_for(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The op that autograd would call in the place of `func(*args)`, which a dispatch mode
        sees."""
        written = _IN_PLACE.get(func)
        if written is None or torch.is_grad_enabled() or not runs_in_backward() or not all(
                isinstance(arg, torch.Tensor) for arg in (args[0], args[-1])):
            return func
        counts = _counts_of_first(args)  # before anything here refers to it
        held, added = args[0], args[-1]
        assert GradientsInPlace._alone is not None
        is_alone = (type(held) is type(added) and held.dtype == added.dtype and is_dense(held)
                    and counts == GradientsInPlace._alone.get((type(held), func)))
        is_alike = func is not torch.ops.aten.add.Tensor or (
            len(args) == 2 and held.shape == added.shape)
        return written if is_alone and is_alike else func


def _counts_of_first(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Reference counts of the first argument, a tensor: its own, its storage's and its Python
    object's."""
    tensor = args[0]
    return (*use_counts(tensor), sys.getrefcount(tensor))


def use_counts(tensor: Any) -> tuple[int, int]:
    """Reference counts of a tensor and of its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(storage_key(tensor))


class _CountsOfGradients(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[OpOverload, tuple[int, int, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _IN_PLACE:
            self.seen[func] = _counts_of_first(args)
        return func(*args, **(kwargs or {}))


@undisturbed_autograd()
def _counts_of_gradients_held_by_autograd_alone() -> dict[OpOverload, tuple[int, int, int]]:
    with torch.enable_grad():
        x = torch.empty(3, requires_grad=True)
        hidden = x.exp()
        chosen = hidden.relu().gather(0, torch.zeros(3, dtype=torch.int64))
        out = torch.cat([chosen, hidden.sigmoid()])
        counts = _CountsOfGradients()
        with counts:
            out.backward(torch.empty(6))
    return counts.seen
