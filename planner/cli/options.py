"""Options of the command line, each defined once, and their conversion to parameters of a command.

A command declares a dataclass as one parameter (`Planning`, `TargetOptions`, `SizeOptions`);
`command` presents to Typer, one by one, those of its fields that have a `Flag`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from planner.arguments.parallel import DataParallel
from planner.arguments.planning import flag
from planner.cli.failures import UsageError, reported
from planner.cli.output import results_apart
from planner.progress import on_terminals_only, watched

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")]
Budget = Annotated[str | None, typer.Option(
    "--budget", help='Peak of the whole step: 8GB (1e9), 8GiB (2**30), 500MB, 60%.')]
SizeBudget = Annotated[str, typer.Option(
    "--budget", help="Peak of the whole step: 8GB (1e9), 8GiB (2**30), 500MB.")]
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
            with (results_apart(), on_terminals_only(), reported(),
                  watched(None, "loading")):
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
