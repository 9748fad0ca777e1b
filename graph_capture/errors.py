"""The base class of all errors, and the errors of capture; `planner` exports both."""

from __future__ import annotations


class PlannerError(Exception):
    """Base class of the errors that planning, applying and verifying raise."""


class CaptureError(PlannerError):
    """The model's training step could not be captured as a graph; the message says what to change.
    """


class DataDependentValue(CaptureError):
    """The model's code asks for the value of a tensor, or for a result whose size depends on
    values; a step that is captured without being run has no values."""

    what = ""
    """Description of the request and its place in the code."""


class UnsupportedTorch(PlannerError, ImportError):
    """The installed torch lacks or has changed an internal that this package needs; the message
    names it."""
