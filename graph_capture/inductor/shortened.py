"""The graphs of a deep model without most copies of repeated layers.

The model of the world: two layers allocate the same if they have the same ops on tensors of the
same layout, the same saved results, and operands from equally far back.  So of each stretch of such
layers the first and the last copy stay, and the others are left out of the forward and of the
backward; readers of an omitted copy read the copy before it instead.  An omitted copy would only
add its saved tensors, from its place in the forward to its place in the backward, and its gradients
from there on.  Within a stretch memory rises or falls steadily, so its ends are the fullest.

The shortened graphs are compiled for their memory alone; their results are meaningless, and the
gradients of omitted layers are absent.

Blind spots: ops must come in the same order in each copy; kernels that span more than the seam of
two copies; a peak within a stretch that is not steady.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from planner._graph_capture.joint_graph.joint import tensors_of, unviewed

_COPIES_KEPT = 2
_NUMBERED = frozenset({"inductor_lookup_seed"})
"""Ops whose arguments number their calls."""

FindRuns = Callable[[Sequence[Hashable], Callable[[int, int], bool], int],
                    Iterable[tuple[int, int, int]]]
"""A function that finds repetition, such as `solvers.repetition.find_runs`, which must not be
imported here: start, stop and period of each run."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Omitted copies of one stretch."""

    saved_bytes: int
    """Bytes that all the copies together would save."""
    gradient_bytes: int
    """Bytes of gradients that the copies would leave."""
    saved_before_bytes: int
    """Bytes that the shortened forward saves before their place."""
    gradients_before_bytes: int
    """Bytes of gradients that the shortened backward makes before their place."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """A forward and a backward without most of their repeated layers."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    left_out: tuple[LeftOut, ...]
    """In the order of the backward; empty if the graphs are unchanged."""


