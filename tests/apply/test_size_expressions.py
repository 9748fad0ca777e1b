"""Sizes and calls as text: what is written is read back, and nothing else is evaluated."""

from __future__ import annotations

import pytest
import torch

from planner._apply.size_expressions import argument, call, number, written


def empty(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


@pytest.mark.parametrize(("text", "value"), [
    ("4*batch*length", 4 * 3 * 5), ("7", 7), ("(-1) + batch", 2), ("length // 2 + length % 2", 3),
    ("max(1, batch - 9)", 1), ("batch**2", 9), ("trunc(0.15*float(40*batch))", 18),
    ("floor(length/batch)", 1), ("ceil(length/batch) + round(1.5)", 4)])
def test_arithmetic_of_sizes(text, value):
    assert number(text, {"batch": 3, "length": 5}) == value


@pytest.mark.parametrize("text", [
    "__import__('os').getpid()", "batch.real", "open('x')", "other", "batch // 0", "2**batch**9",
    "trunc(1e400)", "trunc(batch, 2)", "max(batch)", "trunc(float(9**8**8))", "floor(2/0)",
    "[batch][0]", "batch if 1 else 2", "True", "1.5*batch", "", "(", "lambda: 1", "2**999"])
def test_nothing_else_is_read(text):
    with pytest.raises(ValueError):
        number(text, {"batch": 9})


@pytest.mark.parametrize("value", [
    None, True, 3, -2, 0.5, -0.5, float("inf"), float("-inf"), "mean", torch.float16, [1, 2], (),
    (1,), [[1], (2, 3)], torch.contiguous_format, torch.strided])
def test_arguments_are_read_as_written(value):
    found = argument(written(value, str), {}, empty)
    assert found == value and type(found) is type(value)


def test_tensors_are_read_as_written():
    text = written(torch.empty(3, 4).t(), str)
    assert text == "tensor(float32, (4, 3), (1, 4))"
    found = argument(text, {}, empty)
    assert (found.shape, found.stride(), found.dtype) == ((4, 3), (1, 4), torch.float32)


def test_a_call_names_an_op_and_its_arguments():
    op, args, kwargs = call("aten.sum.dim_IntList(tensor(int64, (n,), (1,)), [0], keepdim=True)",
                            {"n": 6}, empty)
    assert op == "aten.sum.dim_IntList"
    assert args[0].shape == (6,) and args[1:] == ([0],)
    assert kwargs == {"keepdim": True}
