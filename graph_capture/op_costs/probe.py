"""Measures the workspace of a single op's kernel, and its duration.

The model of the world: both depend only on the op, the shapes, strides and dtypes of its tensors,
its other arguments, the device, the torch version and the number of threads.  So the op is run
alone on dummy inputs, once per such signature, and the result is kept.  Ops whose kernels are known
to allocate nothing are not run.  Ops that may not tolerate dummy inputs run in a child process
(`graph_capture.op_costs.isolated`); on a CPU also those whose tensors would exceed what the
caller's budget leaves in this process.

Some ops cannot be run: the device is absent, the op is too large for the free memory or, on a GPU,
for what the budget leaves, it fails, or no package named like its namespace registers it.  Then a
margin is used, and the op's name is added to `assumed`: for a convolution the bytes of its operands
and results once more, for a matrix product copies of operands that the kernel may want rearranged;
on CUDA, for attention, embeddings, sums and products, the requests of their code
(`cuda_workspace`); for any other op nothing.

Blind spots: memory that a library allocates from the operating system; workspace that depends on
the values.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pickle
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from planner._graph_capture.memory.allocator import allocated_bytes, record_peak_of_op
from planner._graph_capture.memory.sparse import is_sparse, strided_tensors
from planner._graph_capture.op_costs.cuda_workspace import (
    cuda_workspace_bytes,
    product_workspace_bytes,
)
from planner._graph_capture.op_costs.devices import Gpu, device_model
from planner._graph_capture.op_costs.flops import makes_storage, op_flops
from planner._graph_capture.op_costs.headroom import free_bytes
from planner._graph_capture.op_costs.isolated import Layout, is_trusted, isolated_probe
from planner._graph_capture.torch_compat import (
    OpOverload,
    aten_name,
    no_active_modes,
    profiler_is_running,
    pytree,
    schema_of,
    spanned_elements,
)
from planner._graph_capture.torch_compat.recurrent import in_training

_SAFE_FRACTION = 0.25
"""An op is run only if its tensors use at most this share of the free memory."""
_LONGEST_RUN_SECONDS = 2.0
"""An op is run only if its estimated duration is no longer than this."""

_CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "_convolution",
                           "mkldnn_convolution", "cudnn_convolution"})
_MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_FREE = frozenset({
    "clone", "copy", "copy_", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like",
    "new_ones", "new_zeros", "new_full", "fill_", "zero_", "arange", "scalar_tensor",
    "lift_fresh_copy", "slice_backward", "select_backward", "_unsafe_view", "view",
    "_local_scalar_dense", "_foreach_zero_", "set_"})
"""Kernels that write their result, if any, and allocate nothing else, for every layout."""
_FREE_IF_CONTIGUOUS = frozenset({
    "_softmax", "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward",
    "nll_loss_backward", "embedding"})
"""Kernels that allocate only copies of operands that are not contiguous."""


class OpProbe:
    """Measures ops of one device, each signature once."""

    def __init__(self, device: torch.device | str, *, probe: bool = True,
                 directory: Path | None = None, headroom: Callable[[], int] | None = None,
                 gpu: str | Gpu | None = None) -> None:
        """`probe=False` measures nothing; `directory` contains the cache on disk, by default
        `cache.cache_directory()`; `headroom`: bytes that dummy inputs may currently use in this
        process, `None`: limited only by the free memory; `gpu`: whose margins to use, as for
        `device_model`."""
        self._headroom = headroom
        self.device = torch.device(device)
        self._gpu = device_model(self.device, gpu=gpu).gpu
        self.assumed: set[str] = set()
        """Names of the ops for which a margin was used."""
        self.untimed: set[str] = set()
        """Names of the ops whose duration was requested and could not be measured."""
        self._enabled = probe and _at_hand(self.device)
        self._cache = OpCache(_environment(self.device) if self._enabled else "",
                              (directory or cache_directory()) if self._enabled else None)

    def workspace_bytes(self, target: OpOverload, args: tuple[Any, ...],
                        kwargs: Mapping[str, Any], out: Any) -> int:
        """Peak of `target(*args, **kwargs)` beyond `out`, its result; tensors may be fake.

        For an in-place variant, allocations in addition to the tensor that it writes count.
        """
        inputs, outputs = strided_tensors((args, kwargs)), strided_tensors(out)
        if not (makes_storage(inputs, outputs) or schema_of(target).is_mutable):
            return 0
        if _known_to_be_free(target, args, inputs, self.device):
            return 0
        measured = self._known_or_measured("workspace", target, args, kwargs, out)
        if measured is None:
            self.assumed.add(str(target))
            return self._margin(target, inputs, outputs, args)
        return int(measured)

    def known_workspace_bytes(self, target: OpOverload, args: tuple[Any, ...],
                              kwargs: Mapping[str, Any]) -> int:
        """`workspace_bytes` as it was measured before; 0 if it was not."""
        return int(self._cache.get(f"workspace:{signature(target, args, kwargs)}") or 0)

    def seconds(self, target: OpOverload, args: tuple[Any, ...],
                kwargs: Mapping[str, Any], out: Any) -> float | None:
        """Median duration of one run; `None` if the op cannot be run here."""
        measured = self._known_or_measured("seconds", target, args, kwargs, out)
        if measured is None:
            self.untimed.add(str(target))
        return measured

    def known_seconds(self, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
                      ) -> float | None:
        """The duration that `seconds_of_function` found for a function of this text and such
        arguments."""
        return self._cache.get(_kernel_key(text, args, kwargs))

    def seconds_of_function(self, text: str, function: Callable[[], Callable[..., Any]],
                            args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
        """Median duration of one run of `function()`, which may write to its arguments; `None` if
        it cannot be run here.  `text`: its key in the cache.  Tensors may be fake."""
        tensors = strided_tensors((args, kwargs))
        return self._kept(_kernel_key(text, args, kwargs), lambda: (
            self.run_alone(function, args, kwargs, "seconds") if self._enabled
            and self._has_headroom(tensors) and self._fits_here(tensors) else None))

    def _known_or_measured(self, quantity: str, target: OpOverload, args: tuple[Any, ...],
                           kwargs: Mapping[str, Any], out: Any) -> float | None:
        return self._kept(f"{quantity}:{signature(target, args, kwargs)}",
                          lambda: self._measure(quantity, target, args, kwargs, out))

    def _kept(self, key: str, measure: Callable[[], float | None]) -> float | None:
        """The fact in the cache, else what is measured and then kept there."""
        found = self._cache.get(key)
        if found is None and (found := measure()) is not None:
            self._cache.put(key, found)
        return found

    def _measure(self, quantity: str, target: OpOverload, args: tuple[Any, ...],
                 kwargs: Mapping[str, Any], out: Any) -> float | None:
        """A quantity of a run of the op on dummy inputs; `None` if it cannot be run."""
        inputs, outputs = strided_tensors((args, kwargs)), strided_tensors(out)
        tensors = [*inputs, *outputs]
        if (not self._enabled or not self._has_headroom(tensors) or
                self._estimated_seconds(target, args, kwargs, outputs) > _LONGEST_RUN_SECONDS):
            return None
        fits = self._fits_here(tensors, self._margin(target, inputs, outputs))
        # The measurement on a CPU needs the profiler for itself.
        is_busy = quantity == "workspace" and self.device.type == "cpu" and profiler_is_running()
        if fits and not is_busy and (
                is_trusted(target) or any(map(is_sparse, pytree.tree_leaves((args, kwargs))))):
            return self.run_alone(lambda: target, args, kwargs, quantity)
        # The memory of another process is no part of the budget, but that of a GPU is one memory.
        if not (fits or self.device.type == "cpu"):
            return None
        return isolated_probe(self.device).measure(target, args, kwargs, quantity)

    def run_alone(self, function: Callable[[], Callable[..., Any]], args: tuple[Any, ...],
                  kwargs: Mapping[str, Any], quantity: str) -> float | None:
        """A quantity of a run of `function()` on dummy inputs in place of tensors and layouts;
        `None` if that fails."""
        measurement = {"workspace": self._workspace, "seconds": self._duration}[quantity]
        devices = [self.device] if self.device.type == "cuda" else []
        with no_active_modes(), torch.no_grad(), torch.random.fork_rng(devices):
            try:
                real = Materializer(self.device)
                real_args, real_kwargs = real.tree(args), real.tree(dict(kwargs))
                call = function()
                if isinstance(call, OpOverload):
                    real_args = with_reserve(call, seeds_on_host(call, real_args))
                    call = in_training(call)
                return measurement(lambda: call(*real_args, **real_kwargs), real.renew)
            except Exception:  # an op may refuse dummy inputs with any error
                return None

    def _has_headroom(self, tensors: list[torch.Tensor]) -> bool:
        return (sum(map(_extent_bytes, tensors))
                <= _SAFE_FRACTION * free_bytes(self.device))

    def _fits_here(self, tensors: list[torch.Tensor], margin_bytes: int = 0) -> bool:
        """True if such tensors, and a margin, fit into what the caller's budget leaves."""
        return self._headroom is None or (
            sum(map(_extent_bytes, tensors)) + margin_bytes <= self._headroom())

    def _estimated_seconds(self, target: OpOverload, args: tuple[Any, ...],
                           kwargs: Mapping[str, Any], outputs: list[torch.Tensor]) -> float:
        if not outputs or any(map(is_sparse, pytree.tree_leaves((args, kwargs)))):
            return 0.0  # a sparse tensor has few rows
        flops = op_flops(target, args, kwargs, outputs if len(outputs) > 1 else outputs[0])
        return device_model(self.device).op_seconds(flops, 0, outputs[0].dtype)

    def _workspace(self, run: Callable[[], Any], renew: Callable[[], None]) -> float:
        if self.device.type != "cpu":
            run()  # library handles and their workspaces are made once per process
        held: list[Any] = []
        record = record_peak_of_op(lambda: held.append(run()), self.device)
        return record.peak_bytes - max(record.end_bytes, 0)

    def _duration(self, run: Callable[[], Any], renew: Callable[[], None]) -> float:
        on_gpu = self.device.type == "cuda"
        wait = torch.cuda.synchronize if on_gpu else lambda: None
        durations: list[float] = []
        run()
        while len(durations) < 3 or (sum(durations) < 0.05 and len(durations) < 50):
            # Repeated in-place scaling makes numbers denormal, which CPUs are slow at.
            renew()
            wait()
            start, start_of_cpu = time.perf_counter(), time.process_time()
            run()
            wait()
            by_clock = time.perf_counter() - start
            # One thread on a loaded CPU works for fewer seconds than pass; several, for more.
            by_cpu = by_clock if on_gpu else time.process_time() - start_of_cpu
            durations.append(min(by_clock, by_cpu))
        return statistics.median(durations)

    def _margin(self, target: OpOverload, inputs: list[torch.Tensor],
                outputs: list[torch.Tensor], args: tuple[Any, ...] = ()) -> int:
        name = aten_name(target)
        by_its_code = None if self._gpu is None or not args else (
            cuda_workspace_bytes(name, args, self._gpu))
        if by_its_code is not None:
            return by_its_code
        if name in _CONVOLUTIONS:
            return sum(allocated_bytes(_extent_bytes(tensor), self.device)
                       for tensor in (*inputs, *outputs))
        if name in _MATRIX_PRODUCTS:
            return _rearranged_bytes(target, inputs) + (
                0 if self._gpu is None else product_workspace_bytes(name, self._gpu))
        return 0


