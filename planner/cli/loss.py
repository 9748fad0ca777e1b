"""`--loss`: the loss named on the command line, as `loss_fn(output)`.

A name such as `cross_entropy` is a function of `torch.nn.functional`, called with the model's
prediction - the output's `logits`, else its first tensor - and a target of matching shape.  Classes
are the second dimension, as in torch; but if the model's inputs are token sequences, or the output
has `logits` of three dimensions, they are the last, and each position of each sequence counts.

Blind spot: the target is created as zeros within the loss, so it counts as the loss's memory and
not as an input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner.cli.failures import UsageError
from planner.cli.named_code import find_object

if TYPE_CHECKING:
    import torch

OF_CLASSES = ("cross_entropy", "nll_loss")
"""Losses whose target is a class index."""
OF_VALUES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
             "binary_cross_entropy", "binary_cross_entropy_with_logits")
"""Losses whose target has the shape and dtype of the prediction."""


def find_loss(text: str | None) -> Callable[[Any], torch.Tensor] | None:
    """The loss function that `--loss` names; `None` for `None`.

    Raises `UsageError` and `TargetError` like `planner.cli.named_code.find_object`.
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


def fitted_to(loss: Callable[[Any], torch.Tensor] | None, inputs: object
              ) -> Callable[[Any], torch.Tensor] | None:
    """The loss of `find_loss`, adapted to a model with such inputs."""
    return _FunctionalLoss(loss.name, _has_tokens(inputs)) if isinstance(
        loss, _FunctionalLoss) else loss


def _has_tokens(inputs: object) -> bool:
    """True if the inputs contain integer sequences of shape `(batch, sequence)`."""
    import torch

    from planner._graph_capture.torch_compat import pytree

    return any(isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and leaf.dtype != torch.bool
               and not (leaf.is_floating_point() or leaf.is_complex())
               for leaf in pytree.tree_leaves(inputs))


class _FunctionalLoss:
    """A function of `torch.nn.functional`, with a target of zeros."""

    def __init__(self, name: str, of_tokens: bool = False) -> None:
        self.name, self._of_tokens = name, of_tokens

    def __call__(self, output: Any) -> torch.Tensor:
        """Compute the loss of the model's output."""
        import torch

        from planner._graph_capture.output_tensors import output_tensors

        logits = getattr(output, "logits", None)
        tensors = [logits] if isinstance(logits, torch.Tensor) else output_tensors(output)
        prediction = next((each for each in tensors if each.is_floating_point()), None)
        if prediction is None or prediction.dim() == 0:
            raise UsageError(
                f"--loss {self.name} is made of the output's `logits` or first tensor of floats; "
                f"the model returns {_described(output)}. Give --loss file.py:function, a function "
                "of the output" + ("" if prediction is None else
                                   ", or leave --loss out: a number is taken for the loss"))
        if self.name in OF_CLASSES:
            if prediction.dim() == 3 and (self._of_tokens or logits is not None):
                prediction = prediction.flatten(0, 1)
            # One class per position; a single sample has one position.
            place = prediction.select(1 if prediction.dim() > 1 else 0, 0)
            target = torch.zeros_like(place, dtype=torch.long)
        else:
            target = torch.zeros_like(prediction)
        loss: torch.Tensor = getattr(torch.nn.functional, self.name)(prediction, target)
        return loss


def _described(output: object) -> str:
    import torch

    return (f"a tensor of {str(output.dtype).removeprefix('torch.')}{list(output.shape)}"
            if isinstance(output, torch.Tensor) else type(output).__name__)
