"""Formatting of bytes and FLOPs: decimal units, three significant digits."""

from __future__ import annotations

GIGABYTE = 10**9
"""Bytes of `GB` and of `budget_gb`; `GiB` is 2**30."""

BYTES_PER_UNIT: dict[str, int] = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": GIGABYTE, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}
"""Units accepted in a budget."""


def format_bytes(count: int) -> str:
    """Format `8_123_456_789` as `8.12 GB`; exact below a kilobyte."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_flops(count: int) -> str:
    """Format `8_123_456_789` as `8.12 GFLOP`."""
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def format_fraction(value: float) -> str:
    """Format `0.1234` as `12.34%`."""
    return f"{100 * value:.2f}%"


def _scaled(count: int, names: tuple[str, ...]) -> str:
    value, name = float(count), names[0]
    for name in names:
        if abs(value) < 999.5 or name == names[-1]:
            break
        value /= 1000
    if name == names[0]:
        return f"{count} {name}"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {name}"
