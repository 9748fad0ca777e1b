"""What a model's code reaches outside of the model, and that it is put back."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from planner._graph_capture.outside_state import OutsideState

_state = {"count": 0}
_number = 0


def _count() -> None:
    global _number
    _number += 1
    _state["count"] += 1


class Reaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.changed(x)

    def changed(self, x):
        _count()
        return self.layer(x)


def test_globals_that_functions_reach_are_as_they_were_inside_and_as_they_are_behind():
    model = Reaching()
    state = OutsideState(model)
    _count()
    with state.again():
        assert (_state["count"], _number) == (0, 0)
        model(torch.zeros(1, 2))
        assert (_state["count"], _number) == (1, 1)
    assert (_state["count"], _number) == (1, 1)
    state.put_back()
    assert (_state["count"], _number) == (0, 0)


def test_what_hooks_close_over():
    model, values = Reaching(), [1, 2]
    other, kept = SimpleNamespace(inner={"a": {1}}), torch.zeros(3)
    drawn, python, mine = np.random.default_rng(0), random.Random(0), torch.Generator()

    def hook(module, args, output, other=other):
        values.append(3)
        other.inner["a"].add(2)
        kept.add_(1)
        return drawn.random() + python.random() + torch.rand(1, generator=mine)

    model.layer.register_forward_hook(hook)
    state = OutsideState(model)
    first = hook(None, None, None)
    state.put_back()
    assert values == [1, 2]
    assert other.inner == {"a": {1}}
    assert kept.tolist() == [0, 0, 0]
    assert hook(None, None, None) == first


def test_tensors_of_the_loop_are_not_kept_alive():
    model, features = Reaching(), [torch.zeros(4)]
    model.layer.register_forward_hook(lambda module, args, output: features.append(output) or None)
    state, alive = OutsideState(model), weakref.ref(features[0])
    features[:] = [torch.ones(4)]
    gc.collect()
    assert alive() is None
    with state.again():
        assert len(features) == 1
        features.append(torch.zeros(4))
    assert len(features) == 1
    assert [each.tolist() for each in state.tensors()] == [[1.0] * 4]


def test_the_models_own_attributes_on_request():
    model = Reaching()
    model.seen = SimpleNamespace(lengths=[1])
    model.references = [weakref.ref(model.layer.weight)]
    state = OutsideState(model, with_attributes=True)
    model.seen.lengths.append(2)
    model.more = 1
    model.references.append(None)
    state.put_back()
    assert model.seen.lengths == [1]
    assert not hasattr(model, "more")
    assert model.references[0]() is model.layer.weight
