"""Private names of torch that detect the context of a call."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import _has_any_global_hook


def is_under_transform() -> bool:
    """True inside a transform of `torch.func` (vmap, grad, jvp, vjp)."""
    return torch._C._functorch.maybe_current_level() is not None


def is_forward_mode() -> bool:
    """True if forward-mode differentiation is on (`torch.autograd.forward_ad.dual_level`)."""
    return forward_ad._current_level >= 0


def has_global_hooks() -> bool:
    """True if hooks are registered for all modules, which Dynamo ignores."""
    return bool(_has_any_global_hook())


def is_traced() -> bool:
    """True while `torch.jit.trace`, `torch.export`, `make_fx` or `torch.fx` records calls."""
    return bool(torch.jit.is_tracing() or torch.compiler.is_exporting()
                or is_fx_symbolic_tracing() or get_proxy_mode() is not None)
