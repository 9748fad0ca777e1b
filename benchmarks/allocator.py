"""Compare the model of torch's caching allocator with torch's own, on a machine without a GPU.

    python -m benchmarks.allocator --torch /path/to/python --include /usr/local/cuda/include

`--torch` is the Python of an environment with a CUDA build of torch (Linux); gcc and the headers of
CUDA are needed.  There the allocator runs on a device that only hands out addresses
(`no_device.c`).  The same requests, drawn at random, and those of whole training loops, go through
the model; allocated and reserved bytes are compared after each request.  Exit status 1 if any of
them differ.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import benchmark_parser
from benchmarks.models import WORKLOADS
from benchmarks.table import Table
from planner._graph_capture.memory.caching_allocator import (
    CachingAllocator,
    replay,
    takes_first_made,
)
from planner.step.loop_trace import compose

MIB = 2 ** 20
CHILD = """
import json, sys, torch
torch.cuda.init()
for sizes, events in json.load(open(sys.argv[1])):
    torch.cuda.empty_cache()
    held, row = {}, []
    for event in events:
        if event >= 0:
            held[event] = torch.empty(sizes[event], dtype=torch.uint8, device="cuda")
        else:
            del held[~event]
        row.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    held.clear()
    print(json.dumps(row))
"""
Requests = tuple[list[int], list[int]]
"""Sizes, and events as in `graph_capture.memory.trace`; each block is made once."""


def no_device_parser(module: str, doc: str | None, **options: Any) -> ArgumentParser:
    """Return the parser of a benchmark that uses the CUDA build of torch in another Python."""
    parser = benchmark_parser(module, doc, **options)
    parser.add_argument("--torch", required=True, help="Python with a CUDA build of torch")
    parser.add_argument("--include", default="/usr/local/cuda/include", help="CUDA's headers")
    return parser


def on_no_device(python: str, include: str, arguments: Sequence[str],
                 environment: Mapping[str, str]) -> str:
    """Run a Python with a CUDA build of torch on the simulated device, and return its output."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "no_device.so")
        sources = [str(Path(__file__).with_name(f"{name}.c"))
                   for name in ("no_device", "no_kernels", "no_kernels_void")]
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-w", f"-I{include}", *sources,
                        "-o", str(library)], check=True)
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            shutil.copy(library, Path(folder, name))
        return subprocess.run(
            [python, "-W", "ignore", *arguments], check=True, text=True, stdout=subprocess.PIPE,
            env={**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": folder,
                 **environment}).stdout


def random_requests(seed: int) -> Requests:
    """Return a few hundred requests, of sizes around the allocator's thresholds."""
    draw = random.Random(seed)
    kinds = [(1, 4096), (1, MIB), (MIB - 2000, 12 * MIB), (9 * MIB, 200 * MIB)]
    taken = draw.sample(kinds, draw.randint(1, len(kinds)))
    edges = [512, 513, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 10 * MIB + 1, 20 * MIB]
    pool = [draw.choice(edges) if draw.random() < 0.2 else draw.randint(*draw.choice(taken))
            for _ in range(draw.choice([5, 40, 400]))]
    sizes: list[int] = []
    events: list[int] = []
    alive: list[int] = []
    for _ in range(draw.choice([200, 600, 1500])):
        if alive and draw.random() < 0.48:
            events.append(~alive.pop(draw.randrange(len(alive))))
        else:
            alive.append(len(sizes))
            events.append(len(sizes))
            sizes.append(draw.choice(pool))
    return sizes, events


def loop_requests(name: str) -> Requests:
    """Return the requests of loading and two plain steps of a model."""
    prepared = WORKLOADS[name]().prepare(device="cuda", optimizer="adamw")
    around = prepared.surroundings
    assert around is not None and around.plain is not None
    trace = compose(around.resident, around.plain, around.optimizer, around.loop).trace
    number: dict[int, int] = {}
    sizes: list[int] = []
    events: list[int] = []
    for event in trace.events:
        block = event if event >= 0 else ~event
        if trace.blocks[block].size_bytes and event >= 0:
            number[block] = len(sizes)
            events.append(len(sizes))
            sizes.append(trace.blocks[block].size_bytes)
        elif trace.blocks[block].size_bytes:
            events.append(~number.pop(block))
    return sizes, events


def of_torch(python: str, include: str, requests: Sequence[Requests], expandable: bool
             ) -> list[list[list[int]]]:
    """Return allocated and reserved bytes after each event, according to torch's allocator."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "requests.json")
        given.write_text(json.dumps(requests), encoding="utf-8")
        told = on_no_device(python, include, ["-c", CHILD, str(given)], {
            "PYTHONPATH": "", "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"})
        return [json.loads(line) for line in told.splitlines()]


def of_model(requests: Requests, expandable: bool, torch_version: str) -> list[list[int]]:
    """Return allocated and reserved bytes after each event, according to the model."""
    sizes, events = requests
    allocator = CachingAllocator(expandable=expandable,
                                 first_made=takes_first_made(torch_version))
    held: dict = {}
    row = []
    for event in events:
        replay(sizes, [event], allocator, held)
        row.append([allocator.allocated_bytes, allocator.reserved_bytes])
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = no_device_parser("allocator", __doc__, models=("gpt2", "bert"))
    parser.add_argument("--sequences", type=int, default=60, help="how many are drawn at random")
    arguments = parser.parse_args(argv)
    given = {"random": [random_requests(seed) for seed in range(arguments.sequences)],
             "training loops": [loop_requests(name) for name in arguments.model]}
    version = subprocess.run([arguments.torch, "-c", "import torch; print(torch.__version__)"],
                             check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    print(f"torch {version}\n")
    table = Table("requests:14", "expandable:>", "sequences:d", "events:d", "other bytes:d",
                  "reserved at the end, %:+.3f")
    ok = True
    for what, requests in given.items():
        for expandable in (False, True):
            theirs = of_torch(arguments.torch, arguments.include, requests, expandable)
            ours = [of_model(each, expandable, version) for each in requests]
            differing = sum(mine != other for mine, other in zip(ours, theirs, strict=True))
            ok = ok and not differing
            most = max((mine[-1][1] / other[-1][1] - 1
                        for mine, other in zip(ours, theirs, strict=True)), key=abs)
            table.row(what, "yes" if expandable else "no", len(requests), sum(map(len, ours)),
                      differing, 100 * most)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
