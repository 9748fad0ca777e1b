"""State of random generators, and of autocast.

Blind spot: generators of the user's.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator

import numpy
import torch
from torch import nn


class Dice:
    """State of the random generators of Python and NumPy."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), numpy.random.get_state()
        self.were_thrown = False
        """True if `again` has seen the generators used."""

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the generators give what they gave from that moment on; behind it, they are where
        they are now."""
        now = Dice()
        self.put_back()
        try:
            yield
        finally:
            self.were_thrown |= not self._is_now()
            now.put_back()

    def put_back(self) -> None:
        """Have the generators where they were at that moment."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)

    def _is_now(self) -> bool:
        (kind, keys, *places), (kind_now, keys_now, *places_now) = (
            self._numpy, numpy.random.get_state())
        return (random.getstate() == self._python and kind == kind_now and places == places_now
                and numpy.array_equal(keys, keys_now))


class TorchState:
    """State of torch's random generators, on the CPU and the GPUs of some tensors, and autocast."""

    def __init__(self, tensors: Iterable[object]) -> None:
        self._cpu = torch.get_rng_state().numpy().copy()  # a tensor would be taken for the loop's
        gpus = {each.device for each in tensors if isinstance(each, torch.Tensor) and each.is_cuda}
        self._gpus = [(device, torch.cuda.get_rng_state(device)) for device in gpus]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
                          if torch.is_autocast_enabled(kind)]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, all of that is as it was at that moment."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device for device, _ in self._gpus]))
            self.put_back()
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            yield

    def put_back(self) -> None:
        """Have the generators where they were at that moment."""
        torch.set_rng_state(torch.from_numpy(self._cpu))
        for device, state in self._gpus:
            torch.cuda.set_rng_state(state, device)


def remembered_random_state(model: nn.Module) -> Callable[[], None]:
    """A function that puts the random state of Python, NumPy and torch back to what it is now."""
    states = Dice(), TorchState(model.parameters())

    def restore() -> None:
        for state in states:
            state.put_back()

    return restore
