"""The base of all that is raised, and what capturing a model raises; `planner` hands both on."""

from __future__ import annotations


class PlannerError(Exception):
    """Base class of the errors that planning, applying and verifying raise."""


class CaptureError(PlannerError):
    """The model's training step could not be captured as a graph; the message says what to change.
    """


class DataDependentValue(CaptureError):
    """The model's code asks for what depends on the values of tensors: for one of them, or for a
    result whose size they decide.  A step that is captured without being run has none."""

    what = ""
    """What it asks for, and where."""


class UnsupportedTorch(PlannerError, ImportError):
    """The installed torch lacks an internal that this package stands on, or has another in its
    place; the message names it."""