def shorten(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int,
            find_runs: FindRuns) -> Shortened:
    """The graphs without most of their repeated layers; the first `num_outputs` outputs of the
    forward are the caller's, the others are saved."""
    there, back = _Sequence(forward, num_outputs), _Sequence(backward, 0)
    saved = there.outputs[num_outputs:]
    placeholders = backward.graph.find_nodes(op="placeholder")[:len(saved)]
    maker_of = {placeholder: there.index_of[node]
                for placeholder, node in zip(placeholders, saved, strict=True)
                if isinstance(node, fx.Node) and node in there.index_of}
    placeholder_of = {maker: placeholder for placeholder, maker in maker_of.items()}
    cuts = _cuts(there, back, maker_of, find_runs)
    if not cuts:
        return Shortened(forward, backward, ())
    there.windows, back.windows = [cut.there for cut in cuts], [cut.back for cut in cuts]

    def read(reader: int, node: fx.Node) -> fx.Node:
        """The node that a node of the backward reads in place of `node`."""
        if node not in maker_of:
            return back.replacement_of(node)
        maker = maker_of[node]
        for cut in cuts:
            window = cut.there
            if window.start <= maker < window.stop:
                steps = (window.stop - maker - 1) // window.period + 1
                if reader >= cut.back.stop:
                    steps = -((maker - window.start) // window.period + 1)
                return placeholder_of[maker + steps * window.period]
        return node

    new_backward = back.without_windows(read)
    kept = []
    for old, new in zip(placeholders, new_backward.find_nodes(op="placeholder"), strict=False):
        kept.append(bool(new.users) or not old.users)
        if not kept[-1]:
            new_backward.erase_node(new)
    new_forward = there.without_windows(
        lambda _, node: there.replacement_of(node), [True] * num_outputs + kept)
    left_out = _breakdowns(there, back, cuts, list(zip(saved, kept, strict=True)))
    return Shortened(fx.GraphModule(forward, new_forward), fx.GraphModule(backward, new_backward),
                     left_out)


@dataclass(frozen=True, slots=True)
class _Window:
    """Ops from `start` to before `stop`: whole copies of a stretch of `period` ops."""

    start: int
    stop: int
    period: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """The windows left out of both graphs."""

    there: _Window
    back: _Window


class _Sequence:
    """The ops of a graph in order, and their repetitions."""

    def __init__(self, module: fx.GraphModule, num_protected: int) -> None:
        """The first `num_protected` outputs may not be left out."""
        self.graph = module.graph
        self.ops = [node for node in self.graph.nodes
                    if node.op not in ("placeholder", "get_attr", "output")]
        self.index_of = {node: index for index, node in enumerate(self.ops)}
        returned: Any = self.graph.output_node().args[0]
        self.outputs: list[Any] = list(returned)
        self.windows: list[_Window] = []
        times = Counter(node for node in self.outputs if isinstance(node, fx.Node))
        protected = {node for node in self.outputs[:num_protected] if isinstance(node, fx.Node)}
        self._described = [
            (_description(node), times[node], index if node in protected else -1)
            for index, node in enumerate(self.ops)]

    def runs(self, find_runs: FindRuns) -> list[_Window]:
        """Disjoint stretches with enough equal copies to leave one out."""
        return [_Window(*run) for run in find_runs(
            self._described, self._same_sources, _COPIES_KEPT + 1)]

    def _same_sources(self, index: int, period: int) -> bool:
        """True if an op and the op one period later read operands from the same relative places."""
        first, second = self.ops[index].all_input_nodes, self.ops[index + period].all_input_nodes
        return len(first) == len(second) and all(
            a is b or (self.index_of[b] - self.index_of[a] == period
                       if a in self.index_of and b in self.index_of else
                       a not in self.index_of and b not in self.index_of
                       and _layouts(a) == _layouts(b))
            for a, b in zip(first, second, strict=True))

    def window_of(self, node: fx.Node) -> _Window | None:
        """The omitted window that contains a node."""
        index = self.index_of.get(node, -1)
        return next((w for w in self.windows if w.start <= index < w.stop), None)

    def replacement_of(self, node: fx.Node) -> fx.Node:
        """The node that is read after the omitted part in place of `node`."""
        while (window := self.window_of(node)) is not None:
            index = self.index_of[node]
            node = self.ops[index - (
                (index - window.start) // window.period + 1) * window.period]
        return node

    def without_windows(self, read: Callable[[int, fx.Node], fx.Node],
                        keeps: Sequence[bool] | None = None) -> fx.Graph:
        """The graph without its windows.

        `read(index, node)`: the node that the op of that index reads in place of `node`.  `keeps`:
        the outputs that stay; without it, outputs made in a window and views of them are absent.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "output" or self.window_of(node) is not None:
                continue
            index = self.index_of.get(node, -1)
            copies[node] = graph.node_copy(
                node, lambda source, reader=index: copies[read(reader, source)])
            copies[node].meta = node.meta
        old = self.graph.output_node()
        chosen = [True] * len(self.outputs) if keeps is None else keeps
        values = [value if not isinstance(value, fx.Node)
                  else copies[value] if keeps is not None or self.window_of(
                      unviewed(value)) is None else None
                  for value, is_kept in zip(self.outputs, chosen, strict=True) if is_kept]
        output = graph.output(values)
        output.meta = dict(old.meta)
        if "desc" in output.meta:
            output.meta["desc"] = [
                each for each, is_kept in zip(old.meta["desc"], chosen, strict=True) if is_kept]
        graph.eliminate_dead_code()  # views of omitted nodes
        return graph


def _description(node: fx.Node) -> tuple[object, ...]:
    """The op without the origin of its operands."""
    args: Any = () if getattr(node.target, "__name__", "").partition(".")[0] in _NUMBERED else (
        fx.map_arg((node.args, dict(node.kwargs)), lambda _: "an operand"))
    return str(node.target), repr(args), _layouts(node)


def _layouts(node: fx.Node) -> str:
    return str([(tuple(tensor.shape), tensor.stride(), tensor.dtype)
                for tensor in tensors_of(node.meta.get("val"))])


def _cuts(there: _Sequence, back: _Sequence, maker_of: Mapping[fx.Node, int],
          find_runs: FindRuns) -> list[_Cut]:
    """Windows that may be left out of both graphs: as many copies of the backward as of the forward
    that they read."""
    forward_runs, cuts = there.runs(find_runs), list[_Cut]()
    for run in back.runs(find_runs):
        reads: dict[int, set[int]] = {}
        for index in range(run.start, run.stop):
            makers = {maker_of[source] for source in back.ops[index].all_input_nodes
                      if source in maker_of}
            if makers:
                reads[index] = makers
        best: tuple[int, _Cut] | None = None
        for other in forward_runs:
            copies = min((each.stop - each.start) // each.period
                         for each in (run, other)) - _COPIES_KEPT
            if copies < 1:
                continue
            window = _Window(run.start + run.period, run.start + (1 + copies) * run.period,
                             run.period)
            read_makers = sorted({maker for index, found in reads.items()
                                  if window.start <= index < window.stop for maker in found})
            length = copies * other.period
            for start in range(other.start + other.period,
                               other.stop - other.period - length + 1):
                inside = sum(start <= maker < start + length for maker in read_makers)
                if 2 * inside > len(read_makers) and (best is None or inside > best[0]):
                    best = inside, _Cut(_Window(start, start + length, other.period), window)
        if best is not None:
            cuts.append(best[1])
            forward_runs = [other for other in forward_runs if not (
                other.start <= best[1].there.start < other.stop)]
    return sorted(cuts, key=lambda cut: cut.back.start)


def _breakdowns(there: _Sequence, back: _Sequence, cuts: Iterable[_Cut],
                saved: Sequence[tuple[fx.Node, bool]]) -> tuple[LeftOut, ...]:
    held = {root: index for node, keeps in saved if keeps
            for root, index in _root(there, node)}
    lost = {root: index for node, keeps in saved if not keeps
            for root, index in _root(there, node) if root not in held}
    gradients = {root: index for node in back.outputs if isinstance(node, fx.Node)
                 for root, index in _root(back, node)}

    def total(roots: Mapping[fx.Node, int], start: int, stop: int) -> int:
        return sum(_bytes(root) for root, index in roots.items() if start <= index < stop)

    def is_out(index: int) -> bool:
        return any(w.start <= index < w.stop for w in back.windows)

    stay = {root: index for root, index in gradients.items() if not is_out(index)}
    return tuple(LeftOut(
        total(lost, cut.there.start, cut.there.stop),
        total(gradients, cut.back.start, cut.back.stop),
        total(held, 0, cut.there.start), total(stay, 0, cut.back.start)) for cut in cuts)


def _root(sequence: _Sequence, node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The op that made the storage of a node, and its place; nothing for an input."""
    made = unviewed(node)
    return [(made, sequence.index_of[made])] if made in sequence.index_of else []


def _bytes(node: fx.Node) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(node.meta.get("val")))