def answer_questions() -> None:
    """As the child process of `graph_capture.op_costs.isolated`, measure the ops on standard input
    until its end."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of a library must not mix with answers
    device, threads, mkldnn, deterministic = pickle.load(questions)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = mkldnn
    torch.use_deterministic_algorithms(deterministic)
    probe = OpProbe(device, directory=None)
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        pickle.dump(_answer(probe, question), answers)
        answers.flush()


def _answer(probe: OpProbe, question: bytes) -> float | None:
    """The quantity asked for; `None` for an op or an argument that this process cannot make."""
    try:
        name, args, kwargs, quantity = pickle.loads(question)
    except Exception:  # of the class of an argument
        return None
    if (namespace := name.split(".")[0]) not in ("aten", "prims"):
        with contextlib.suppress(ImportError):
            importlib.import_module(namespace)  # registers the op
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part, None)
    return target and probe.run_alone(lambda: target, args, kwargs, quantity)


def _kernel_key(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return f"seconds of kernel:{signature(text, args, kwargs)}"


def signature(target: OpOverload | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Hash of everything that a run of the op depends on, except values; equal in every process."""
    leaves, structure = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    seen: dict[int, int] = {}
    words = [str(target), str(structure).replace("immutable_", "")]  # lists of an `fx.Graph`
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            # The same tensor twice is another case than two tensors of the same shape.
            order = seen.setdefault(id(leaf), len(seen))
            words.append(f"{order}:{leaf.dtype}{ints(leaf.shape)}{ints(strides(leaf))}")
            if is_sparse(leaf):
                values, indices = strided_tensors(leaf)
                words.append(f"{ints(strides(values))}{leaf.is_coalesced()}{indices.tolist()}")
        elif isinstance(leaf, torch.UntypedStorage):  # whose text has all its bytes
            words.append(f"{leaf.device}{leaf.nbytes()}")
        else:
            words.append(repr(leaf))
    return hashlib.sha256("|".join(words).encode()).hexdigest()


