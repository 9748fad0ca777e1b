"""Options of the command line, each defined once, and their conversion to parameters of a command.

A command declares a dataclass as one parameter (`Planning`, `TargetOptions`, `SizeOptions`);
`command` presents to Typer, one by one, those of its fields that have a `Flag`.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from planner.arguments.parallel import DataParallel
from planner.arguments.planning import flag
from planner.cli.output import TargetError, UsageError, reported, results_apart
from planner.progress import watched

if TYPE_CHECKING:
    import torch

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")]
Budget = Annotated[str | None, typer.Option(
    "--budget", help='Peak of the whole step: 8GB (1e9), 8GiB (2**30), 500MB, 60%.')]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Command-line options of the model and its inputs."""

    target: str = field(metadata=flag(
        "package.module:factory or path/to/file.py:factory (returns a model, (model, inputs) or "
        "(model, inputs, loss_fn)), or hf:CONFIG (a config.json, or a model type such as gpt2).",
        positional=True, metavar="TARGET"))
    batch: int | None = field(default=None, metadata=flag(
        "Batch size (hf: targets).", kind=int, min=1))
    seq: int | None = field(default=None, metadata=flag(
        "Sequence length (hf: targets).", kind=int, min=1))
    inputs: tuple[str, ...] = field(default=(), metadata=flag(
        "A keyword input; may be repeated.", kind=list[str], name="--input",
        metavar="NAME:DTYPE[SHAPE]"))
    settings: tuple[str, ...] = field(default=(), metadata=flag(
        "A setting of an hf: config; may be repeated.", kind=list[str], name="--set",
        metavar="KEY=VALUE"))
    loss: str | None = field(default=None, metadata=flag(
        "The loss: package.module:function of the model's output, or the name of one of torch's, "
        "such as cross_entropy."))


@dataclass(frozen=True, slots=True)
class SizedTargetOptions(TargetOptions):
    """Options of a model that is evaluated at several sizes."""

    target: str = field(metadata=flag(
        "package.module:factory or path/to/file.py:factory (called with the size, returns (model, "
        "inputs) or (model, inputs, loss_fn)), or hf:CONFIG (a config.json, or a model type such "
        "as gpt2).", positional=True, metavar="TARGET"))


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """Options of the search for the largest size."""

    budget: str = field(metadata=flag("Peak of the whole step: 8GB (1e9), 8GiB (2**30), 500MB."))
    overhead: str | None = field(default=None, metadata=flag(
        "The most extra time that a plan may cost: 35% or 0.35."))
    smallest: int = field(default=1, metadata=flag("Where the range begins.", kind=int, min=1))
    largest: int | None = field(default=None, metadata=flag(
        "Where the range ends.", kind=int, min=1))
    multiple_of: int = field(default=1, metadata=flag("Try multiples of this.", kind=int, min=1))
    plan: bool = field(default=True, metadata=flag(
        "Look for the largest with a plan, too.", kind=bool))


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of data parallelism; the budget is then that of one rank."""

    parallel: str | None = field(default=None, metadata=flag(
        "One rank of many: ddp, zero1, zero2, zero3 or fsdp2; needs --ranks.", metavar="KIND"))
    ranks: int | None = field(default=None, metadata=flag(
        "How many ranks there are.", kind=int, min=1))
    units: tuple[str, ...] = field(default=(), metadata=flag(
        "A module that is sharded by itself, wildcards allowed; may be repeated.",
        kind=list[str], name="--unit", metavar="NAME"))

    def settings(self) -> DataParallel | None:
        """The settings given; raises `UsageError`, or `ValueError` like `planner.DataParallel`."""
        if self.parallel is None:
            if self.ranks is not None or self.units:
                raise UsageError("--ranks and --unit say how --parallel is meant, which is "
                                 "missing: write --parallel fsdp2 --ranks 8")
            return None
        if self.ranks is None:
            raise UsageError(f"--parallel {self.parallel} needs the number of ranks: write "
                             f"--parallel {self.parallel} --ranks 8")
        return DataParallel(self.parallel, self.ranks,  # type: ignore[arg-type]
                            units=self.units or None)


def command(*, without: Collection[str] = (), **only: Collection[str]
            ) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that makes a function a command: fields of its dataclass parameters become options,
    and its errors become a message and an exit code.

    `without`: fields that are not options of this command; `only`: the fields of a parameter that
    are.
    """

    def expand(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        taken: dict[str, list[Field[Any]]] = {
            name: [each for each in fields(parameter.annotation) if "flag" in each.metadata
                   and each.name in only.get(name, {each.name}) and each.name not in without]
            for name, parameter in signature.parameters.items()
            if is_dataclass(parameter.annotation)}

        @functools.wraps(function)
        def run(**values: Any) -> None:
            with results_apart(), reported(), watched(None, "loading", logs=False):
                for name, group in taken.items():
                    given = {each.name: _given(each, values.pop(each.name)) for each in group}
                    values[name] = signature.parameters[name].annotation(**{
                        key: tuple(value) if isinstance(value, list) else value
                        for key, value in given.items() if value is not None})
                function(**values)

        parameters: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            parameters += ([parameter.replace(kind=parameter.KEYWORD_ONLY)] if name not in taken
                           else map(_parameter, taken[name]))
        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return expand


def _given(field: Field[Any], written: Any) -> Any:
    """The value of a field's option; `None` if it was not given."""
    flag = field.metadata["flag"]
    if written and flag.read is not None:
        return flag.read(written)
    return written if flag.value is None else flag.value if written else None


def _parameter(field: Field[Any]) -> inspect.Parameter:
    """A field as a parameter of a Typer command."""
    flag = field.metadata["flag"]
    name = flag.name or f"--{field.name.replace('_', '-')}"
    if flag.kind is bool:
        name += f"/--no-{name.removeprefix('--')}"
    about: Any = (
        typer.Argument(metavar=flag.metavar, help=flag.help) if flag.positional
        else typer.Option(name, metavar=flag.metavar, min=flag.min, help=flag.help))
    if flag.value is not None:
        return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=False,
                                 annotation=Annotated[bool, about])
    is_list = get_origin(flag.kind) is list
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY,
        default=(inspect.Parameter.empty if field.default is MISSING
                 else None if is_list else field.default),
        annotation=Annotated[
            flag.kind | None if is_list or field.default is None else flag.kind, about])


