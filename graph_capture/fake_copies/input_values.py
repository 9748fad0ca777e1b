"""The values of a step's inputs and of buffers, as far as the model's code may look at them before
it runs.

An input of integers without values (on `meta`) is taken for ones, as a mask without padding has
them, and the plan says so where the code asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from planner._graph_capture.fake_copies.fake import FakeCopy, KeptValues
from planner._graph_capture.fake_copies.storage_less import assumed_value, is_storage_less
from planner._graph_capture.torch_compat import FakeTensor, may_be_known, pytree


def values_of_inputs(fake_copy: FakeCopy) -> Mapping[int, torch.Tensor]:
    """By identity of an input or a buffer of the fake copy, a tensor with its values."""
    original_of = fake_copy.originals()
    found = {}
    for leaf in (*(leaf for _, leaf in named_inputs(fake_copy)), *fake_copy.model.buffers()):
        source = original_of.get(id(leaf), leaf)
        if has_no_values(source) and may_be_known(source):
            found[id(leaf)] = assumed_value(source)
        elif not has_no_values(source) and not is_storage_less(source):
            found[id(leaf)] = source
    return found


def keep_values(fake_copy: FakeCopy) -> None:
    """Keep the values of the small inputs: the model's code decides by them, and the batch may be
    gone when the step is traced again."""
    original_of = fake_copy.originals()
    for _, leaf in named_inputs(fake_copy):
        source = original_of.get(id(leaf), leaf)
        if source.numel() and may_be_known(source) and not (
                has_no_values(source) or is_storage_less(source)):
            fake_copy.kept[id(leaf)] = KeptValues.of(source)


def inputs_without_values(fake_copy: FakeCopy) -> frozenset[str]:
    """Names of the inputs whose values are not known, of a fake copy of fake tensors."""
    original_of = fake_copy.originals()
    return frozenset(name for name, leaf in named_inputs(fake_copy)
                     if has_no_values(original_of.get(id(leaf), leaf)))


def named_inputs(fake_copy: FakeCopy) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a fake copy is called with."""
    for name, value in (*((f"argument {index}", arg) for index, arg in enumerate(fake_copy.args)),
                        *fake_copy.kwargs.items()):
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield name, leaf


def has_no_values(tensor: torch.Tensor) -> bool:
    """True if a tensor of the user's has a shape alone."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def assumptions(asked: Mapping[str, str], missing: frozenset[str]) -> tuple[str, ...]:
    """Sentences about inputs without values; `asked`: by name of an input, where the model's code
    asks for a value of it."""
    return tuple(f"{name} has no values and is taken to be all ones, for the model's code decides "
                 f"by it{f' ({place})' if place else ''}"
                 for name, place in sorted(asked.items()) if name in missing)