def _extent_bytes(tensor: torch.Tensor) -> int:
    return spanned_elements(tensor) * tensor.dtype.itemsize


def _known_to_be_free(target: OpOverload, args: tuple[Any, ...], inputs: list[torch.Tensor],
                      device: torch.device) -> bool:
    name = aten_name(target)
    if name in _FREE:
        return True
    dtypes = {tensor.dtype for tensor in inputs}
    if device.type == "cpu" and name in _MATRIX_PRODUCTS:
        # BLAS uses these directly, and they are too slow to be run for nothing.
        return (dtypes <= {torch.float32, torch.float64}
                and _rearranged_bytes(target, inputs) == 0)
    if not all(tensor.is_contiguous() for tensor in inputs):
        return False
    if torch.Tag.pointwise in target.tags:
        # On the CPU, operands of another dtype than the common one are converted in full first, and
        # a number in the place of a tensor becomes one.
        return device.type == "cuda" or (len(dtypes) <= 1 and not has_number_operand(target, args))
    known = name in _FREE_IF_CONTIGUOUS or (
        device.type == "cpu" and name == "_softmax_backward_data")
    return known and sum(dtype.is_floating_point for dtype in dtypes) <= 1


def has_number_operand(target: OpOverload, args: tuple[Any, ...]) -> bool:
    """True if a number replaces an operand of the op (not a mere setting such as `alpha`)."""
    return any(isinstance(value, (bool, int, float, complex)) and argument.name in ("self", "other")
               for argument, value in zip(schema_of(target).arguments, args, strict=False))