_MOST_BYTES = 2**62
"""More than any machine has; beyond this torch cannot count the elements."""

_INPUT = re.compile(r"([A-Za-z_]\w*):(\w+)\[([\d,\s]*)\]")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of an input, and for integers the range of its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    below: int = 2
    """Integers are drawn from 0 to below this."""

    def make(self, device: str) -> torch.Tensor:
        """Create the tensor: on `meta` without values, elsewhere with random ones from a fixed
        seed.

        The process's random state is not changed.
        """
        import torch

        size_bytes = math.prod(self.shape) * self.dtype.itemsize
        if size_bytes > _MOST_BYTES:
            raise UsageError(f"{self.name} of shape {list(self.shape)} would have {size_bytes:,} "
                             "bytes; give smaller sizes")
        if device == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        source = torch.Generator().manual_seed(0)
        try:
            if self.dtype.is_floating_point or self.dtype.is_complex:
                values = torch.randn(self.shape, generator=source)
            else:
                values = torch.randint(0, self.below, self.shape, generator=source)
            return values.to(device=device, dtype=self.dtype)
        except RuntimeError as error:  # mostly out of memory
            raise TargetError(f"{self.name} of shape {list(self.shape)} cannot be made on "
                              f"{device}: {error}") from None


def parse_inputs(texts: Iterable[str]) -> dict[str, TensorSpec]:
    """Specs by name; raises `UsageError` for a malformed text."""
    return {spec.name: spec for spec in map(_parse, texts)}


def _parse(text: str) -> TensorSpec:
    import torch

    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--input must be NAME:DTYPE[SHAPE], such as input_ids:int64[8,512], "
                         f"got {text!r}")
    name, dtype_name, sizes = match.groups()
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input {text!r}: {dtype_name!r} is no dtype; write float32, bfloat16, "
                         "int64 or bool, for example")
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    return TensorSpec(name, dtype, shape)
