"""Use of a training step's gradients by hooks of parameters, observed in the first backward.

The model of the world: a hook that steps an optimizer frees gradients, of its own parameter or of
earlier ones, each time it runs, and allocates the same.  Until hooks have run, those that get whole
gradients (`register_post_accumulate_grad_hook`) are taken to free them.

Blind spot: hooks that come after the first backward, until it is observed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from planner._graph_capture.memory.tracker import MemoryTracker
from planner._graph_capture.torch_compat import hooks_of_gradient, hooks_of_whole_gradient


class HookWatch:
    """Observes the hooks of a model's parameters in one backward."""

    def __init__(self, model: nn.Module) -> None:
        self.early = {name: 0 for name, parameter in model.named_parameters()
                      if parameter.requires_grad and hooks_of_whole_gradient(parameter)}
        """Gradients that hooks free, and what they allocate meanwhile."""
        self.hook_signature = hook_signature(model.parameters())
        """The hooks that it observes."""
        self.has_seen = False
        """True if a hook has run."""
        self._model = ref(model)
        self._put: list[tuple[dict[int, Any], int, Any, Any]] = []

    def begin(self) -> None:
        """Observe the hooks until `end`."""
        model = self._model()
        assert model is not None and not self._put
        for name, parameter in model.named_parameters():
            for hooks in (hooks_of_gradient(parameter), hooks_of_whole_gradient(parameter)):
                for number, hook in [*hooks.items()]:
                    observed = partial(self._run, name, hook)
                    self._put.append((hooks, number, hook, observed))
                    hooks[number] = observed

    @property
    def is_active(self) -> bool:
        """True while it observes."""
        return bool(self._put)

    def end(self) -> bool:
        """Put the hooks back; whether it has observed."""
        was_active = self.is_active
        for hooks, number, hook, observed in self._put:
            if hooks.get(number) is observed:
                hooks[number] = hook
        self._put.clear()
        return was_active

    def _run(self, name: str, hook: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        if not self.has_seen:
            self.early, self.has_seen = {}, True
        before = self._gradients()
        tracker = MemoryTracker(lambda *call: 0, device=tensor.device, trace_device=tensor.device,
                                resident=())
        with tracker:
            result = hook(tensor)
        tracker.close()
        allocated = tracker.peak_bytes - tracker.live_bytes  # the state that it has made stays
        freed = before.keys() - self._gradients().keys()
        self.early.update((each, self.early.get(each, 0)) for each in freed)
        # A gradient of another parameter was there until now.
        allocated += sum(before[each] for each in freed if each != name)
        if name in self.early or freed:
            self.early[name] = max(self.early.get(name, 0), allocated)
        return result

    def _gradients(self) -> dict[str, int]:
        model = self._model()
        return {} if model is None else {
            name: parameter.grad.nbytes for name, parameter in model.named_parameters()
            if parameter.grad is not None}


def hook_signature(parameters: Iterable[torch.Tensor]) -> frozenset[tuple[int, int]]:
    """Numbers of the parameters with hooks, and the number of hooks of each."""
    return frozenset(
        (number, count) for number, parameter in enumerate(parameters)
        if (count := len(hooks_of_gradient(parameter)) + len(hooks_of_whole_gradient(parameter))))
