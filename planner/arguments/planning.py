"""Arguments of capture and planning: their names, defaults and checks.

`planner.plan` documents them and lists them in its signature; other functions declare `**arguments:
Unpack[PlanArguments]` and build a `Planning` from them, as do the command line and the options of
the `torch.compile` backend.  To add an argument, add a field here, a line in `PlanArguments` (for
type checkers) and its description to the docstring of `plan`.

Blind spot: arguments that refer to the model (`keep`, `regions`, `optimizer`, `device`) are checked
during capture.
"""

from __future__ import annotations

import inspect
import keyword
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from planner.arguments.parallel import DataParallel, check_parallel, dtype_named

if TYPE_CHECKING:
    import torch

    from planner._graph_capture.op_costs.devices import Gpu

F = TypeVar("F", bound=Callable[..., Any])

CHOICES = ("chunk", "offload")
"""Choices beyond recomputation: run a part of the step in chunks, store results on the host."""

Dynamic = bool | Mapping[str, Mapping[int, str]] | None
"""Sizes of the inputs that vary: names by input and dimension, `True` for all of them."""

_RENAMED = {"output": 'hold_output=False in place of output="dropped"'}
"""Arguments of earlier versions, and what to write now."""

CHUNKS_OF = ((16, 4), (4, 1), (8, 1), (16, 1), (64, 1))
"""Numbers of chunks to try: of the widest part, and of the insides of layers.  The first pair shows
whether more pairs are worth trying."""
MOST_CHUNKS = (CHUNKS_OF[0], CHUNKS_OF[-1])
"""Those that use the least memory."""

_MOST = 2 ** 31 - 1

_AUTOCAST = ("bf16", "bfloat16", "fp16", "float16")


class PlanArguments(TypedDict, total=False):
    """The fields of `Planning` as keyword arguments; see `planner.plan`."""

    loss_fn: Callable[[Any], torch.Tensor] | None
    optimizer: object
    solver: str
    backend: str
    cost_model: str
    device: torch.device | str | None
    gpu: str | Gpu | None
    time_limit: float
    keep: Sequence[str]
    probe: bool
    accumulation: int
    regions: str | Sequence[str] | None
    autocast: torch.dtype | str | None
    hold_output: bool
    parallel: DataParallel | None
    allow: str | Sequence[str]
    budget_of: str
    optimizer_in_backward: bool
    dynamic: Dynamic


@dataclass(frozen=True, slots=True)
class Flag:
    """Command-line option of an argument."""

    help: str
    kind: Any = str
    """Type of the option's value; a list type may be repeated."""
    name: str | None = None
    """Such as `--keep`; `None`: derived from the field's name."""
    metavar: str | None = None
    min: int | None = None
    positional: bool = False
    value: Any = None
    """Value of the option when it is written alone; `None`: the option requires a value."""
    read: Callable[[Any], Any] | None = None
    """Converts the written value to the argument; `None`: no conversion."""


