"""The options of the command line, each in one place, and the groups in which commands share them.

A command takes a group as one parameter; `expanded` shows Typer the options in it one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from planner.cli.target import TargetOptions

Target = Annotated[str, typer.Argument(
    metavar="TARGET", help="package.module:factory (returns a model or (model, inputs)), or "
    "hf:CONFIG (a config.json, or a model type such as gpt2).")]
SizedTarget = Annotated[str, typer.Argument(
    metavar="TARGET", help="package.module:factory (called with the size, returns "
    "(model, inputs)), or hf:CONFIG (a config.json, or a model type such as gpt2).")]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Batch size (hf: targets).")]
Seq = Annotated[int | None, typer.Option("--seq", min=1, help="Sequence length (hf: targets).")]
Inputs = Annotated[list[str] | None, typer.Option(
    "--input", metavar="NAME:DTYPE[SHAPE]", help="A keyword input; may be repeated.")]
Settings = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", help="A setting of an hf: config; may be repeated.")]
Optimizer = Annotated[str | None, typer.Option("--optimizer", help="sgd, adam, adamw, ...")]
Solver = Annotated[str, typer.Option("--solver", help="auto, none, sqrt_n, dp, ilp, ...")]
Backend = Annotated[str, typer.Option("--backend", help="eager or inductor.")]
CostModel = Annotated[str, typer.Option(
    "--cost-model", help="What recomputation costs: roofline (time), measured or flops.")]
Device = Annotated[str | None, typer.Option("--device", help="The device planned for.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds for the solver.")]
Keep = Annotated[list[str] | None, typer.Option(
    "--keep", metavar="NAME", help="Module or op whose results are kept; may be repeated.")]
Probe = Annotated[bool, typer.Option(
    "--probe/--no-probe", help="Measure the workspace of single ops.")]
Accumulation = Annotated[int, typer.Option(
    "--accumulation", min=1, help="Micro-steps to each step of the optimizer.")]
Regions = Annotated[str, typer.Option(
    "--regions", help='Compiled as one piece: model, blocks, or names of modules.')]
Budget = Annotated[str | None, typer.Option(
    "--budget", help='Peak of the whole step: 8GB (1e9), 8GiB (2**30), 500MB, 60%.')]
SizeBudget = Annotated[str, typer.Option(
    "--budget", help="Peak of the whole step: 8GB (1e9), 8GiB (2**30), 500MB.")]
Overhead = Annotated[str | None, typer.Option(
    "--overhead", help="The most extra time that a plan may cost: 35% or 0.35.")]
Smallest = Annotated[int, typer.Option("--smallest", min=1, help="Where the range begins.")]
Largest = Annotated[int | None, typer.Option("--largest", min=1, help="Where the range ends.")]
MultipleOf = Annotated[int, typer.Option("--multiple-of", min=1, help="Try multiples of this.")]
Planned = Annotated[bool, typer.Option(
    "--plan/--no-plan", help="Look for the largest with a plan, too.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """A model and its inputs."""

    target: Target
    batch: Batch = None
    seq: Seq = None
    inputs: Inputs = None
    settings: Settings = None

    def options(self) -> TargetOptions:
        """What they say about the target."""
        return TargetOptions(self.target, self.batch, self.seq, tuple(self.inputs or ()),
                             tuple(self.settings or ()))


@dataclass(frozen=True, slots=True)
class PlanningGroup:
    """How a step is captured and planned."""

    optimizer: Optimizer = None
    solver: Solver = "auto"
    backend: Backend = "eager"
    cost_model: CostModel = "roofline"
    device: Device = None
    time_limit: TimeLimit = 60.0
    keep: Keep = None
    probe: Probe = True

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `planner.plan`, checked as far as that needs no model."""
        from planner.api import check_effort

        check_effort(self.solver, self.time_limit)
        return {**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
                "keep": tuple(self.keep or ())}


@dataclass(frozen=True, slots=True)
class SizeGroup:
    """What the largest size is looked for under."""

    budget: SizeBudget
    overhead: Overhead = None
    smallest: Smallest = 1
    largest: Largest = None
    multiple_of: MultipleOf = 1
    plan: Planned = True


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of its groups in place of the groups."""
    signature = inspect.signature(command, eval_str=True)
    groups = {name: parameter.annotation for name, parameter in signature.parameters.items()
              if dataclasses.is_dataclass(parameter.annotation)}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made = {name: group(**{field.name: values.pop(field.name)
                               for field in dataclasses.fields(group)})
                for name, group in groups.items()}
        command(**made, **values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        kinds = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=(
                inspect.Parameter.empty if field.default is dataclasses.MISSING
                else field.default), annotation=kinds[field.name])
            for field in dataclasses.fields(groups[name])]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
