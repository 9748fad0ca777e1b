"""`--loss`: what the command line calls the loss, made into `loss_fn(output)`.

A name such as `cross_entropy` is that of a function of `torch.nn.functional`, called with the
model's prediction - the output's `logits`, else its first tensor - and a target that fits it.  As
there, classes are the second dimension.

Blind spot: the target is made of zeros in the loss, so that it counts as the loss's memory and not
as an input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner.cli.failures import UsageError
from planner.cli.named_code import find_object

if TYPE_CHECKING:
    import torch

OF_CLASSES = ("cross_entropy", "nll_loss")
"""Losses whose target is the number of a class."""
OF_VALUES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
             "binary_cross_entropy", "binary_cross_entropy_with_logits")
"""Losses whose target looks like the prediction."""


def find_loss(text: str | None) -> Callable[[Any], torch.Tensor] | None:
    """The function of the model's output that `--loss` names; `None` for `None`.

    Raises `UsageError` and `TargetError` as `planner.cli.named_code.find_object`.
    """
    if text is None:
        return None
    if text in OF_CLASSES + OF_VALUES:
        return _FunctionalLoss(text)
    if ":" not in text:
        raise UsageError(f"--loss must be package.module:function, path/to/file.py:function, or "
                         f"one of {', '.join(OF_CLASSES + OF_VALUES)}; got {text!r}")
    found = find_object("--loss", text)
    if not callable(found):
        raise UsageError(f"--loss {text!r} is no function of the model's output, but "
                         f"{type(found).__name__}")
    loss: Callable[[Any], torch.Tensor] = found
    return loss


class _FunctionalLoss:
    """A function of `torch.nn.functional`, with a target of zeros."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, output: Any) -> torch.Tensor:
        """The loss."""
        import torch

        from graph_capture.plain_step.loss import output_tensors

        prediction = getattr(output, "logits", None)
        if prediction is None:
            prediction = output_tensors(output)[0]
        if self._name in OF_CLASSES:
            # One class for each place; of a sample alone there is one place.
            place = prediction.select(1 if prediction.dim() > 1 else 0, 0)
            target = torch.zeros_like(place, dtype=torch.long)
        else:
            target = torch.zeros_like(prediction)
        loss: torch.Tensor = getattr(torch.nn.functional, self._name)(prediction, target)
        return loss
