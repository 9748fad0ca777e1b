"""Predicted against measured memory of the whole training step, phase by phase.

    python -m benchmarks.step_memory --model gpt2,resnet --optimizer adamw --all

Three consecutive steps of a real training loop run on the CPU in one recording of the allocator,
from the model's loading on.  Compared are the peaks of the first step and of the later ones, and
what is held between steps; with `--all` every row of the grid is printed, else one for each model
and optimizer, with the largest deviation of its rows.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import add_names, benchmark_parser, parse
from benchmarks.measure import MEGABYTE
from benchmarks.models import Workload, bert, gpt2, resnet, vit
from benchmarks.table import Table
from graph_capture.memory.allocator import record_stages
from graph_capture.optimizer.step import OptimizerSettings
from graph_capture.plain_step.loop import PlainLoop
from graph_capture.plain_step.loss import Objective, objective
from planner.arguments.inputs import split_inputs
from planner.step.loop_trace import StepPhase, TrainingLoop, compose
from planner.training_loop.account import LoopAccount, account_of

STEPS = 3

MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2": lambda: gpt2(batch=2, sequence=64),
    "bert": lambda: bert(batch=2, sequence=64),
    "vit": lambda: vit(batch=2, image=32),
    "resnet": lambda: resnet(batch=2, image=64),
}
"""Small enough for the optimizer's state to matter as much as activations do."""

def muon(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, as torch's documentation advises."""
    return [torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-5),
            torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=1e-5)]


def lbfgs(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """L-BFGS that never ends a step early; its history is full in the second step."""
    return torch.optim.LBFGS(parameters, max_iter=4, history_size=4,
                             tolerance_grad=0.0, tolerance_change=0.0)


Made = torch.optim.Optimizer | list[torch.optim.Optimizer]
OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], Made]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-5),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-5),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-5, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-5),
    "muon+adamw": muon,
    "lbfgs": lbfgs,
    **{name: lambda p, name=name: getattr(torch.optim, name)(p, lr=1e-5) for name in (
        "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")},
}
PUBLISHED = tuple(name for name in OPTIMIZERS if not name[0].isupper())
"""Those of the table; the others are of the same kinds."""
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the grid."""

    optimizer: str
    dtype: str
    accumulation: int
    set_to_none: bool

    def __str__(self) -> str:
        reset = "None" if self.set_to_none else "zero"
        return f"{self.optimizer} {self.dtype} accumulation {self.accumulation} {reset}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of a real loop."""

    loaded_bytes: int
    """Held when model, optimizer and batch are there."""
    phase_bytes: tuple[Mapping[StepPhase, int], ...]
    """The peak of each phase, for each step."""
    end_bytes: tuple[int, ...]
    """Held after each step."""

    def peak_bytes(self, step: int) -> int:
        """The most that a step takes."""
        return max(self.phase_bytes[step].values())


class RealLoop:
    """A training loop in stages; names are bound anew where a loop binds them."""

    def __init__(self, workload: Workload, optimizer: Callable[..., Made],
                 autocast: torch.dtype | None, accumulation: int, set_to_none: bool) -> None:
        self._workload, self._make, self._autocast = workload, optimizer, autocast
        self._accumulation, self._set_to_none = accumulation, set_to_none
        self._output: Any = None
        self._goal: Objective | None = None

    def run(self) -> Measured:
        """Load, and make `STEPS` steps."""
        stages: list[Callable[[], None]] = [self._load]
        phases: list[tuple[int, StepPhase]] = []
        for step in range(STEPS):
            if self._make is lbfgs:  # one stage: the step calls what makes the micro-steps
                stages.append(self._step_by_closure)
                phases.append((step, StepPhase.OPTIMIZER_STEP))
                continue
            for _ in range(self._accumulation):
                stages += [self._forward, self._loss, self._backward]
                phases += [(step, phase) for phase in (
                    StepPhase.FORWARD, StepPhase.LOSS, StepPhase.BACKWARD)]
            stages += [self._step]
            phases += [(step, StepPhase.OPTIMIZER_STEP)]
        loaded, *records = record_stages(stages)
        peaks: list[dict[StepPhase, int]] = [{} for _ in range(STEPS)]
        ends = [0] * STEPS
        for (step, phase), record in zip(phases, records, strict=True):
            peaks[step][phase] = max(record.peak_bytes, peaks[step].get(phase, 0))
            ends[step] = record.end_bytes
        return Measured(loaded.end_bytes, tuple(peaks), tuple(ends))

    def _load(self) -> None:
        self._copy = replace(self._workload, model=copy.deepcopy(self._workload.model),
                             inputs=copy.deepcopy(self._workload.inputs))
        made = self._make(list(self._copy.model.parameters()))
        self._optimizers = made if isinstance(made, list) else [made]

    def _context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast("cpu", self._autocast)

    def _forward(self) -> None:
        self._casts = self._context()  # left when the loss is there
        self._casts.__enter__()
        self._output = self._copy.call(self._copy.model)

    def _loss(self) -> None:
        self._goal = objective(self._output, self._workload.loss_fn)
        self._casts.__exit__(None, None, None)

    def _backward(self) -> None:
        assert self._goal is not None
        self._goal.backward()

    def _step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=self._set_to_none)
        self._output = self._goal = None

    def _step_by_closure(self) -> None:
        (optimizer,) = self._optimizers
        optimizer.step(self._evaluate)

    def _evaluate(self) -> torch.Tensor:
        """What L-BFGS calls: the micro-steps from reset gradients; returns the loss."""
        (optimizer,) = self._optimizers
        optimizer.zero_grad(set_to_none=self._set_to_none)
        torch.manual_seed(0)  # the same dropout: else its curvature is noise, and not remembered
        for _ in range(self._accumulation):
            self._forward()
            self._loss()
            self._backward()
        assert self._goal is not None
        (loss,) = self._goal.roots
        self._output = self._goal = None
        return loss


