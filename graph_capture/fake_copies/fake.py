"""A copy of the user's model and inputs whose tensors have shapes but no memory.

The model of the world: the memory of a training step depends on the shapes, dtypes, strides and
aliasing of the model's tensors, not on their values.  So the fake copy is a deep copy in which each
tensor is fake and has the layout of the original, and tensors that share a storage share one in the
copy.  Nothing of the original is executed or written, and no tensor memory is allocated.

Functions among the attributes and hooks of a module, such as a `forward` that was put into an
instance, refer to the copies where their closures refer to the originals.

A model may write into what it is called with: each call gets containers and objects of its own,
with the same tensors in them.

Blind spots: objects among the arguments that cannot be copied are shared by all calls; a global, a
C++ object or a closure's object of another class that refers to the
original's tensors still refers to them in the fake copy; values are lost, so control flow on a
tensor's value cannot be traced; the original's gradients are not copied; a user-defined
`__deepcopy__` runs.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from planner._graph_capture.device_kernels.replacement import DeviceKernels
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.skipped_blocks import SkippedBlocks, running_skipped
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.module_forward import rebound, take_down
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.outside_state import Attributes, OutsideState
from planner._graph_capture.random_state import Dice
from planner._graph_capture.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    fake_tensor,
    is_traceable_wrapper_subclass,
    mark_as_parameter,
    pytree,
    spanned_elements,
    storage_key,
    tensor_clone,
    tensor_in_storage,
)
from planner._graph_capture.training_graph import ResidentMemory


@dataclass(frozen=True, slots=True, eq=False)
class KeptValues:
    """The values of a tensor in memory that is not torch's, so that they count for no step."""

    data: bytearray
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> KeptValues:
        """The values of a tensor that is not empty."""
        reached = tensor.detach().as_strided((spanned_elements(tensor),), (1,)).cpu()
        return cls(bytearray(reached.view(torch.uint8).numpy().tobytes()), tensor.dtype,
                   tuple(tensor.size()), tensor.stride())

    def tensor(self) -> torch.Tensor:
        """A tensor with them."""
        return torch.frombuffer(self.data, dtype=self.dtype).as_strided(self.size, self.stride)


