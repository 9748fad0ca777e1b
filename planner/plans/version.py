"""Versions of this package and of what a plan depends on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_DISTRIBUTIONS = ("checkpoint-planner", "torch")


def created_with() -> tuple[tuple[str, str], ...]:
    """Distribution to version; `unknown` for one that runs from its source tree."""
    return tuple((name, installed_version(name)) for name in _DISTRIBUTIONS)


def installed_version(distribution: str) -> str:
    """Version of an installed distribution, `unknown` where there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