class Predictions:
    """The accounts of one model; what settings share is traced once."""

    def __init__(self, workload: Workload) -> None:
        args, kwargs = split_inputs(workload.model, workload.inputs)
        self._model = workload.model
        self._loops = {name: PlainLoop(workload.model, args, kwargs, loss_fn=workload.loss_fn,
                                       autocast=dtype) for name, dtype in DTYPES.items()}
        self._optimizers: dict[str, Any] = {}

    def account(self, setting: Setting) -> LoopAccount:
        """What is predicted for this setting."""
        loop = self._loops[setting.dtype]
        if setting.optimizer not in self._optimizers:
            made = OPTIMIZERS[setting.optimizer](list(self._model.parameters()))
            self._optimizers[setting.optimizer] = loop.optimizer(made, OptimizerSettings())
        return account_of(compose(
            loop.resident(), loop.micro_step, self._optimizers[setting.optimizer],
            TrainingLoop(accumulation=setting.accumulation, set_to_none=setting.set_to_none)))


@dataclass(frozen=True, slots=True)
class Row:
    """A setting, predicted and measured."""

    setting: Setting
    predicted: LoopAccount
    measured: Measured

    @property
    def deviations(self) -> tuple[float, ...]:
        """Of the predicted peaks of the three steps from the measured ones, in percent."""
        predicted = (self.predicted.first, self.predicted.steady, self.predicted.steady)
        return tuple(100 * (each.peak_bytes / self.measured.peak_bytes(step) - 1)
                     for step, each in enumerate(predicted))

    @property
    def worst(self) -> float:
        """The largest deviation, with its sign."""
        return max(self.deviations, key=abs)

    @property
    def worst_phase(self) -> float:
        """The largest deviation of any phase of any step from the measured one, in percent; of the
        whole steps where the optimizer runs all phases within its own."""
        if len(self.measured.phase_bytes[0]) == 1:
            return self.worst
        found = []
        for step, peaks in enumerate(self.measured.phase_bytes):
            account = self.predicted.first if step == 0 else self.predicted.steady
            found += [100 * (account[phase].peak_bytes / size - 1)
                      for phase, size in peaks.items()]
        return max(found, key=abs)

    @property
    def resident_off_bytes(self) -> int:
        """Predicted less measured bytes: when all is loaded, and between steps; the largest."""
        loaded = self.predicted.loading.peak_bytes + self.predicted.resident.inputs
        return max((loaded - self.measured.loaded_bytes,
                    *(self.predicted.resident_bytes - end for end in self.measured.end_bytes[1:])),
                   key=abs)


def run(workload: Workload, optimizers: Sequence[str]) -> Iterator[Row]:
    """The rows of one model."""
    predictions = Predictions(workload)
    for setting in starmap(Setting, product(optimizers, DTYPES, (1, 4), (True, False))):
        measured = RealLoop(workload, OPTIMIZERS[setting.optimizer], DTYPES[setting.dtype],
                            setting.accumulation, setting.set_to_none).run()
        yield Row(setting, predictions.account(setting), measured)


def cells(model: str, row: Row, *, summary: bool) -> tuple[object, ...]:
    """What a row of the table shows; `summary`: for all rows of its model and optimizer."""
    setting = row.setting
    reset = "None" if setting.set_to_none else "zero"
    return (model, setting.optimizer, *(("all", "*", "all") if summary else (
        setting.dtype, setting.accumulation, reset)),
        row.predicted.steady.peak_bytes / MEGABYTE, row.measured.peak_bytes(STEPS - 1) / MEGABYTE,
        row.worst, row.worst_phase, row.resident_off_bytes, row.predicted.steady.fullest.phase)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where a peak is off by more than 1%, or resident bytes are."""
    parser = benchmark_parser("step_memory", __doc__, models=MODELS, known=MODELS, threads=1)
    add_names(parser, "--optimizer", OPTIMIZERS, PUBLISHED)
    parser.add_argument("--all", action="store_true", help="print every row")
    arguments = parse(parser, argv)
    started = time.perf_counter()
    table = Table("model:6", "optimizer:13", "dtype", "k:>", "reset", "predicted MB:.3f",
                  "measured MB:.3f", "peak off %:.3f", "phase off %:.3f", "resident off B:d",
                  "peak in:14")
    rows: list[Row] = []
    for name in arguments.model:
        workload = MODELS[name]()
        of_model: dict[str, list[Row]] = {}
        for row in run(workload, arguments.optimizer):
            rows.append(row)
            of_model.setdefault(row.setting.optimizer, []).append(row)
            if arguments.all:
                table.row(*cells(name, row, summary=False))
        if not arguments.all:
            for group in of_model.values():
                worst = max(group, key=lambda row: abs(row.worst))
                table.row(*cells(name, worst, summary=True))
    exact = sum(row.resident_off_bytes == 0 for row in rows)
    print(f"\n{len(rows)} settings in {time.perf_counter() - started:.0f} s: the largest deviation "
          f"of a peak is {max(abs(row.worst) for row in rows):.3f}%, of any phase "
          f"{max(abs(row.worst_phase) for row in rows):.3f}%; resident bytes are exact in {exact}")
    return 0 if exact == len(rows) and all(abs(row.worst) <= 1 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