@dataclass(frozen=True, eq=False)
class FakeCopy:
    """The fake copy of a model and of one batch."""

    mode: TorchDispatchMode
    """The fake mode of every tensor here; run the fake copy's model under it."""
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    extra: tuple[Any, ...]
    """Copies of the further objects given to `make_fake_copy`; tensors that they share with the
    model are shared with its copy."""
    device: torch.device
    """The device planned for."""
    trace_device: torch.device
    """The device of the fake tensors: `device`, or the CPU where this machine has no device of that
    kind, since autograd needs its driver even for fake tensors."""
    resident: ResidentMemory
    parameters: Mapping[str, torch.Tensor]
    """Every parameter by qualified name; a tied one under each of its names."""
    buffers: Mapping[str, torch.Tensor]
    """Every buffer by qualified name, also the non-persistent ones."""
    fake_of: Mapping[torch.Tensor, torch.Tensor]
    """Each tensor of the original -> its fake copy, by identity; weak references."""
    answers: tuple[Any, ...] | None = None
    """The values that the model's code asks for in a call (`storage_less.Answer`), in order, from a
    real call of the forward without the model's own hooks; `None`: known values only.  Only a
    storage-less copy uses them."""
    autocast: torch.dtype | None = None
    """Dtype of the `torch.autocast` around forward and loss in the user's loop."""
    dice: Dice = field(default_factory=Dice)
    """The random generators of Python and NumPy where the call begins."""
    outside: OutsideState = field(default_factory=OutsideState)
    """What the model's code reaches outside of it, where the call begins."""
    attributes: Attributes = field(default_factory=Attributes)
    """Attributes of its modules as they were copied."""
    left: list[torch.Tensor] = field(default_factory=list)
    """Tensors that the last call has left outside of the model."""
    state_left: list[Any] = field(default_factory=list)
    """The state of `outside` where the last call has ended, until its backward has."""
    skipped: SkippedBlocks = ()
    """Blocks that the call skips, which are to run all the same."""
    kernels: DeviceKernels | None = None
    """Replaces the kernels of an absent `device`; `None`: torch chooses."""
    copied: FakeCopy | None = None
    """The fake copy that this is a storage-less copy of."""
    kept: dict[int, KeptValues] = field(default_factory=dict)
    """Values of inputs that the model's code decides by, by identity of their fake copies."""

    def originals(self) -> dict[int, torch.Tensor]:
        """The tensors of the user's by identity of their fake copies; of inputs that are gone,
        copies, if they were kept."""
        behind = {} if self.copied is None else self.copied.originals()
        kept = {fake: values.tensor() for fake, values in self.kept.items()}
        return kept | {id(fake): behind.get(id(original), original)
                       for original, fake in self.fake_of.items()}

    def forward_context(self) -> AbstractContextManager[Any]:
        """The autocast context of forward and loss; an active outer autocast applies as well."""
        return (nullcontext() if self.autocast is None
                else torch.autocast(self.trace_device.type, self.autocast))

    def as_on_device(self) -> AbstractContextManager[None]:
        """Inside, torch composes ops as it does on the device planned for."""
        return nullcontext() if self.kernels is None else self.kernels.active()

    @property
    def has_subclasses(self) -> bool:
        """True if some of its tensors replace tensors of a subclass whose methods they lack."""
        return any(class_of(tensor) is not type(tensor) for tensor in self.fake_of.values())

    @property
    def callee(self) -> Callable[..., Any]:
        """The callable of a step: the model, or its forward if `answers` are given."""
        if self.answers is None:
            return self.model
        return lambda *args, **kwargs: self.model.forward(*args, **kwargs)

    def call(self, model: Callable[..., Any] | None = None, *, has_backward: bool = False) -> Any:
        """The output of the model, or of what stands for it, in one call; each call throws the same
        dice and finds the same outside of the model.  With `answers`, which are those of one call,
        it finds the attributes of that one, too; else a later call finds what the first has set up.
        `has_backward`: `behind_call` follows."""
        if self.answers is not None:
            self.attributes.put_back()
            if hasattr(self.mode, "answer_with"):
                self.mode.answer_with(self.answers)
        args, kwargs = self.arguments()
        with (listed_by_items(), self.dice.again(), self.outside.again(),
              running_skipped(self.model, self.skipped)):
            before = {id(tensor) for tensor in self.outside.tensors()}
            output = (model or self.callee)(*args, **kwargs)
            self.left[:] = [tensor for tensor in self.outside.tensors() if id(tensor) not in before]
            if has_backward:
                self.state_left[:] = self.outside.values()
        return output

    @contextmanager
    def behind_call(self) -> Iterator[None]:
        """Inside, what hooks find outside of the model is what the last call has left there."""
        try:
            with self.outside.as_in(self.state_left):
                yield
        finally:
            self.state_left.clear()  # among it may be tensors of the user's

    def left_by_call(self) -> list[torch.Tensor]:
        """Tensors in attributes of the model, and those that the last call has left outside."""
        attributes = [value for module in self.model.modules()
                      for name, value in vars(module).items() if name not in _CHILDREN]
        return [*output_tensors(attributes), *self.left]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one call, which may write into its containers."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = in_own_containers(
            self.model, (self.args, self.kwargs))
        return found


_CHILDREN = ("_parameters", "_buffers", "_modules")


_MOST_LISTED_VALUES = 1_000
_tolist = torch.Tensor.tolist


def listed_by_items() -> AbstractContextManager[object]:
    """Inside, `Tensor.tolist` asks for each value as `item` does: the original reads memory, which
    no dispatch mode sees."""
    return mock.patch.object(torch.Tensor, "tolist", _to_list)


def _to_list(tensor: torch.Tensor) -> Any:
    if tensor.numel() > _MOST_LISTED_VALUES:
        return _tolist(tensor)
    return [_to_list(row) for row in tensor.unbind()] if tensor.dim() else tensor.item()