def flag(help: str, **details: Any) -> dict[str, Flag]:
    """Field metadata that adds a command-line option."""
    return {"flag": Flag(help, **details)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Checked arguments; see `planner.plan`.

    Raises `TypeError` or `ValueError` if one is invalid by itself.
    """

    loss_fn: Callable[[Any], torch.Tensor] | None = None
    optimizer: object = field(default=None, metadata=flag("sgd, adam, adamw, ..."))
    solver: str = field(default="auto", metadata=flag("auto, none, sqrt_n, dp, ilp, ..."))
    backend: str = field(default="eager", metadata=flag("eager or inductor."))
    cost_model: str = field(default="roofline", metadata=flag(
        "What recomputation costs: roofline (time), measured or flops."))
    device: torch.device | str | None = field(default=None, metadata=flag(
        "The device planned for."))
    gpu: str | Gpu | None = field(default=None, metadata=flag(
        "Its model, for kernels and estimates: H100, ..."))
    time_limit: float = field(default=60.0, metadata=flag("Seconds for the solver.", kind=float))
    keep: Sequence[str] = field(default=(), metadata=flag(
        "Module or op whose results are kept; may be repeated.", kind=list[str], metavar="NAME"))
    probe: bool = field(default=True, metadata=flag(
        "Measure the workspace of single ops.", kind=bool))
    accumulation: int = field(default=1, metadata=flag(
        "Micro-batches to each step of the optimizer.", kind=int, min=1))
    regions: str | Sequence[str] | None = field(default=None, metadata=flag(
        "Compiled as a unit: auto, model, blocks, or names of modules."))
    """`None` is `auto`."""
    autocast: torch.dtype | str | None = field(default=None, metadata=flag(
        "Forward and loss run within torch.autocast: bf16 or fp16."))
    hold_output: bool = field(default=True, metadata=flag(
        "The caller keeps only the loss, not the model's output.", name="--drop-output",
        value=False))
    parallel: DataParallel | None = None
    allow: str | Sequence[str] = field(default=(), metadata=flag(
        "A choice beyond recomputation: chunk, offload; may be repeated.", kind=list[str],
        metavar="CHOICE", read=lambda written: tuple(
            choice for each in written for choice in each.split(","))))
    """Afterwards a tuple without `"recompute"`, which every plan may do."""
    budget_of: str = field(default="allocated", metadata=flag(
        "What the budget limits: allocated, or reserved by torch on a GPU."))
    optimizer_in_backward: bool = field(default=False, metadata=flag(
        "Hooks step the optimizer and free each gradient as it comes.", value=True))
    dynamic: Dynamic = None
    """Afterwards `None` for fixed sizes."""

    def __post_init__(self) -> None:
        from planner.solvers.solve import ALGORITHMS

        if self.regions == "auto":
            object.__setattr__(self, "regions", None)
        if self.regions is not None and not isinstance(self.regions, str) and not (
                isinstance(self.regions, Sequence)
                and all(isinstance(name, str) for name in self.regions)):
            raise TypeError('regions must be "auto", "blocks", "model" or a sequence of names of '
                            f"modules, got {self.regions!r}")
        _check_known("solver", self.solver, tuple(ALGORITHMS))
        _check_known("backend", self.backend, ("eager", "inductor"))
        _check_known("cost_model", self.cost_model, ("roofline", "measured", "flops"))
        if not isinstance(self.hold_output, bool):
            raise TypeError("hold_output must be True (the caller keeps the model's output until "
                            "the backward ends) or False (only the loss), "
                            f"got {self.hold_output!r}")
        _check_known("budget_of", self.budget_of, ("allocated", "reserved"))
        if self.budget_of == "reserved" and self.backend != "eager":
            raise ValueError(f'budget_of="reserved" with backend={self.backend!r}: the blocks of '
                             "what Inductor compiles are not known one by one; use "
                             'backend="eager", or budget_of="allocated"')
        check_number("time_limit", self.time_limit, "a number of seconds",
                     "a finite number of seconds above 0", lambda value: 0 < value < math.inf)
        check_count("accumulation", self.accumulation, of="micro-batches")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise TypeError("loss_fn must be a function of the model's output, "
                            f"got {type(self.loss_fn).__name__}")
        if isinstance(self.keep, str) or not all(isinstance(name, str) for name in self.keep):
            raise TypeError(f"keep must be a sequence of names, got {self.keep!r}; "
                            'for one name write keep=("layers.3.attn",)')
        if self.parallel is not None:
            check_parallel(self.parallel)
        if self.autocast is not None and _autocast_name(self.autocast) not in _AUTOCAST:
            raise ValueError("autocast must be 'bf16' or 'fp16' (or the dtype), got "
                             f"{self.autocast!r}")
        object.__setattr__(self, "allow", _allowed(self.allow))
        if self.optimizer_in_backward:
            check_in_backward(self.backend, self.accumulation, self.parallel)
        if "offload" in self.allow:
            _check_together('allow="offload"', {
                'cost_model="flops", in which copies have no cost': self.cost_model == "flops",
                'budget_of="reserved"': self.budget_of == "reserved"})
        object.__setattr__(self, "dynamic", _checked_dynamic(self.dynamic))
        if self.dynamic:
            _check_together("dynamic=", {
                f"backend={self.backend!r}": self.backend != "eager",
                "parallel=": self.parallel is not None,
                f"regions={self.regions!r}": self.regions not in (None, "model"),
                'allow="chunk"': "chunk" in self.allow,
                'allow="offload"': "offload" in self.allow,
                'budget_of="reserved"': self.budget_of == "reserved",
                "optimizer_in_backward=True": self.optimizer_in_backward})
        if self.gpu is not None:
            from planner._graph_capture.op_costs.devices import known_gpu

            known_gpu(self.gpu)

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Planning:
        """Build from the keyword arguments of a function decorated with `takes_planning`.

        Raises `TypeError` for an unknown argument, as Python does, and lists the known ones.
        """
        known = [parameter.name for parameter in inspect.signature(function).parameters.values()
                 if parameter.kind is parameter.KEYWORD_ONLY]
        for name in arguments:
            if name in _RENAMED:
                raise TypeError(f"{function.__name__}() has no argument {name!r} any more; write "
                                f"{_RENAMED[name]}")
            if name not in known:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument "
                                f"{name!r}; known: {', '.join(known)}")
        return cls(**arguments)

    def without_offload(self, function: str) -> Planning:
        """Return `self`; raises `ValueError` if offload is allowed, which `function` does not
        support."""
        if "offload" in self.allow:
            raise ValueError(f'allow="offload" is for planner.plan so far; {function} takes '
                             'allow="chunk"')
        return self

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Numbers of chunks to try: of the widest part of the step, and of the insides of
        layers."""
        return CHUNKS_OF if "chunk" in self.allow else ()

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that `autocast` names."""
        return None if self.autocast is None else dtype_named(_autocast_name(self.autocast))

    def arguments(self) -> PlanArguments:
        """The fields as keyword arguments of `planner.plan` and related functions.

        `dynamic` only if it was given: functions that vary a size themselves have no such argument.
        """
        chosen = {field.name: getattr(self, field.name) for field in fields(self)
                  if field.name != "dynamic" or self.dynamic}
        return cast(PlanArguments, chosen)


def takes_planning(*, without: Collection[str] = (), **defaults: Any) -> Callable[[F], F]:
    """Decorator that shows the fields of `Planning`, except `without`, in the function's signature
    in place of `**arguments`; `defaults` override those of the fields."""

    def complete(function: F) -> F:
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values()
               if parameter.kind is not parameter.VAR_KEYWORD]
        taken = [inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY,
                                   default=defaults.get(each.name, each.default),
                                   annotation=each.type)
                 for each in fields(Planning) if each.name not in without]
        vars(function)["__signature__"] = signature.replace(parameters=own + taken)
        return function

    return complete


def check_count(name: str, value: Any, least: int = 1, *, of: str = "") -> int:
    """Return `value` as an int; raises `TypeError` if it is not whole, and `ValueError` if it is
    below `least` or above all sizes of real steps."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number{of and f' of {of}'}, got {value!r}")
    count = int(value)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    if count > _MOST:
        raise ValueError(f"{name} must be at most {_MOST}, got a number of {count.bit_length()} "
                         "bits")
    return count