def _rearranged_bytes(target: OpOverload, inputs: list[torch.Tensor]) -> int:
    """Bytes of the matrix operands that neither rows nor columns make contiguous."""
    def readable(matrix: torch.Tensor) -> bool:
        rows, columns = matrix.shape[-2:]
        row, column = matrix.stride()[-2:]
        return ((column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows)))

    return sum(matrix.numel() * matrix.dtype.itemsize for matrix in inputs[-2:]
               if not readable(matrix))


def _at_hand(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()
                                    and (device.index or 0) < torch.cuda.device_count())


def _environment(device: torch.device) -> str:
    name = (torch.cuda.get_device_name(device) if device.type == "cuda"
            else torch.backends.cpu.get_cpu_capability())
    return "|".join(map(str, (
        device.type, name, torch.__version__, torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled)))


class Materializer:
    """Dummy inputs in place of fake tensors; the same tensor for the same one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, torch.Tensor] = {}
        self._numbers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._random = torch.Generator(device=device).manual_seed(0)

    def renew(self) -> None:
        """Restore the numbers, which may have been overwritten."""
        for rows, pattern in self._numbers:
            rows.copy_(pattern)

    def tree(self, value: Any) -> Any:
        return pytree.tree_map(self._leaf, value)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | Layout):
            if id(leaf) not in self._made:
                self._made[id(leaf)] = (
                    self._sparse(leaf) if isinstance(leaf, torch.Tensor) and is_sparse(leaf)
                    else self._real(leaf))
            return self._made[id(leaf)]
        if isinstance(leaf, torch.device):
            return self._device
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return leaf.node.hint
        return leaf

    def _sparse(self, known: torch.Tensor) -> torch.Tensor:
        values, indices = strided_tensors(known)
        with warnings.catch_warnings():  # torch 2.11 warns even if the checks are disabled
            warnings.filterwarnings("ignore", "Sparse invariant checks")
            made = torch.sparse_coo_tensor(indices.to(self._device, copy=True),
                                           self._real(values), known.shape, check_invariants=False)
        return made._coalesced_(known.is_coalesced())

    def _real(self, fake: torch.Tensor | Layout) -> torch.Tensor:
        count = spanned_elements(fake)
        if fake.dtype.is_floating_point or fake.dtype.is_complex:
            # A small random pattern, repeated: random numbers cost more than most ops.
            pattern = torch.rand(min(count, 4096), generator=self._random, device=self._device)
            flat = pattern.to(fake.dtype).repeat(-(-count // 4096) or 1)
            self._numbers.append((flat.view(-1, max(len(pattern), 1)), pattern))
        else:
            flat = torch.zeros(count, dtype=fake.dtype, device=self._device)  # a valid index
        return flat.as_strided(ints(fake.shape), ints(strides(fake)))


def seeds_on_host(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with random state in host memory: memory efficient attention reads it there,
    whatever fake tensors say, and a wrong address ends the process."""
    if "_efficient_attention_backward" not in schema_of(op).name:
        return args
    return tuple(value.cpu() if isinstance(value, torch.Tensor) and each.name.startswith("philox")
                 else value for each, value in zip(schema_of(op).arguments, args, strict=False))