def make_fake_copy(model: nn.Module, args: tuple[Any, ...] = (),
                   kwargs: Mapping[str, Any] | None = None, *,
                   device: torch.device | str | None = None, extra: Iterable[Any] = (),
                   capability: tuple[int, int] | None = None) -> FakeCopy:
    """The fake copy of `model` and of the call `model(*args, **kwargs)`.

    `device` is the one planned for: by default the model's own, the CPU for a model on `meta` or
    without tensors.  All tensors of the fake copy are placed there, also the inputs.  `extra`:
    objects that may share tensors with the model, e.g. a loss with weights; their storages count as
    buffers.  `capability`: the compute capability of a GPU planned for; if that GPU is absent, the
    fake copy runs its kernels.  `None`: the kernels of the tracing device.

    Raises `CaptureError` where the model is spread over several devices, is compiled or scripted,
    has uninitialized parameters, or contains an object that cannot be copied.
    """
    _refuse_what_cannot_be_faked(model)
    planned = device_planned_for(model, device)
    copier = FakeCopier(planned if _can_trace(planned) else torch.device("cpu"))
    fake_copy = replace(
        fake_copy_by(copier, model, args, kwargs or {}, tuple(extra), planned),
        outside=OutsideState(model))
    if capability is None or planned.type != "cuda" or copier.device == planned:
        return fake_copy
    return replace(fake_copy, kernels=DeviceKernels(capability))


def fake_copy_by(copier: FakeCopier, model: nn.Module, args: tuple[Any, ...],
                 kwargs: Mapping[str, Any], extra: tuple[Any, ...],
                 planned: torch.device) -> FakeCopy:
    """The fake copy that `copier` makes, with sizes as the allocator of `planned` counts them."""
    fake_copy = copier.module(model)
    take_down(fake_copy)  # An active plan is not part of the model.
    parameters = dict(fake_copy.named_parameters(remove_duplicate=False))
    buffers = dict(fake_copy.named_buffers(remove_duplicate=False))
    of_parameters = set(map(storage_key, strided_tensors(list(parameters.values()))))
    of_model = set(copier.storage_bytes)
    # The inputs are copied after the model, so that an input which is a parameter stays one.
    fake_args = tuple(copier.tree(arg, f"argument {index}") for index, arg in enumerate(args))
    fake_kwargs = {name: copier.tree(arg, f"argument {name!r}")
                   for name, arg in kwargs.items()}
    of_inputs = set(copier.storage_bytes) - of_model
    fake_extra = tuple(copier.tree(item, "an extra object") for item in extra)
    elsewhere = of_parameters | of_inputs | set(
        map(storage_key, _states_of_optimizers(fake_copy)))

    def total_bytes(belongs: Callable[[int], bool]) -> int:
        return sum(allocated_bytes(size, planned) for key, size in copier.storage_bytes.items()
                   if belongs(key))

    return FakeCopy(
        mode=copier.mode, model=fake_copy, args=fake_args, kwargs=fake_kwargs, extra=fake_extra,
        device=planned, trace_device=copier.device,
        resident=ResidentMemory(
            parameters_bytes=total_bytes(of_parameters.__contains__),
            buffers_bytes=total_bytes(lambda key: key not in elsewhere),
            inputs_bytes=total_bytes(of_inputs.__contains__)),
        parameters=parameters, buffers=buffers, fake_of=copier.fake_of,
        attributes=Attributes(fake_copy))


def _rebind(values: dict[Any, Any], copies: Mapping[int, Any]) -> None:
    """Let the functions among the values refer to copies."""
    for key, value in values.items():
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            values[key] = rebound(value, copies)


def _states_of_optimizers(model: nn.Module) -> list[torch.Tensor]:
    """The states of optimizers that modules keep as attributes; they count with the optimizer."""
    return [tensor for module in model.modules() for value in vars(module).values()
            if isinstance(value, Optimizer)
            for tensor in strided_tensors(list(value.state.values()))]


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
"""Tensor classes without state other than their storage."""

_class_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by fake tensor