def check_number(name: str, value: Any, kind: str, within: str, is_within: Callable[[Any], bool]
                 ) -> float:
    """Return `value` as a float; raises `TypeError` with the words `kind` if it is no number, and
    `ValueError` with the words `within` if it is not within its range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {kind}, got {value!r}")
    if not is_within(value):
        raise ValueError(f"{name} must be {within}, got {value}")
    return float(value)


def _check_together(argument: str, others: Mapping[str, bool]) -> None:
    """Raise `ValueError` if one of the others is given, with which the argument cannot be had."""
    for other, is_given in others.items():
        if is_given:
            raise ValueError(f"{argument} cannot be had with {other} yet; leave one of them out")


def check_in_backward(backend: str, accumulation: int, parallel: DataParallel | None) -> None:
    """Raise `ValueError` where gradients cannot be used and freed as they come."""
    why = (f"with backend={backend!r} all gradients count to the end of the backward; use "
           'backend="eager"' if backend != "eager" else
           f"accumulation={accumulation} adds up gradients, which are gone then; use "
           "accumulation=1" if accumulation > 1 else
           "what the hooks of many ranks do is not known; leave parallel out"
           if parallel is not None else "")
    if why:
        raise ValueError(f"optimizer_in_backward=True: {why}, or leave optimizer_in_backward out")


def _checked_dynamic(dynamic: object) -> Dynamic:
    """Names of sizes by input and dimension, `True`, or `None` for fixed sizes."""
    if dynamic is None or isinstance(dynamic, bool):
        return dynamic or None
    expected = ('dynamic must be True or {input: {dimension: name}}, such as {"input_ids": '
                '{0: "batch", 1: "length"}}')
    if not isinstance(dynamic, Mapping):
        raise TypeError(f"{expected}, got {dynamic!r}")
    for name, places in dynamic.items():
        if not isinstance(name, str) or not isinstance(places, Mapping):
            raise TypeError(f"{expected}, got {name!r}: {places!r}")
        for place, size in places.items():
            if isinstance(place, bool) or not isinstance(place, int) or place < 0:
                raise TypeError(f"{expected}, got the dimension {place!r} of {name!r}")
            if not isinstance(size, str):
                raise TypeError(f"{expected}, got {size!r} for dimension {place} of {name!r}")
            if not size.isidentifier() or keyword.iskeyword(size) or size in ("max", "min"):
                raise ValueError(f"the name of a size must be one of Python's, such as batch, got "
                                 f"{size!r} for dimension {place} of {name!r}")
    return {name: dict(places) for name, places in dynamic.items()} or None


def _allowed(allow: object) -> tuple[str, ...]:
    """The choices beyond recomputation, each once."""
    if not isinstance(allow, str | Sequence):
        raise TypeError('allow must be "chunk", "offload" or a sequence of these, '
                        f"got {allow!r}")
    choices = (allow,) if isinstance(allow, str) else tuple(dict.fromkeys(allow))
    for choice in choices:
        _check_known("choice in allow", choice, ("recompute", *CHOICES))
    return tuple(choice for choice in choices if choice != "recompute")


def _autocast_name(autocast: object) -> str:
    return str(autocast).removeprefix("torch.")


def _check_known(argument: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"unknown {argument} {value!r}; known: {', '.join(known)}")
