"""Skip mark for tests in which Inductor compiles, which need a C++ compiler."""

from __future__ import annotations

import pytest
import torch

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.inductor.compiled_step import check_compiler


def _missing() -> str:
    try:
        check_compiler(torch.device("cpu"))
    except CaptureError as error:
        return str(error)
    return ""


needs_compiler = pytest.mark.skipif(bool(_missing()), reason=_missing() or "there is a compiler")
"""The mark of such tests."""