def with_reserve(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an LSTM's backward with the reserve that its forward makes: with another one
    it hangs, or ends the process."""
    if op is not torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return args
    layer, (reverse, *sizes, has_biases, train, bidirectional, batches, batch_first) = (
        args[:7], args[13:22])
    *_, reserve = in_training(torch.ops.aten.mkldnn_rnn_layer.default)(
        *layer, reverse, batches, *sizes, has_biases, bidirectional, batch_first, train)
    return *args[:22], reserve


def ints(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def strides(tensor: torch.Tensor | Layout) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()



ENVIRONMENT_VARIABLE = "CHECKPOINT_PLANNER_CACHE"
"""Directory of the cache, in place of the platform's; empty: nothing is kept on disk."""


def cache_directory() -> Path | None:
    """Directory of the cache; `None` if the user switched it off."""
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    if given is not None:
        return Path(given) if given else None
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "checkpoint-planner"


class OpCache:
    """Facts by key: a quantity of an op's signature, e.g. its workspace in bytes.

    There is one file per environment, and one line of JSON per fact, appended by a single write, so
    that processes may share it.  Invalid lines are skipped: a file damaged by a crash or a full
    disk costs measurements, never an error.  A directory that cannot be written to keeps nothing.
    """

    def __init__(self, environment: str, directory: Path | None) -> None:
        """`environment`: everything other than their keys that the facts depend on."""
        self._facts: dict[str, float] = {}
        self._path: Path | None = None
        if directory is not None:
            digest = hashlib.sha256(environment.encode()).hexdigest()[:16]
            self._path = directory / f"ops-{digest}.jsonl"
            size_bytes, facts = _read.get(self._path, (0, self._facts))
            self._facts = facts
            _read[self._path] = size_bytes + self._load(self._path, size_bytes), facts

    def get(self, key: str) -> float | None:
        """The fact, if it is known."""
        return self._facts.get(key)

    def put(self, key: str, value: float) -> None:
        """Remember a fact, here and on disk."""
        self._facts[key] = value
        if self._path is None:
            return
        # A leading line break: a torn line of another process must not swallow this one.
        line = f"\n{json.dumps({'key': key, 'value': value})}\n".encode()
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def _load(self, path: Path, start: int) -> int:
        """Take the facts in the file from this byte on; returns the number of bytes read."""
        try:
            with path.open("rb") as file:
                file.seek(start)
                read = file.read()
        except OSError:
            return 0
        for line in read.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                fact = json.loads(line)
                key, value = fact["key"], fact["value"]
                if isinstance(key, str) and isinstance(value, int | float) and value >= 0:
                    self._facts[key] = value
        return len(read)


_read: dict[Path, tuple[int, dict[str, float]]] = {}
"""Of each file that this process has read: how much of it, and its facts."""
