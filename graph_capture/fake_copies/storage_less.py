"""Plain tensors without memory, for code and autograd that treat fake tensors differently.

The model of the world: to the model's Python code and to autograd a storage-less tensor is an
ordinary `torch.Tensor`, on the CPU or on a GPU that is present.  Only its storage points to a
shared page of zeros, and a dispatch mode answers each op with another storage-less tensor of the
shape that a fake tensor would have.  On the CPU the zeros are a private mapping, whose pages the
system shares; on a GPU a range of addresses refers to the same 2 MiB of memory over and over
(CUDA's virtual memory management).  Small inputs and buffers keep their values, and ops on known
values run, so that code may read masks and positions as in a real step. (transformers, for
one, drops a mask of ones unless it sees a fake tensor.)

Blind spots: a value that depends on the weights is unknown, and asking for it is an error; code
that reads memory without the dispatcher reads zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from planner._graph_capture.errors import CaptureError, DataDependentValue
from planner._graph_capture.fake_copies.fake import FakeCopier, FakeCopy, fake_copy_by
from planner._graph_capture.joint_graph.joint import tensors_of
from planner._graph_capture.joint_graph.reduced_losses import in_its_storage
from planner._graph_capture.memory.sparse import MAKE_SPARSE, is_sparse, leaves_of, run_sparse
from planner._graph_capture.torch_compat import (
    KNOWN_BYTES,
    FakeTensor,
    FakeTensorMode,
    InfraMode,
    NoStaticShape,
    OpOverload,
    Place,
    fake_tensor,
    has_discrete_values,
    is_small_input,
    is_zero_tensor,
    may_be_known,
    no_active_modes,
    of_class,
    pytree,
    running_node_number,
    runs_its_own_ops,
    schema_of,
    spanned_elements,
    storage_at,
    storage_key,
    tensor_in_storage,
    written_tensors,
)
from planner._graph_capture.torch_compat.dispatch import as_composed, may_copy
from planner._graph_capture.user_code import running_place

_EMPTY = frozenset({
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default})
"""Ops whose results have no values yet; code may write known values into results of integers and
read them."""

VALUE_OPS = frozenset({
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default})
"""Ops that return the value of a tensor to Python."""


_ASSIGNS = frozenset({
    torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default, torch.ops.aten._unsafe_index_put.default})


def makes_size_by_values(func: Any, args: tuple[Any, ...]) -> bool:
    """True if the size of the op's result depends on values of operands."""
    if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
        return False
    return func is not torch.ops.aten.index.Tensor or bool(_masks(args))


def assigns_by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """True if the op assigns to what masks select, whose gradient its backward selects."""
    return func in _ASSIGNS and bool(_masks(args))


