"""Compare the predicted attention kernel with torch's own choice, on a machine without a GPU.

    python -m benchmarks.attention_choice --torch /path/to/python --include /usr/local/cuda/include

`--torch` is the Python of an environment with a CUDA build of torch and this package's needs.  Its
own code chooses for a few thousand calls on the device of `no_device.c`, once for each compute
capability, and `graph_capture.device_kernels.attention` chooses for the same operands.  Exit status
1 if they differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from benchmarks.allocator import no_device_parser, on_no_device
from planner._graph_capture.device_kernels.attention import AttentionCall, choose_attention

CAPABILITIES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
USUAL = (2, 8, 96, 64)
SHAPES = (  # of queries, keys and values
    ((2, 8, 96, 192), (2, 8, 96, 192), (2, 8, 96, 128)), ((8, 96, 64),) * 3, ((96, 64),) * 3,
    (USUAL, (2, 1, 96, 64), (2, 1, 96, 64)), ((2, 8, 96, 256), (2, 8, 96, 256), (2, 8, 96, 128)),
    (USUAL, (2, 8, 50, 64), (2, 8, 50, 64)), ((2, 8, 1, 64), USUAL, USUAL),
    (USUAL, (2, 8, 1, 64), (2, 8, 1, 64)), (USUAL, (1, 8, 96, 64), (1, 8, 96, 64)),
    ((2, 8, 0, 64), USUAL, USUAL), ((65535, 1, 16, 64),) * 3, ((65536, 1, 16, 64),) * 3,
    ((1, 65536, 16, 64),) * 3, ((65536, 16, 64),) * 3, (USUAL, (2, 4, 96, 64), (2, 2, 96, 64)),
    (USUAL, (2, 3, 96, 64), (2, 3, 96, 64)))


def calls() -> Iterator[AttentionCall]:
    """Yield calls for which torch chooses different kernels; their operands are on the device."""
    def made(shape: Sequence[int], dtype: torch.dtype, needs_gradient: bool = False
             ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=needs_gradient)

    half, single = torch.bfloat16, torch.float32
    masks = {"": None, "full": ((2, 8, 96, 96), half),
             "flags": ((2, 1, 96, 96), torch.bool), "row": ((2, 1, 1, 96), half),
             "flat": ((96, 96), half), "no batch": ((8, 96, 96), half)}
    for dtype, size, mask, dropout, causal, grouped, grad in product(
            (single, half, torch.float16, torch.float64),
            (8, 36, 40, 64, 96, 128, 160, 192, 200, 224, 232, 256, 264), masks, (0.0, 0.1, 0.125),
            (False, True), (False, True), (False, True)):
        key = made((2, 2 if grouped else 8, 96, size), dtype)
        kind = masks[mask]
        bias = None if kind is None else made(kind[0], dtype if kind[1] is half else kind[1])
        query = made((2, 8, 96, size), dtype, grad)
        yield AttentionCall(query, key, key, bias, dropout, causal, grouped)
    for dtype, (queries, keys, values), dropout, causal, grouped, grad in product(
            (single, half), SHAPES, (0.0, 0.125), (False, True), (False, True), (False, True)):
        yield AttentionCall(made(queries, dtype, grad), made(keys, dtype), made(values, dtype),
                            None, dropout, causal, grouped)
    for dtype in (single, half):
        shifted = made((2 * 8 * 96 * 64 + 1,), dtype)[1:].view(2, 8, 96, 64)
        turned = made((2, 8, 64, 96), dtype).transpose(-1, -2)
        for each in (shifted, turned):
            yield AttentionCall(each, each, each, None, 0.0, False, False)


KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Kernels by the number that torch gives them."""


def differing() -> tuple[int, list[str]]:
    """Return the number of calls, and those for which torch chooses another kernel."""
    capability = torch.cuda.get_device_capability()
    count, wrong = 0, []
    for count, call in enumerate(calls(), start=1):  # noqa: B007
        ours = _said(lambda call: choose_attention(call, capability).kernel.value, call)
        theirs = _said(lambda call: KERNELS[torch._fused_sdp_choice(
            call.query, call.key, call.value, call.mask, call.dropout, call.is_causal,
            enable_gqa=call.grouped)], call)
        if ours != theirs:
            wrong.append(f"{tuple(call.query.shape)} {call.query.dtype}: {ours}, torch: {theirs}")
    return count, wrong


def _said(choose: Callable[[AttentionCall], str], call: AttentionCall) -> str:
    try:
        return choose(call)
    except RuntimeError:
        return "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = no_device_parser("attention_choice", __doc__)
    arguments = parser.parse_args(argv)
    code = ("import torch\nfrom benchmarks.attention_choice import differing\n"
            "count, wrong = differing()\n"
            "print(torch.__version__, torch.cuda.get_device_capability(), count, 'calls,',"
            " len(wrong), 'differ', *wrong[:5], sep='  ')")
    ok = True
    for capability in CAPABILITIES:
        told = on_no_device(arguments.torch, arguments.include, ["-c", code], {
            "NO_DEVICE_CAPABILITY": capability, "PYTHONPATH": str(Path(__file__).parents[1])})
        print(told.strip())
        ok = ok and "  0  differ" in told
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
