"""A cache of measurements of single ops, kept between processes.

There is one file per device, torch version and number of threads, and one line of JSON per fact,
appended by a single write, so that processes may share it.  Invalid lines are skipped: a file
damaged by a crash or a full disk costs measurements, never an error.  A directory that cannot be
written to keeps nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

ENVIRONMENT_VARIABLE = "CHECKPOINT_PLANNER_CACHE"
"""Directory of the cache, in place of the platform's; empty: nothing is kept on disk."""


def cache_directory() -> Path | None:
    """Directory of the cache; `None` if the user switched it off."""
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    if given is not None:
        return Path(given) if given else None
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "checkpoint-planner"


class OpCache:
    """Facts by key: a quantity of an op's signature, e.g. its workspace in bytes."""

    def __init__(self, environment: str, directory: Path | None) -> None:
        """`environment`: everything other than their keys that the facts depend on."""
        self._facts: dict[str, float] = {}
        self._path: Path | None = None
        if directory is not None:
            digest = hashlib.sha256(environment.encode()).hexdigest()[:16]
            self._path = directory / f"ops-{digest}.jsonl"
            self._load(self._path)

    def get(self, key: str) -> float | None:
        """The fact, if it is known."""
        return self._facts.get(key)

    def put(self, key: str, value: float) -> None:
        """Remember a fact, here and on disk."""
        self._facts[key] = value
        if self._path is None:
            return
        # A leading line break: a torn line of another process must not swallow this one.
        line = f"\n{json.dumps({'key': key, 'value': value})}\n".encode()
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def _load(self, path: Path) -> None:
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                fact = json.loads(line)
                key, value = fact["key"], fact["value"]
                if isinstance(key, str) and isinstance(value, int | float) and value >= 0:
                    self._facts[key] = value