def _masks(args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """The masks among the indices of an op that selects."""
    return tuple(index for index in args[1]
                 if index is not None and index.dtype in (torch.bool, torch.uint8))


def _selection(args: tuple[Any, ...]) -> object:
    """What an assignment by masks and the gradient of what it assigns have in common."""
    return args[0].shape, args[0].dtype, tuple(
        None if index is None else storage_key(index) for index in args[1])


@dataclass(frozen=True, slots=True)
class Answer:
    """The value that one op call returned to Python."""

    op: OpOverload
    operands: tuple[tuple[torch.Size, torch.dtype], ...] | None
    """Shapes and dtypes of the tensor operands; `None`: any."""
    value: Any
    place: tuple[str, int] | None = None
    """File and line of the code that asked; `None`: any."""

    @classmethod
    def of(cls, op: OpOverload, args: tuple[Any, ...], value: Any) -> Answer:
        """The answer of a call with these arguments, by the code that runs."""
        # Selections are made by compiled code, too, which stands at no place.
        return cls(op, _operands(args), value, running_place() if op in VALUE_OPS else None)

    def is_for(self, op: OpOverload, args: tuple[Any, ...]) -> bool:
        """True if the answer may be that of this call."""
        return self.op is op and (self.operands is None or self.operands == _operands(args))

    @property
    def most_selected(self) -> int:
        """The number of elements that a mask among the operands has, or any of them."""
        operands = self.operands or ()
        masks = [shape for shape, dtype in operands if dtype in (torch.bool, torch.uint8)]
        return max((shape.numel() for shape in masks or [shape for shape, _ in operands]),
                   default=0)


def _operands(args: tuple[Any, ...]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(args))


_CPU = torch.device("cpu")
_KNOWN_FRACTIONS_BYTES = 1 << 20
"""Inputs and buffers of floating-point numbers keep their values up to this size together.  The
copies are real memory in the first step, and code seldom decides by larger ones."""


def may_be_storage_less(fake_copy: FakeCopy) -> bool:
    """True if `storage_less_copy` works on the device that the fake copy is traced on."""
    device = fake_copy.trace_device
    try:
        return device.type in ("cpu", "cuda") and zeros_on(device).address(1) > 0
    except (OSError, AttributeError):  # no such driver, or an old one
        return False


def storage_less_copy(fake_copy: FakeCopy, extra: tuple[Any, ...] = (), *,
                      unknown_is_zero: bool = False, device: torch.device | None = None
                      ) -> FakeCopy:
    """A copy of a fake copy with storage-less tensors in place of fake tensors.

    `extra`: further objects that refer to the fake copy's tensors; their copies come last in the
    result's `extra`.  Integer inputs and buffers have the values of the originals of `fake_copy` if
    those are still alive.  `unknown_is_zero`: code that asks for an unknown value gets 0 instead of
    an error.  `device`: that of the copy, by default the one that the fake copy is traced on.
    """
    device = device or fake_copy.trace_device
    # The number of rows of a sparse gradient depends on values, which are then not assumed.
    is_sparse = any(getattr(module, "sparse", False) is True
                    for module in fake_copy.model.modules())
    copier = StorageLessCopier(fake_copy.originals(), device, unknown_is_zero=unknown_is_zero,
                               planned=None if device.type == "cuda" else fake_copy.device,
                               assumes_values=not is_sparse)
    if fake_copy.answers is not None:
        fake_copy.attributes.put_back()
    made = fake_copy_by(
        copier, fake_copy.model, fake_copy.args, fake_copy.kwargs, (*fake_copy.extra, *extra),
        fake_copy.device)
    return replace(
        made, answers=fake_copy.answers, autocast=fake_copy.autocast, kernels=fake_copy.kernels,
        dice=fake_copy.dice, outside=fake_copy.outside, skipped=fake_copy.skipped,
        copied=fake_copy)


class StorageLessMode(InfraMode):
    """Runs ops on known values, and answers all others with storage-less tensors."""

    def __init__(self, *, unknown_is_zero: bool = False, planned: torch.device | None = None
                 ) -> None:
        """`planned`: the device whose kernels answer, while results are on the CPU; `None`: the
        results' own."""
        super().__init__()
        self._planned = planned
        self.told_values = False
        """True if code has asked for a value that is known."""
        self._unknown_is_zero = unknown_is_zero
        self._answers: list[Answer] | None = None
        self._numbers: list[Answer] = []
        self._nothing_is_known = False
        # What assignments by masks select; a key may be reused.
        self._selected: dict[object, tuple[Callable[[], object], Answer]] = {}
        self._fakes = FakeTensorMode()
        self._results: dict[object, Any] = {}  # fake results, by signature of the op
        # Real storages into which an unknown value was written; a key may be reused.
        self._overwritten: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def answer_with(self, answers: Iterable[Answer]) -> None:
        """Answer later requests for values, and ops whose result size depends on values, from
        `answers`.

        Each request gets the next answer that matches its call; answers in between are skipped,
        since code asks for less where it sees that it is captured.  Without a match the request
        raises `DataDependentValue`.
        """
        self._answers = list(answers)
        self._numbers = [answer for answer in self._answers if answer.op in VALUE_OPS]

    def number_at(self, place: Place) -> Any:
        """The next number that code at a place takes of a tensor; `None`: it is not known."""
        for number, answer in enumerate(self._numbers):
            if answer.place == place:
                return self._numbers.pop(number).value
        return None

    @contextlib.contextmanager
    def without_values(self) -> Iterator[None]:
        """Inside, no op runs, even on known values: for code that writes tensors without the
        dispatcher."""
        before, self._nothing_is_known = self._nothing_is_known, True
        try:
            yield
        finally:
            self._nothing_is_known = before

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if runs_its_own_ops(types):
            return NotImplemented
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise CaptureError(f"cannot trace the higher-order op {func} without data")
        if may_copy(func):
            with self:
                return as_composed(func)(*args, **kwargs)
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)  # touches no data
        leaves = leaves_of((args, kwargs))
        if func is MAKE_SPARSE or any(map(is_sparse, leaves)):
            return run_sparse(func, args, dict(kwargs), self._known, self._without_data)
        known = not self._nothing_is_known and all(
            self._known(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        if func in VALUE_OPS:
            # What hooks of the backward look at, or log, is 0.
            may_be_zero = self._unknown_is_zero or running_node_number() is not None
            if self._answers is not None:
                with (contextlib.suppress(DataDependentValue) if may_be_zero
                      else contextlib.nullcontext()):
                    return self._answer_of(func, args)
            elif not (known or may_be_zero):
                raise DataDependentValue(
                    "the model's code looks at the value of a tensor that depends on the weights "
                    "or on values that are not given")
            self.told_values |= known
            return func(*args, **kwargs)
        if self._answers is not None and makes_size_by_values(func, args):
            device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
            return pytree.tree_map(lambda leaf: self._without_data(leaf, device),
                                   self._answer_of(func, args))  # made on `meta`
        if self._answers is not None and assigns_by_mask(func, args):
            self._note_selection(func, args)
        if known and torch.Tag.nondeterministic_seeded not in func.tags:
            return self._run_if_small(func, args, kwargs)
        self._note_overwritten(func, args, kwargs)
        return self._answer(func, args, kwargs)

    def _note_selection(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        """Remember what an assignment by masks selects; one of a backward is not known."""
        answer = self._next_answer(func, args)
        if answer is not None:
            self._selected[_selection(args)] = (
                weakref.ref(_masks(args)[0].untyped_storage()), answer)

    def _answer_of(self, func: OpOverload, args: tuple[Any, ...]) -> Any:
        """The value that code asks for, or the result of an op whose size depends on values."""
        if func is torch.ops.aten.index.Tensor and running_node_number() is not None:
            found = self._selected.get(_selection(args))
            if found is not None and found[0]() is not None:
                return found[1].value
        answer = self._next_answer(func, args)
        if answer is None:
            raise DataDependentValue("code asked for more values than are known")
        return answer.value

    def _next_answer(self, func: OpOverload, args: tuple[Any, ...]) -> Answer | None:
        assert self._answers is not None
        here = running_place() if func in VALUE_OPS else None
        fitting = [number for number, answer in enumerate(self._answers)
                   if answer.is_for(func, args)]
        if not fitting:
            return None
        # An op such as one_hot asks by itself, and not where it is captured.  The place may be
        # wrong in code that Dynamo has made, which does not skip what selects.
        selects = next((number for number, answer in enumerate(self._answers)
                        if answer.op not in VALUE_OPS), len(self._answers))
        near = [number for number in fitting if number < selects] or fitting
        number = next((number for number in near
                       if self._answers[number].place in (None, here)), near[0])
        answer = self._answers[number]
        del self._answers[:number + 1]
        return answer

    def _note_overwritten(self, func: OpOverload, args: tuple[Any, ...],
                          kwargs: Mapping[str, Any]) -> None:
        for tensor in written_tensors(func, args, kwargs):
            if self._known(tensor):
                self._overwritten[storage_key(tensor)] = weakref.ref(tensor.untyped_storage())

    def _run_if_small(self, func: OpOverload, args: tuple[Any, ...],
                      kwargs: Mapping[str, Any]) -> Any:
        try:
            answer = self._answer(func, args, kwargs)
        except NoStaticShape:
            return func(*args, **kwargs)
        made = tensors_of(answer)
        if func in _EMPTY and all(leaf.is_floating_point() for leaf in made):
            return answer
        if sum(leaf.untyped_storage().nbytes() for leaf in made) <= KNOWN_BYTES:
            return func(*args, **kwargs)
        self._note_overwritten(func, args, kwargs)
        return answer

    def _answer(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The op's result, without values."""
        if args and _returns_what_it_writes(func):
            return args[0]
        key = _signature(func, args, kwargs)
        known = self._results.get(key)
        if known is not None:
            return pytree.tree_map(self._without_data, known)
        return self._run_on_fakes(func, args, kwargs, key)

    def _run_on_fakes(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                      key: object) -> Any:
        originals: dict[int, torch.Tensor] = {}  # by identity of the fake tensor
        storages: dict[int, torch.UntypedStorage] = {}  # meta storage, by key of the original
        owners: dict[int, torch.Tensor] = {}  # a tensor of each storage, by key of the meta one
        of_operands = False

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            key = storage_key(leaf)
            if key not in storages:
                storages[key] = torch.UntypedStorage(leaf.untyped_storage().nbytes(), device="meta")
            made = fake_tensor(self._fakes, tensor_in_storage(storages[key], leaf),
                               self._planned or leaf.device)
            originals[id(made)] = leaf
            owners[storage_key(made)] = leaf
            return made

        def answer(leaf: Any) -> Any:
            nonlocal of_operands
            if not isinstance(leaf, torch.Tensor):
                return leaf
            owner = owners.get(storage_key(leaf))
            of_operands = of_operands or owner is not None
            if id(leaf) in originals:
                return originals[id(leaf)]
            if owner is not None:  # an alias, though the op is no view by its schema
                return owner.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
            return self._without_data(leaf)

        fake_args, fake_kwargs = pytree.tree_map(fake, (args, dict(kwargs)))
        with self._fakes:
            out = in_its_storage(func, fake_args, fake_kwargs, func(*fake_args, **fake_kwargs))
        result = pytree.tree_map(answer, out)
        if key is not None and not of_operands:
            self._results[key] = out
        return result

    def _without_data(self, leaf: Any, device: torch.device | None = None) -> Any:
        """A storage-less tensor with a new storage in the place of a fake one."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        device = device or leaf.device
        is_on_gpu = self._planned is None and device.type == "cuda"
        return tensor_in_storage(storage_less_storage(
            leaf.untyped_storage().nbytes(), device if is_on_gpu else _CPU), leaf)

    def _known(self, tensor: torch.Tensor) -> bool:
        overwritten = self._overwritten.get(storage_key(tensor))
        return not (is_storage_less(tensor)
                    or (overwritten is not None and overwritten() is not None))


def _returns_what_it_writes(func: OpOverload) -> bool:
    """True if an op only writes its first operand and returns it."""
    schema = schema_of(func)
    if not schema.name.endswith("_") or len(schema.returns) != 1:
        return False
    written = [position for position, argument in enumerate(schema.arguments)
               if argument.alias_info is not None and argument.alias_info.is_write]
    return (written == [0] and schema.returns[0].alias_info is not None
            and isinstance(schema.returns[0].type, torch.TensorType))


def _signature(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Cache key of the layout of an op's results; `None` if they may be operands."""
    if schema_of(func).is_mutable:
        return None
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    words: list[object] = [func, structure]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            words += (leaf.dtype, leaf.device, leaf.size(), leaf.stride(), leaf.storage_offset())
        elif isinstance(leaf, torch.ScriptObject):
            return None
        else:
            words += (type(leaf), leaf)
    try:
        hash(key := tuple(words))
    except TypeError:  # an argument that cannot be compared
        return None
    return key


def storage_less_storage(size_bytes: int, device: torch.device = _CPU) -> torch.UntypedStorage:
    """A new storage that points to shared zeros and uses no memory."""
    return storage_at(zeros_on(device).address(size_bytes), size_bytes, device)


def is_storage_less(tensor: torch.Tensor) -> bool:
    """True if the tensor's storage is one of `storage_less_storage`."""
    return not is_zero_tensor(tensor) and zeros_on(tensor.device).holds(
        tensor.untyped_storage().data_ptr())


class StorageLessCopier(FakeCopier):
    """Deep copies in which each tensor becomes storage-less, except for small known values."""

    def __init__(self, original_of: Mapping[int, torch.Tensor], device: torch.device = _CPU, *,
                 unknown_is_zero: bool = False, planned: torch.device | None = None,
                 assumes_values: bool = False) -> None:
        """`original_of`: by identity of a fake tensor, the tensor with its value; `planned`: as for
        `StorageLessMode`; `assumes_values`: inputs without values are taken for ones."""
        self._original_of, self._unknown_is_zero = original_of, unknown_is_zero
        self._assumes_values = assumes_values
        self._planned = planned
        self._is_input = False
        self._buffers: frozenset[int] = frozenset()
        self._known_bytes = 0  # of numbers that are not integers
        super().__init__(device)

    def module(self, model: nn.Module) -> nn.Module:
        self._buffers = frozenset(map(id, model.buffers()))
        return super().module(model)

    def tree(self, value: Any, what: str) -> Any:
        self._is_input = True
        try:
            return super().tree(value, what)
        finally:
            self._is_input = False

    def new_mode(self) -> StorageLessMode:
        return StorageLessMode(unknown_is_zero=self._unknown_is_zero, planned=self._planned)

    def new_storage(self, size_bytes: int) -> torch.UntypedStorage:
        return storage_less_storage(size_bytes, self.device)

    def new_tensor(self, like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        return tensor_in_storage(storage, like)

    def of_class(self, plain: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
        return of_class(plain, kind)

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        original = self._original_of.get(id(real), real)
        is_assumed = (self._assumes_values and self._is_input and original.is_meta
                      and not isinstance(original, FakeTensor) and may_be_known(original))
        if real not in self.fake_of and (is_assumed or _worth_knowing(original)):
            # An input without values: `graph_capture.fake_copies.input_values`.
            known = (assumed_value(original, self.device) if is_assumed
                     else _copied(original.detach(), self.device))
            self.fake_of[real] = self.memo[id(real)] = known.requires_grad_(original.requires_grad)
            self.storage_bytes[storage_key(known)] = real.untyped_storage().nbytes()
        elif original is not real and real not in self.fake_of:
            self._keep_values(real, original)
        return super().tensor(real)

    def _keep_values(self, real: torch.Tensor, original: torch.Tensor) -> None:
        """Let the copy of a small input or buffer that is not of integers have its values."""
        storage, key = original.untyped_storage(), storage_key(real)
        total = self._known_bytes + storage.nbytes()
        if (not (self._is_input or id(real) in self._buffers) or key in self._storages
                or original.device.type not in ("cpu", "cuda") or not is_small_input(original)
                or isinstance(original, FakeTensor) or is_storage_less(original)
                or total > _KNOWN_FRACTIONS_BYTES):
            return
        self._known_bytes = total
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._storages[key] = whole.to(self.device, copy=True).untyped_storage()
        self._alive.append(real.untyped_storage())


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides, of the part of the storage that the tensor reaches."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.to(device, copy=True)
    reached = tensor.as_strided((spanned_elements(tensor),), (1,)).to(device, copy=True)
    return reached.as_strided(tensor.size(), tensor.stride(), 0)


def assumed_value(tensor: torch.Tensor, device: torch.device = _CPU) -> torch.Tensor:
    """Value that a small input without values is taken for: ones."""
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)


def _worth_knowing(tensor: torch.Tensor) -> bool:
    return (tensor.device.type in ("cpu", "cuda") and has_discrete_values(tensor)
            and not isinstance(tensor, FakeTensor | nn.Parameter))


_LEAST_BYTES = 1 << 30
_PINNED_MEMORY, _OF_DEVICE, _READ_AND_WRITE, _LEAST_GRANULARITY = 1, 1, 3, 0


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Allocation(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (("kind", ctypes.c_int), ("handle_kinds", ctypes.c_int), ("location", _Location),
                ("unused", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8))


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Zeros:
    """Pages of zeros on one device, each large enough for the storages that point to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: list[tuple[int, int]] = []  # size, address
        self._owners: list[object] = []
        self._handle: ctypes.c_ulonglong | None = None  # the memory on a GPU
        self._step = 0

    def address(self, size_bytes: int) -> int:
        """Address of at least `size_bytes` zeros.  Raises `OSError` where the GPU has none."""
        for size, address in self._pages:
            if size >= size_bytes:
                return address
        size = max(_LEAST_BYTES, 2 * size_bytes)
        address = self._mapped(size) if self._device.type == "cpu" else self._mapped_on_gpu(size)
        self._pages.append((size, address))
        return address

    def holds(self, address: int) -> bool:
        """True if the address is that of such a page."""
        return any(address == page for _, page in self._pages)

    def _mapped(self, size_bytes: int) -> int:
        owner = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                          prot=mmap.PROT_READ)
        self._owners.append(owner)
        return int(np.frombuffer(owner, dtype=np.uint8).ctypes.data)

    def _mapped_on_gpu(self, size_bytes: int) -> int:
        place = _Location(_OF_DEVICE, self._device.index or 0)
        if self._handle is None:
            torch.cuda.init()
            how, step = _Allocation(_PINNED_MEMORY, 0, place), ctypes.c_size_t()
            _driver("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(how),
                    _LEAST_GRANULARITY)
            handle = ctypes.c_ulonglong()
            _driver("cuMemCreate", ctypes.byref(handle), step, ctypes.byref(how),
                    ctypes.c_ulonglong(0))
            self._handle, self._step = handle, step.value
        size = -(-size_bytes // self._step) * self._step
        address = ctypes.c_ulonglong()
        _driver("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size),
                ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))
        for begin in range(address.value, address.value + size, self._step):
            _driver("cuMemMap", ctypes.c_ulonglong(begin), ctypes.c_size_t(self._step),
                    ctypes.c_size_t(0), self._handle, ctypes.c_ulonglong(0))
        access = _Access(place, _READ_AND_WRITE)
        _driver("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(access),
                ctypes.c_size_t(1))
        with no_active_modes():
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(
                storage_at(address.value, self._step, self._device)).zero_()
        return address.value


def _driver(name: str, *arguments: object) -> None:
    """Call a function of CUDA's driver; raises `OSError` if it fails."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise OSError(f"{name} of CUDA's driver failed with status {status}")


zeros_on = functools.cache(Zeros)
"""The zeros of a device, which are never released: storages outlive everything else."""
