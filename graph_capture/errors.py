"""The base class of all errors, and the errors of capture; `planner` exports both."""

from __future__ import annotations

from typing import TypeVar

_Raised = TypeVar("_Raised", bound=BaseException)


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


class OtherOutputs(CaptureError):
    """The model returns another number of tensors than in the call whose loss was observed."""


class UnsupportedTorch(PlannerError, ImportError):
    """The installed torch lacks or has changed an internal that this package needs; the message
    names it."""


def raised_behind(error: BaseException, kind: type[_Raised]) -> _Raised | None:
    """The error of this kind that was being handled when `error` was raised, if any.

    Where a graph breaks in a `with` of a generator, Dynamo goes on with an iterator in its place,
    which cannot take an error: what is raised inside becomes an `AttributeError`.
    """
    behind = error.__context__
    while behind is not None and not isinstance(behind, kind):
        behind = behind.__context__
    return behind
