"""Synthetic forward-and-backward graphs in the shape of captured training steps.

A GPT of `layers` pre-norm blocks: layer norm (three outputs), attention (output and log-sum-exp),
linear layers, GELU, dropout whose masks come from a random generator, residual additions that may
reuse a buffer, logits and cross-entropy.  The backward reads saved values and makes gradients that
are kept to the end.  Costs are roofline seconds.
"""

from __future__ import annotations

from typing import Any

from planner.solvers import Op, Problem, Segment, Storage

FLOPS_PER_SECOND = 1e13
BYTES_PER_SECOND = 1e12


class Builder:
    """Collects ops in order; a value is the number of a storage."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.storages: list[Storage] = []

    def op(self, name: str, inputs: list[int], sizes: list[int], *, flops: float = 0.0,
           kept: bool = False, recomputable: bool = True, inplace: tuple[int, ...] = (),
           workspace: int = 0, replay_state: int = 0) -> list[int]:
        """Add an op with one output per size; return the outputs."""
        inputs = list(dict.fromkeys(inputs))
        moved = sum(self.storages[s].size_bytes for s in inputs) + sum(sizes)
        outputs = []
        for size in sizes:
            outputs.append(len(self.storages))
            self.storages.append(Storage(size, len(self.ops), kept))
        fits = tuple(s for s in inplace
                     if self.storages[s].size_bytes == sizes[0] and len(sizes) == 1)
        self.ops.append(Op(
            name, max(flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND), tuple(inputs),
            tuple(outputs), workspace_bytes=workspace, recomputable=recomputable, inplace=fits,
            replay_state_bytes=replay_state))
        return outputs


def gpt(layers: int, *, batch: int = 8, sequence: int = 1024, width: int = 1024,
        heads: int = 16, vocabulary: int = 4096, dropout: bool = True,
        item_bytes: int = 4) -> Problem:
    """Return the joint graph of a GPT with untied embeddings; parameters are resident and left out.
    """
    b = Builder()
    tokens = batch * sequence
    x_bytes = tokens * width * item_bytes
    row_bytes = tokens * item_bytes

    def mm(name: str, inputs: list[int], rows: int, inner: int, columns: int,
           **options: Any) -> int:
        return b.op(name, inputs, [rows * columns * item_bytes],
                    flops=2.0 * rows * inner * columns, **options)[0]

    def linear(name: str, x: int, inner: int, columns: int) -> int:
        return mm(name, [x], tokens, inner, columns)

    def drop(name: str, x: int, replay: bool) -> tuple[int, int | None]:
        if not dropout:
            return x, None
        mask = b.op(f"{name}.mask", [], [tokens * width], recomputable=replay,
                    replay_state=16 if replay else 0)[0]
        return b.op(f"{name}.mul", [x, mask], [x_bytes], inplace=(x,))[0], mask

    saved = []
    x = b.op("embedding", [], [x_bytes], recomputable=False)[0]
    first = x
    for layer in range(layers):
        p = f"h{layer}"
        n1, mean1, rstd1 = b.op(f"{p}.ln1", [x], [x_bytes, row_bytes, row_bytes])
        qkv = linear(f"{p}.qkv", n1, width, 3 * width)
        q, k, v = (b.op(f"{p}.{c}", [qkv], [x_bytes])[0] for c in "qkv")
        attn, lse = b.op(f"{p}.sdpa", [q, k, v], [x_bytes, tokens * heads * 4],
                         flops=4.0 * batch * sequence * sequence * width)
        proj = linear(f"{p}.proj", attn, width, width)
        dropped1, mask1 = drop(f"{p}.drop1", proj, replay=layer % 2 == 0)
        x1 = b.op(f"{p}.add1", [x, dropped1], [x_bytes], inplace=(dropped1,))[0]
        n2, mean2, rstd2 = b.op(f"{p}.ln2", [x1], [x_bytes, row_bytes, row_bytes])
        fc1 = linear(f"{p}.fc1", n2, width, 4 * width)
        act = b.op(f"{p}.gelu", [fc1], [4 * x_bytes])[0]
        fc2 = linear(f"{p}.fc2", act, 4 * width, width)
        dropped2, mask2 = drop(f"{p}.drop2", fc2, replay=True)
        x2 = b.op(f"{p}.add2", [x1, dropped2], [x_bytes], inplace=(dropped2,))[0]
        saved.append((x, n1, mean1, rstd1, q, k, v, attn, lse, mask1, x1, n2, mean2, rstd2, fc1,
                      act, mask2))
        x = x2
    nf, meanf, rstdf = b.op("ln_f", [x], [x_bytes, row_bytes, row_bytes])
    logits = linear("logits", nf, width, vocabulary)
    logits_bytes = tokens * vocabulary * item_bytes
    logp = b.op("log_softmax", [logits], [logits_bytes], inplace=(logits,))[0]
    b.op("nll", [logp], [4], kept=True)
    backward = len(b.ops)

    def back(name: str, inputs: list[int], sizes: list[int], **options: Any) -> list[int]:
        return b.op(f"{name}.bwd", inputs, sizes, recomputable=False, **options)

    def linear_back(name: str, dy: int, x: int, inner: int, columns: int) -> int:
        back(f"{name}.w", [dy, x], [inner * columns * item_bytes], kept=True,
             flops=2.0 * tokens * inner * columns)
        back(f"{name}.b", [dy], [columns * item_bytes], kept=True)
        return back(f"{name}.x", [dy], [tokens * inner * item_bytes],
                    flops=2.0 * tokens * inner * columns)[0]

    def norm_back(name: str, dy: int, x: int, mean: int, rstd: int) -> int:
        dx, dw, db = back(name, [dy, x, mean, rstd], [x_bytes, width * 4, width * 4])
        back(f"{name}.w", [dw], [width * item_bytes], kept=True)
        back(f"{name}.b", [db], [width * item_bytes], kept=True)
        return dx

    def drop_back(name: str, dy: int, mask: int | None) -> int:
        return dy if mask is None else back(name, [dy, mask], [x_bytes])[0]

    d = back("nll", [logp], [logits_bytes])[0]
    d = back("log_softmax", [d, logp], [logits_bytes], inplace=(d,))[0]
    d = linear_back("logits", d, nf, width, vocabulary)
    d = norm_back("ln_f", d, x, meanf, rstdf)
    for layer in reversed(range(layers)):
        p = f"h{layer}"
        (x, n1, mean1, rstd1, q, k, v, attn, lse, mask1, x1, n2, mean2, rstd2, fc1, act,
         mask2) = saved[layer]
        g = drop_back(f"{p}.drop2", d, mask2)
        g = linear_back(f"{p}.fc2", g, act, 4 * width, width)
        g = back(f"{p}.gelu", [g, fc1], [4 * x_bytes], inplace=(g,))[0]
        g = linear_back(f"{p}.fc1", g, n2, width, 4 * width)
        g = norm_back(f"{p}.ln2", g, x1, mean2, rstd2)
        d = back(f"{p}.add2", [d, g], [x_bytes], inplace=(d, g))[0]
        g = drop_back(f"{p}.drop1", d, mask1)
        g = linear_back(f"{p}.proj", g, attn, width, width)
        dq, dk, dv = back(f"{p}.sdpa", [g, q, k, v, attn, lse], [x_bytes] * 3,
                          flops=10.0 * batch * sequence * sequence * width)
        g = back(f"{p}.cat", [dq, dk, dv], [3 * x_bytes])[0]
        g = linear_back(f"{p}.qkv", g, n1, width, 3 * width)
        g = norm_back(f"{p}.ln1", g, x, mean1, rstd1)
        d = back(f"{p}.add1", [d, g], [x_bytes], inplace=(d, g))[0]
    back("embedding", [d], [vocabulary * width * item_bytes], kept=True)
    assert first == 0
    return Problem(tuple(b.ops), tuple(b.storages),
                   (Segment(0, ()), Segment(backward, (0,))), name=f"gpt{layers}")
