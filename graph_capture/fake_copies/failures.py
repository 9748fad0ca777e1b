"""Messages for errors that code raises on fake tensors."""

from __future__ import annotations

from planner._graph_capture.torch_compat import UnsupportedOperatorException, schema_of


def failure(error: BaseException) -> str:
    """The error with its type; for an op without a fake kernel, instructions to register one."""
    if isinstance(error, UnsupportedOperatorException):
        name = schema_of(error.func).name
        return (f"{name} has no fake kernel, which says what shapes its results have: "
                f'register one with @torch.library.register_fake("{name}")')
    return f"{type(error).__name__}: {error}"
