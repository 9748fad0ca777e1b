"""Recurrent layers, prepared for AOTAutograd.

torch (2.11 to 2.15) makes two silent mistakes when it decomposes `nn.RNN`, `nn.GRU` and `nn.LSTM`
(`torch/_decomp/decompositions.py`).  It omits the dropout between layers (`_rnn_helper` sets it to
zero for every layer): so here a call of several layers becomes calls of single ones, with the
dropout as an op of its own between them, on tensors whose first dimension is time, as in the CPU's
eager kernels, which draw the same random numbers.  And it treats an LSTM whose input needs no
gradient as inference, with oneDNN's kernel, which saves nothing for the backward, even if its
weights are trained.

An LSTM on a CPU runs oneDNN's kernels for training, as in eager mode; all else runs time step by
time step.

Blind spots: cuDNN draws different random numbers for its dropout.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._decomp import decompositions

_SINGLE_STATE = (torch.rnn_tanh, torch.rnn_relu, torch.gru)
_LSTM = 2  # of `ideep::rnn_kind`
_KEPT_META = ("nn_module_stack", "source_fn_stack", "stack_trace")


@contextlib.contextmanager
def recurrent_layers_trained(module: fx.GraphModule, *, fused: bool) -> Iterator[None]:
    """Inside, AOTAutograd keeps the dropout and the training of recurrent layers in a Dynamo
    graph; `fused`: with the kernels of eager mode for an LSTM on a CPU."""
    _unstack_all(module)

    def select_trainable(input: Any, states: Any, weights: Any) -> Callable[..., Any]:
        if fused and _runs_in_one_kernel(input, states, weights):
            return _in_one_kernel
        is_trained = any(weight.requires_grad for weight in chain(states, *weights))
        return _step_by_step if is_trained else _select(input, states, weights)

    with mock.patch.object(decompositions, "select_one_layer_lstm_function", select_trainable):
        yield


_select = decompositions.select_one_layer_lstm_function


@contextlib.contextmanager
def lstm_shapes_at_once() -> Iterator[None]:
    """Inside, Dynamo, which looks at shapes alone, follows an LSTM on a CPU as one kernel in place
    of four ops for each time step."""

    def select(input: Any, states: Any, weights: Any) -> Callable[..., Any]:
        return (_in_one_kernel if _runs_in_one_kernel(input, states, weights)
                else _select(input, states, weights))

    with mock.patch.object(decompositions, "select_one_layer_lstm_function", select):
        yield


def _runs_in_one_kernel(input: Any, states: Any, weights: Any) -> bool:
    """True if oneDNN runs an LSTM on these tensors, which has no projections."""
    supported = {torch.float32: True,
                 torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
                 torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported()}
    return (torch._C._get_mkldnn_enabled() and states[0].size(2) == states[1].size(2)
            and all(each.device.type == "cpu" and supported.get(each.dtype, False)
                    for each in (input, *states, *chain(*weights))))


def _in_one_kernel(x: Any, states: Any, weights: Any, has_biases: bool, reverse: bool = False
                   ) -> tuple[Any, tuple[Any, ...]]:
    of_input, of_state, *biases = weights
    if not has_biases:
        biases = [of_input.new_zeros(of_input.size()), of_state.new_zeros(of_state.size())]
    hidden, cell = (state.contiguous() for state in states)
    output, *last, _ = torch.ops.aten.mkldnn_rnn_layer.default(
        x.contiguous(), of_input, of_state, *biases, hidden, cell, reverse, [], _LSTM,
        hidden.size(-1), 1, has_biases, False, False, True)
    return output, tuple(last)


def in_training(target: Any) -> Any:
    """The function that runs an op as autograd does: an LSTM's keeps its reserve for the backward
    only where gradients are on."""
    return _lstm_in_training if target is torch.ops.aten.mkldnn_rnn_layer.default else target


def _lstm_in_training(*args: Any) -> Any:
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def _step_by_step(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
    # Before torch 2.13 the last states keep a dimension that those of a layer lack.
    output, states = decompositions.one_layer_lstm(*args, **kwargs)
    return output, tuple(state.flatten(0, -2) for state in states)


def _unstack_all(module: fx.GraphModule) -> None:
    changed = False
    for target in (*_SINGLE_STATE, torch.lstm):
        for node in module.graph.find_nodes(op="call_function", target=target):
            # Calls with packed sequences, which torch.compile does not trace, have the batch's
            # sizes in the second place and the states in the third.
            if len(node.args) == 9 and isinstance(node.args[2], list | tuple):
                _, _, _, _, layers, dropout, train, _, _ = node.args
                if train and dropout and layers > 1:
                    _unstack(module.graph, node)
                    changed = True
    if changed:
        module.graph.lint()
        module.recompile()


def _unstack(graph: fx.Graph, node: fx.Node) -> None:
    (flow, states, weights, has_biases, layers, dropout, train, bidirectional,
     batch_first) = node.args
    has_cell = node.target is torch.lstm
    directions = 2 if bidirectional else 1
    of_layer = len(weights) // layers

    def call(function: Any, *args: object, **kwargs: object) -> fx.Node:
        made = graph.call_function(function, args, kwargs)
        made.meta.update({key: node.meta[key] for key in _KEPT_META if key in node.meta})
        return made

    last: list[list[fx.Node]] = []  # last states by layer
    with graph.inserting_before(node):
        if batch_first:
            flow = call(torch.transpose, flow, 0, 1)
        for layer in range(layers):
            if layer:
                flow = call(torch.dropout, flow, dropout, True)
            first = [call(torch.narrow, state, 0, directions * layer, directions)
                     for state in (states if has_cell else [states])]
            found = call(node.target, flow, first if has_cell else first[0],
                         list(weights[of_layer * layer:of_layer * (layer + 1)]), has_biases, 1, 0.0,
                         train, bidirectional, False)
            flow = call(operator.getitem, found, 0)
            last.append([call(operator.getitem, found, 1 + number)
                         for number in range(len(first))])
        if batch_first:
            flow = call(torch.transpose, flow, 0, 1)
        results = [flow, *(call(torch.cat, list(of_layers), 0)
                           for of_layers in zip(*last, strict=True))]
    for user in list(node.users):
        assert user.target is operator.getitem, "Dynamo takes such a call's results apart"
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
