"""What capturing a model raises; `planner` re-exports it under its own base class."""

from __future__ import annotations


class CaptureError(RuntimeError):
    """The model or its inputs cannot be captured; the message says what to change."""
