"""Progress callback type."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called now and then with one line of text, for people."""
