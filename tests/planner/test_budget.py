"""Budgets: every way to write one, and every way to get it wrong."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.arguments.budget import Budget, parse_budget
from planner.units import BYTES_PER_UNIT


@pytest.mark.parametrize(("text", "size_bytes"), [
    ("8GB", 8_000_000_000),
    ("8GiB", 8 * 2**30),
    ("500MB", 500_000_000),
    ("1.5 GB", 1_500_000_000),
    (" 12 kB ", 12_000),
    ("12 kb", 12_000),
    ("1e3MB", 1_000_000_000),
    ("7B", 7),
    ("123456", 123_456),
    ("0.1GB", 100_000_000),
    ("2TiB", 2 * 2**40),
    ("10_000MB", 10_000_000_000),
])
def test_text_with_a_unit_is_bytes(text, size_bytes):
    assert parse_budget(budget=text) == Budget(size_bytes=size_bytes)


def test_gigabytes_are_decimal_and_mean_what_is_written():
    assert parse_budget(budget_gb=8) == Budget(size_bytes=8_000_000_000)
    assert parse_budget(budget_gb=0.1) == Budget(size_bytes=100_000_000)
    assert parse_budget(budget_gb=np.float64(2.5)) == Budget(size_bytes=2_500_000_000)


def test_no_budget_is_no_limit():
    assert parse_budget() is None


def test_bytes_are_taken_as_they_are():
    assert parse_budget(budget=123) == Budget(size_bytes=123)
    assert parse_budget(budget=np.int64(123)) == Budget(size_bytes=123)


def test_a_percentage_is_of_the_plain_steps_peak():
    budget = parse_budget(budget="60%")
    assert budget == Budget(fraction=Fraction(3, 5))
    assert budget.resolve(1_000_003) == 600_001
    assert parse_budget(budget="12.5 %").resolve(80) == 10


@given(st.integers(1, 10**6), st.sampled_from(sorted(BYTES_PER_UNIT)))
def test_every_unit_multiplies(count, unit):
    assert parse_budget(budget=f"{count}{unit}").resolve(1) == count * BYTES_PER_UNIT[unit]


@pytest.mark.parametrize("text", [
    "", "65", "GB", "lots", "-8GB", "8XB", "8 GB per step", "8Gb", "0", "0GB", "0%", "-5%", "nan",
    "inf", "1e999GB", "1e999999999999", "1e-999999999999GB", "0.0000000001B", "1.5", "8GB%", "0x10",
    "8G",
])
def test_text_that_is_no_budget_is_refused_by_name(text):
    with pytest.raises(ValueError, match="budget") as caught:
        parse_budget(budget=text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, -(10**12)])
def test_bytes_must_be_positive(value):
    with pytest.raises(ValueError, match="more than 0 bytes"):
        parse_budget(budget=value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e-12])
def test_gigabytes_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match=r"budget"):
        parse_budget(budget_gb=value)


@pytest.mark.parametrize("arguments", [
    {"budget": 8e9}, {"budget": True}, {"budget": [8]}, {"budget_gb": "8"}, {"budget_gb": True},
    {"budget_gb": [1]},
])
def test_other_types_are_refused(arguments):
    with pytest.raises(TypeError, match="budget"):
        parse_budget(**arguments)


def test_a_float_of_bytes_is_sent_to_budget_gb():
    with pytest.raises(TypeError, match="for gigabytes use budget_gb"):
        parse_budget(budget=8e9)


def test_both_at_once_are_refused():
    with pytest.raises(ValueError, match="not both"):
        parse_budget(budget_gb=8, budget="8GB")
