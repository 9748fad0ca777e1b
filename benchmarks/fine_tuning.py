"""Fine-tuning on a CPU, measured: LoRA on bitsandbytes' NF4 weights, and steps in the backward.

    python -m benchmarks.fine_tuning --table nf4 --layers 4,12 --rounds 5
    python -m benchmarks.fine_tuning --table in_backward

`nf4`: Llama of transformers, 256 wide, batch 4 x 256 tokens, LoRA of rank 8; steps of forward, loss
and backward, in turns in one process.  Peaks are allocator events above resident memory.
`in_backward`: 4 layers, 128 wide, batch 4 x 64 tokens or 4 images of 32 x 32; peaks of the whole
third step, with resident memory; planned steps are the smallest that are found.  Needs
bitsandbytes and peft.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim import Optimizer

import planner
from benchmarks import models
from benchmarks.arguments import add_names, add_numbers, benchmark_parser, parse
from benchmarks.measure import (
    MEGABYTE,
    peak_bytes,
    plan_or_smallest,
    storage_bytes,
    time_steps,
    with_gradient_checkpointing,
)
from benchmarks.models import LossOnly, Workload, returning_loss_only
from benchmarks.table import Table
from planner._graph_capture.torch_compat import cpu_allocations

TABLES = ("nf4", "in_backward")
OPTIMIZERS = ("sgd", "adamw", "adamw8bit")


def quantized(layers: int) -> Workload:
    """Create a Llama with NF4 weights in its layers and LoRA on top."""
    import bitsandbytes as bnb

    workload = models.llama(batch=4, sequence=256, layers=layers)
    blocks: Any = workload.model.get_submodule("model.layers")
    for name, module in [*blocks.named_modules()]:
        if isinstance(module, nn.Linear):
            packed = bnb.nn.Linear4bit(module.in_features, module.out_features, bias=False,
                                       compute_dtype=torch.float32, quant_type="nf4")
            packed.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False,
                                              quant_type="nf4")
            blocks.set_submodule(name, packed.to("cpu"))
    model: Any = workload.model
    adapted = get_peft_model(model, LoraConfig(
        r=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "up_proj"]))
    return Workload(f"NF4, {layers} layers", adapted.train(), workload.inputs)


def nf4(layers: Sequence[float], rounds: int, time_limit: float) -> None:
    """Print peaks and times of the steps of a quantized model."""
    table = Table("model:<16", "step:<24", "peak MB:8.2f", "predicted MB:8.2f", "time:<22",
                  "estimated extra:.1%")
    for count in layers:
        workload = returning_loss_only(quantized(int(count)))
        checkpointed = with_gradient_checkpointing(Workload(
            workload.name, workload.model.get_submodule("model"), workload.inputs))
        assert checkpointed is not None
        plain, by_layer = workload.model, LossOnly(checkpointed)
        limit = peak_bytes(workload, by_layer)
        plan = partial(planner.plan, plain, workload.inputs, time_limit=time_limit)
        resident = plan(solver="none").resident_bytes
        plans = {"planned at its peak": plan(budget=limit + resident),
                 "smallest": plan_or_smallest(lambda budget, plan=plan: plan(budget=budget))}
        steps = {"plain": plain, "gradient_checkpointing": by_layer,
                 **{name: each.apply(plain) for name, each in plans.items()}}
        peaks = [peak_bytes(workload, step) for step in steps.values()]
        times = time_steps(workload, steps.values(), rounds)
        for index, (name, peak) in enumerate(zip(steps, peaks, strict=True)):
            found = plans.get(name)
            predicted = found and found.peak_bytes - found.resident_bytes
            if name == "plain":
                predicted = plans["smallest"].baseline_peak_bytes - resident
            table.row(workload.name, name, peak / MEGABYTE, predicted and predicted / MEGABYTE,
                      str(times.ratio(index, 0)), found and found.overhead)


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    """Create an optimizer with its default settings."""
    if name == "adamw8bit":
        import bitsandbytes as bnb

        optimizer: Optimizer = bnb.optim.AdamW8bit(parameters)
        return optimizer
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    return kinds[name](parameters, 1e-3)


def stepping_in_backward(model: nn.Module, optimizer: str) -> nn.Module:
    """Give each parameter a hook that steps its optimizer and frees its gradient."""
    for parameter in model.parameters():
        stepper = make_optimizer(optimizer, [parameter])

        def use(parameter: torch.Tensor, stepper: Optimizer = stepper) -> None:
            stepper.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(use)
    return model


def loop_peak_bytes(workload: Workload, model: nn.Module, optimizer: str, *, early: bool) -> int:
    """Return the peak of the third step of a loop, with resident memory."""
    steppers: list[Optimizer] = []

    def begin() -> None:
        if early:
            stepping_in_backward(model, optimizer)
        else:
            steppers.append(make_optimizer(optimizer, [*model.parameters()]))

    def step() -> None:
        workload.call(model).backward()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()

    gc.collect()
    *before, last = cpu_allocations(begin, step, step, step)
    peak = sum(map(sum, before)) + max(accumulate(last, initial=0))
    inputs = workload.inputs.values() if isinstance(workload.inputs, dict) else workload.inputs
    return peak + storage_bytes([*model.parameters(), *model.buffers(), *inputs])


def in_backward(names: Sequence[str], optimizers: Sequence[str], time_limit: float) -> None:
    """Print the smallest peaks of training loops with steps at the end and in the backward."""
    table = Table("model:<6", "optimizer:<10", *(
        f"{step}, {kind}:8.3f" for step in ("plain, at the end", "plain, in the backward",
                                            "planned, at the end", "planned, in the backward")
        for kind in ("measured MB", "predicted MB")))
    text = {"batch": 4, "sequence": 64, "width": 128}
    builders = {"gpt2": partial(models.gpt2, dropout=0.0, **text),
                "llama": partial(models.llama, inside=384, **text),
                "vit": partial(models.vit, width=128, batch=4, image=32)}
    for name in names:
        for optimizer in optimizers:
            cells: list[float] = []
            for is_planned in (False, True):
                for early in (False, True):
                    workload = returning_loss_only(builders[name]())
                    model, plan = workload.model, partial(
                        planner.plan, workload.model, workload.inputs, optimizer=optimizer,
                        optimizer_in_backward=early, time_limit=time_limit)
                    found = plan_or_smallest(lambda budget, plan=plan: plan(budget=budget)) \
                        if is_planned else plan(solver="none")
                    predicted = found.peak_bytes if is_planned else found.baseline_peak_bytes
                    measured = loop_peak_bytes(
                        workload, found.apply(model) if is_planned else model, optimizer,
                        early=early)
                    cells += [measured / MEGABYTE, predicted / MEGABYTE]
            table.row(name, optimizer, *cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = benchmark_parser("fine_tuning", __doc__, models=("gpt2", "llama", "vit"),
                              known=("gpt2", "llama", "vit"), rounds=5, threads=1, time_limit=10)
    add_names(parser, "--table", TABLES)
    add_names(parser, "--optimizer", OPTIMIZERS)
    add_numbers(parser, "--layers", (4, 12), "of the quantized model")
    arguments = parse(parser, argv)
    if "nf4" in arguments.table:
        nf4(arguments.layers, arguments.rounds, arguments.time_limit)
    if "in_backward" in arguments.table:
        in_backward(arguments.model, arguments.optimizer, arguments.time_limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
