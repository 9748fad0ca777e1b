"""What capturing a model raises; `planner` re-exports it under its own base class."""

from __future__ import annotations


class CaptureError(RuntimeError):
    """The model or its inputs cannot be captured; the message says what to change."""


class UnsupportedTorch(ImportError):
    """The installed torch lacks an internal that this package stands on, or has another in its
    place; the message names it."""
