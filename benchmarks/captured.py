"""Training steps captured for the solvers: the models of `benchmarks.models`, and large ones on the
meta device, of which nothing but shapes exists.

    python -m benchmarks.captured llama_8b -o llama_8b.problem

prints how long capture takes and what it holds at most, and writes the scheduling problem.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.arguments import benchmark_parser, parse
from benchmarks.models import WORKLOADS, Workload, gpt2, llama
from benchmarks.problem_file import save_problem
from planner.step.prepared import PreparedStep


def _gpt2(layers: int) -> Workload:
    """GPT-2 medium's layers, batch 8, 1024 tokens, a small vocabulary, dropout as published."""
    with torch.device("meta"):
        return gpt2(layers=layers, sequence=1024, width=1024, heads=16, vocabulary=4096)


def _llama(layers: int, width: int, inside: int, heads: int) -> Workload:
    """Llama 3 in bfloat16, 8 sequences of 4096 tokens."""
    with torch.device("meta"):
        work = llama(layers=layers, sequence=4096, width=width, inside=inside, heads=heads,
                     groups=8, vocabulary=128256)
    return replace(work, model=work.model.to(torch.bfloat16))


BUILT: dict[str, Callable[[], Workload]] = {
    **{f"gpt2_{layers}": partial(_gpt2, layers) for layers in (12, 24, 48, 96)},
    "llama_8b": partial(_llama, 32, 4096, 14336, 32),
    "llama_70b": partial(_llama, 80, 8192, 28672, 64),
    **WORKLOADS,
}
"""Steps by name; those on the meta device first, whose numbers are those of layers or parameters.
"""


def captured(name: str) -> PreparedStep:
    """The training step of this name."""
    return BUILT[name]().prepare()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = benchmark_parser("captured", __doc__)
    parser.add_argument("model", choices=BUILT)
    parser.add_argument("-o", "--output", type=Path, help="where to write the problem")
    arguments = parse(parser, argv)
    start = time.monotonic()
    step = captured(arguments.model)
    seconds = time.monotonic() - start
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{arguments.model}: {len(step.base.problem)} ops captured in {seconds:.1f} s, at most "
          f"{held / 2**30:.2f} GiB of host memory; a step without recomputation peaks at "
          f"{step.keep_all_peak_bytes / 1e9:.2f} GB, {step.resident_bytes / 1e9:.2f} GB resident")
    if arguments.output is not None:
        save_problem(step.base.problem, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
