"""Parse budgets and resolve them to bytes.

A budget limits the peak of the whole training step on the device.  `GB` and `budget_gb` are decimal
(1e9 bytes), `GiB` is 2**30.  A percentage is of the plain step's peak, which is known only after
capture, so parsing and resolving are two steps; a malformed budget fails before capture.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from dataclasses import dataclass
from fractions import Fraction

from planner.units import BYTES_PER_UNIT, GIGABYTE

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*|%)\s*")
_UNITS = {name.lower(): size for name, size in BYTES_PER_UNIT.items()}
_MOST_BYTES = 2**63 - 1
_MOST_PERCENT = 1_000_000
_LEAST_WITHOUT_UNIT = 1024
"""A text without a unit is a number of bytes; "65" is rather one of percent."""
_EXPECTED = 'a number of bytes (int), "8GB" (1e9 bytes), "8GiB" (2**30), "500MB" or "60%"'


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on the peak: bytes, or a fraction of the plain step's peak; exactly one is set."""

    size_bytes: int | None = None
    fraction: Fraction | None = None
    """Fraction of `baseline_peak_bytes`."""

    def resolve(self, baseline_peak_bytes: int) -> int:
        """The limit in bytes, rounded down."""
        if self.size_bytes is not None:
            return self.size_bytes
        assert self.fraction is not None
        return math.floor(self.fraction * baseline_peak_bytes)


def parse_budget(budget_gb: float | None = None, budget: int | str | None = None) -> Budget | None:
    """The budget given by the two arguments of `planner.plan`; `None` for no limit.

    Raises `ValueError` if both are given, if the text is not a budget, or if the number is not
    positive and finite; `TypeError` for other types.
    """
    if budget_gb is not None and budget is not None:
        raise ValueError(f"give budget_gb or budget, not both: got budget_gb={budget_gb!r} and "
                         f"budget={budget!r}")
    if budget_gb is not None:
        return _from_gigabytes(budget_gb)
    if budget is None:
        return None
    if isinstance(budget, str):
        return _from_text(budget)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Integral):
        remedy = " (for gigabytes use budget_gb)" if isinstance(budget, numbers.Real) else ""
        raise TypeError(f"budget must be {_EXPECTED}, got {budget!r}{remedy}")
    size = operator.index(budget)
    if size <= 0:
        raise ValueError(f"budget must be more than 0 bytes, got {size}")
    return Budget(size_bytes=_bytes(size, budget))


def absolute_budget(budget_gb: float | None, budget: int | str | None, percentage: str) -> int:
    """The budget in bytes, for searches over several steps, which have no common plain peak.

    `percentage`: words for the error that a percentage raises.  Raises like `parse_budget`, and
    `ValueError` for a missing budget or a percentage.
    """
    limit = parse_budget(budget_gb, budget)
    if limit is None:
        raise ValueError('a budget is needed: budget="8GB", or budget_gb=8')
    if limit.size_bytes is None:
        raise ValueError(f"budget={budget!r}: a percentage is of the plain step's peak, "
                         f'{percentage}; give bytes, such as "8GB"')
    return limit.size_bytes


def _from_gigabytes(budget_gb: float) -> Budget:
    if isinstance(budget_gb, bool) or not isinstance(budget_gb, numbers.Real):
        remedy = "; text goes to budget" if isinstance(budget_gb, str) else ""
        raise TypeError("budget_gb must be a number of decimal gigabytes (1e9 bytes), "
                        f"got {budget_gb!r}{remedy}")
    if not math.isfinite(budget_gb) or budget_gb <= 0:
        raise ValueError("budget_gb must be a finite number of gigabytes above 0, "
                         f"got {budget_gb!r}")
    # As written in decimal: 0.1 is a tenth, not the binary double next to it.
    gigabytes = Fraction(
        budget_gb if isinstance(budget_gb, numbers.Rational) else repr(float(budget_gb)))
    return Budget(size_bytes=_bytes(math.floor(gigabytes * GIGABYTE), budget_gb))


def _from_text(text: str) -> Budget:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"budget must be {_EXPECTED}, got {text!r}")
    number, unit = match.groups()
    rough = float(number)  # checked first: an exact 1e999999999 would take forever
    if not math.isfinite(rough) or rough <= 0:
        raise ValueError(f"budget must be finite and above 0, got {text!r}")
    value = Fraction(number)
    if unit == "%":
        if value > _MOST_PERCENT:
            raise ValueError(f"budget {text!r} is more than {_MOST_PERCENT:,}% of the plain step's "
                             "peak; for no limit give none")
        return Budget(fraction=value / 100)
    if not unit:
        if value.denominator != 1 or value < _LEAST_WITHOUT_UNIT:
            raise ValueError(f"budget {text!r} has no unit: write {_EXPECTED}")
        return Budget(size_bytes=_bytes(int(value), text))
    if unit.lower() not in _UNITS or (unit.endswith("b") and not unit.islower()):
        raise ValueError(f"budget {text!r} has an unknown unit {unit!r}: "
                         f"known are {', '.join(BYTES_PER_UNIT)} and %")
    return Budget(size_bytes=_bytes(math.floor(value * _UNITS[unit.lower()]), text))


def _bytes(size_bytes: int, given: object) -> int:
    if size_bytes < 1:
        raise ValueError(f"budget {given!r} is less than one byte")
    if size_bytes > _MOST_BYTES:
        raise ValueError(f"the budget is more than {_MOST_BYTES:,} bytes; for no limit give none")
    return size_bytes