def class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class of a tensor; for a fake tensor, the class of its original."""
    found: type[torch.Tensor] = _class_of.get(tensor, type(tensor))
    return found


class FakeCopier(TorchFunctionMode):
    """Deep copies in which each tensor becomes its one copy without memory.

    As a mode it intercepts tensors that `copy.deepcopy` reaches outside of parameters and buffers:
    in attributes, lists and dataclasses.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.mode: Any = self.new_mode()
        self.device = device
        self.memo: dict[int, Any] = {}
        self.fake_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.storage_bytes: dict[int, int] = {}  # by the key of the fake storage
        self._storages: dict[int, torch.UntypedStorage] = {}  # copy by the original storage's key
        self._alive: list[Any] = []  # storages whose keys must not be reused

    def new_mode(self) -> TorchDispatchMode:
        """The mode under which the copies are used."""
        # A constant that the model's code closes over is real; a fake mode may meet it.
        return FakeTensorMode(allow_non_fake_inputs=True)

    def new_storage(self, size_bytes: int) -> torch.UntypedStorage:
        """A storage without memory."""
        return torch.UntypedStorage(size_bytes, device="meta")

    def new_tensor(self, like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor in `storage` with the layout of `like`."""
        return fake_tensor(self.mode, tensor_in_storage(storage, like), self.device)

    def of_class(self, plain: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
        """`plain` in the place of a tensor of a subclass without ops of its own.

        A fake tensor keeps its own class: it gets the attributes of the other, not the methods.
        """
        fake = nn.Parameter(plain, plain.requires_grad) if issubclass(kind, nn.Parameter) else plain
        _class_of[fake] = kind
        return fake

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__deepcopy__ or func is tensor_clone:
            return self.tensor(args[0])
        return func(*args, **(kwargs or {}))

    def module(self, model: nn.Module) -> nn.Module:
        """Copy of `model`."""
        # A mode does not see `Parameter.__deepcopy__`, which asks the memo first.
        for named in (model.named_parameters, model.named_buffers):
            for _, tensor in named(remove_duplicate=False):
                self.tensor(tensor)
        try:
            with self, _copied_by_attributes():
                copied: nn.Module = copy.deepcopy(model, self.memo)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"cannot copy {self._uncopyable(model)}: {error}; planning works on a copy of the "
                "model that has no memory, so take such objects out of the model, or give their "
                "class a `__deepcopy__` that returns the object itself") from error
        for module in copied.modules():
            hooks = (value for name, value in vars(module).items()
                     if name.endswith("_hooks") and isinstance(value, dict))
            for functions in (vars(module), *hooks):
                _rebind(functions, self.memo)
        return copied

    def tree(self, value: Any, what: str) -> Any:
        """Copy of an input: a pytree, or an object that contains tensors."""
        return pytree.tree_map(lambda leaf: self._leaf(leaf, what), value)

    def _leaf(self, leaf: Any, what: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.tensor(leaf)
        try:
            with self:
                return copy.deepcopy(leaf, self.memo)
        except CaptureError as error:
            raise CaptureError(f"{what}: {error}") from error
        except Exception:  # an object that cannot be copied contains no tensors
            return leaf

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """The one fake copy of `real`."""
        fake = self.fake_of.get(real)
        if fake is None:
            fake = self.fake_of[real] = self.memo[id(real)] = self._fake(real)
            self._alive.append(real)
            if class_of(real) not in _PLAIN and not is_traceable_wrapper_subclass(real):
                with self:  # they may refer to the tensor itself, and to its module
                    vars(fake).update({
                        name: copy.deepcopy(value, self.memo) for name, value in vars(real).items()
                        if name != "_is_param"})
        return fake

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        if is_traceable_wrapper_subclass(real):
            return self._fake_wrapper(real)
        if real.layout is not torch.strided:
            if real.device != self.device:
                raise CaptureError(
                    f"a tensor of type {type(real).__name__} and layout {real.layout} is on "
                    f"{real.device}, the plan is for {self.device}; move the model there first")
            return self.mode.from_tensor(real, static_shapes=True)
        if type(real).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not isinstance(
                real, FakeTensor):
            raise CaptureError(f"cannot make a fake copy of a tensor of type "
                               f"{type(real).__module__}.{type(real).__qualname__}; expected plain "
                               "tensors or traceable wrapper subclasses")
        return self._fake_plain(real)

    def _fake_plain(self, real: torch.Tensor) -> torch.Tensor:
        storage = real.untyped_storage()
        key = storage_key(real)
        if key not in self._storages:
            self._storages[key] = self.new_storage(storage.nbytes())
            self._alive.append(storage)
        with torch.no_grad():
            fake = self.new_tensor(real, self._storages[key])
        self.storage_bytes[storage_key(fake)] = storage.nbytes()
        if (kind := class_of(real)) not in _PLAIN:
            return self.of_class(fake.requires_grad_(real.requires_grad), kind)
        if isinstance(real, nn.Parameter):
            return nn.Parameter(fake, requires_grad=real.requires_grad)
        fake.requires_grad_(real.requires_grad)
        # Dynamo treats an attribute made as `nn.Buffer` differently from a registered buffer.
        return nn.Buffer(fake, persistent=real.persistent) if isinstance(real, nn.Buffer) else fake

    def _fake_wrapper(self, real: Any) -> torch.Tensor:
        """Copy of a wrapper subclass, around copies of the tensors inside."""
        names, context = real.__tensor_flatten__()
        inside = {name: self.tensor(getattr(real, name)) for name in names}
        with torch.no_grad():
            fake: torch.Tensor = type(real).__tensor_unflatten__(
                inside, context, real.size(), real.stride())
        if isinstance(real, nn.Parameter):
            mark_as_parameter(fake)
        return fake.requires_grad_(real.requires_grad)

    def _uncopyable(self, model: nn.Module) -> str:
        """Description of the attribute on which `copy.deepcopy` fails."""
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                if attribute in _CHILDREN:
                    continue
                try:
                    with self:
                        copy.deepcopy(value, self.memo)
                except Exception:
                    path = f"{name}.{attribute}" if name else attribute
                    return f"the model's attribute `{path}` ({type(value).__name__})"
        return f"the model ({type(model).__name__})"


def _refuse_what_cannot_be_faked(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"module `{name}`" if name else "the model"
        if hasattr(module, "_orig_mod"):
            raise CaptureError(f"{where} is compiled; give the module that was passed to "
                               "torch.compile, and compile what the plan is applied to")
        if any(is_lazy(own) for own in (*module.parameters(False), *module.buffers(False))):
            raise CaptureError(f"{where} has uninitialized parameters; run it once on a batch, or "
                               "give it its sizes, before planning")
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{where} is a TorchScript module; give the nn.Module it was "
                               "made from")


def device_planned_for(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device that a plan is for; `device`: the user's choice, if any."""
    if device is not None:
        try:
            planned = torch.device(device)
        except RuntimeError:
            raise ValueError(f"unknown device {device!r}; name one such as 'cpu', 'cuda' or "
                             "'cuda:0'") from None
        if planned.type == "meta":
            raise ValueError("expected the device to plan for, got `meta`; name a real device, "
                             "e.g. 'cuda' or 'cpu'")
    else:
        own = {tensor.device for tensor in (*model.parameters(), *model.buffers())
               if is_lazy(tensor) or tensor.dim() > 0  # scalars may stay on the host
               or tensor.device.type != "cpu"}
        own.discard(torch.device("meta"))
        if len(own) > 1:
            raise CaptureError(f"the model is spread over {', '.join(sorted(map(str, own)))}; put "
                               "it on one device, or name the one to plan for with `device=`")
        planned = next(iter(own), torch.device("cpu"))
    if planned.type != "cpu" and planned.index is None:
        planned = torch.device(planned.type, 0)
    return planned


def _can_trace(device: torch.device) -> bool:
    """True if autograd can run on fake tensors of this device; without the device's driver it ends
    the process."""
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type


def in_own_containers(model: nn.Module, tree: Any) -> Any:
    """The same arguments of a call of `model`, in containers of their own."""
    memo: dict[int, Any] = {
        id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}
    return pytree.tree_map(lambda leaf: _copied(leaf, memo), tree)


def _copied(leaf: Any, memo: dict[int, Any]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf
    try:
        with _SameTensors():
            return copy.deepcopy(leaf, memo)
    except Exception:  # an object that cannot be copied
        return leaf


class _SameTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _copied_by_attributes() -> Iterator[None]:
    """Inside, `copy.deepcopy` copies the attributes of modules whose class defines how they are
    pickled: those of keras save their weights and load them into new tensors.  Python's modules and
    locks, which it cannot copy, and generators of random numbers, whose state is put back, stay
    themselves."""
    shared = [kind for kind in _SHARED if kind not in copyreg.dispatch_table]
    own = [kind for kind in _subclasses(nn.Module)
           if kind not in copyreg.dispatch_table and not kind.__module__.startswith("torch.")
           and kind.__reduce__ is not object.__reduce__ and not hasattr(kind, "__deepcopy__")]
    for kind in own:
        copyreg.pickle(kind, _attributes_of)
    for kind in shared:
        copyreg.pickle(kind, repr)  # a string stands for the object itself
    try:
        yield
    finally:
        for kind in (*own, *shared):
            del copyreg.dispatch_table[kind]


_SHARED: tuple[type, ...] = (
    types.ModuleType, type(threading.Lock()), type(threading.RLock()), torch.Generator)


def _subclasses(kind: type[nn.Module]) -> set[type[nn.Module]]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _attributes_of(module: nn.Module) -> tuple[Any, ...]:
    return object.__new__, (type(module),), vars(module)
