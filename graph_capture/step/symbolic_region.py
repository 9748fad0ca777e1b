"""One captured graph with symbolic sizes: what it is where the symbols have values.

The model of the world: the model is one region, whose joint graph torch has traced once with
symbols for sizes.  It is cleaned and lowered like any other, once for each variant; where the
symbols have values, the same ops exchange storages of so many bytes.  `at` gives the region with
numbers in the place of symbols, for the breakdown of a step; nothing is traced for it.

Blind spots: sizes that depend on the values of tensors; forms in chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from planner._graph_capture.joint_graph.joint import count_cotangents, primals_of
from planner._graph_capture.joint_graph.lower import RESIDENT, LoweredRegion
from planner._graph_capture.joint_graph.pipeline import (
    JointVariant,
    has_low_peak_variant,
    lower_joint_graph,
)
from planner._graph_capture.joint_graph.symbolic_sizes import Sizes, Values
from planner._graph_capture.step.regions import RegionUse
from planner._graph_capture.torch_compat import FakeTensorMode, primal_sources
from planner._graph_capture.training_graph import ModelOutput


@dataclass(frozen=True, eq=False)
class SymbolicRegion:
    """A joint graph with symbolic sizes, in each of its variants."""

    variants: Mapping[bool, LoweredRegion]
    """The base variant (`False`), and the low-peak variant where there is one."""
    sizes: Sizes
    parameters: tuple[str | None, ...]
    """Names of the parameters and buffers among its inputs."""
    cotangents: tuple[bool, ...]

    @classmethod
    def of(cls, joint: fx.GraphModule, num_forward_outputs: int, cotangents: Sequence[bool],
           given: Sequence[str | None]) -> SymbolicRegion:
        """Lower a joint graph whose inputs have these names; comparisons of sizes become guards of
        the graph, so that it must be under compilation.  Raises `ValueError` where it cannot be."""
        if count_cotangents(joint) != len(cotangents):
            raise ValueError(f"{count_cotangents(joint)} differentiable outputs, where the graph "
                             f"with fixed sizes has {len(cotangents)}")
        names = [source.name(given) for source in primal_sources(primals_of(joint))]

        def lowered(low_peak: bool) -> LoweredRegion:
            return lower_joint_graph(joint, num_forward_outputs, JointVariant(low_peak=low_peak),
                                     cotangents=cotangents, input_names=names)

        base = lowered(False)
        variants = {False: base}
        if has_low_peak_variant(base):
            variants[True] = lowered(True)
        sizes = Sizes.of(base.joint.primals)
        if not sizes.symbols:
            raise ValueError("all sizes of the graph are fixed")
        return cls(variants, sizes, tuple(names), tuple(cotangents))

    @cached_property
    def symbol_places(self) -> tuple[int, ...]:
        """Index of the graph input that holds each symbol."""
        joint = self.variants[False].joint
        return tuple(joint.primals.index(giver) for giver in self.sizes.givers(joint.graph))

    def values_of(self, inputs: Sequence[object]) -> Values:
        """The symbols' values where the graph is called with these inputs."""
        return tuple(int(inputs[place]) for place in self.symbol_places)  # type: ignore[call-overload]

    @contextlib.contextmanager
    def at(self, values: Values, *, low_peak: bool = False) -> Iterator[LoweredRegion]:
        """One form where the symbols have these values; inside, its nodes hold numbers."""
        region, mode = self.variants[low_peak], FakeTensorMode()
        kept = [(node, node.meta["val"]) for node in region.joint.graph.nodes
                if "val" in node.meta]
        try:
            for node, value in kept:
                node.meta["val"] = self.sizes.at(value, values, mode)
            yield replace(region, storages=tuple(
                replace(storage, size_bytes=self.sizes.number(storage.size_bytes, values))
                for storage in region.storages))
        finally:
            for node, value in kept:
                node.meta["val"] = value

    def use(self, lowered: LoweredRegion, outputs: Sequence[ModelOutput], trained: Collection[str]
            ) -> RegionUse:
        """The region in its step; `outputs`: those of the graph with fixed sizes, `trained`: names
        of the parameters."""
        names = {name for name in self.parameters if name in trained}
        return RegionUse(
            lowered=lowered, cotangents=self.cotangents,
            parameter_names={index: name if name in names and name is not None
                             else f"input {index}"
                             for index, name in enumerate(self.parameters)},
            linked_inputs={}, released={},
            returned={storage: (list(output.tensors), list(output.places))
                      for output in outputs
                      if (storage := self._storage(lowered, output)) != RESIDENT})

    def _storage(self, lowered: LoweredRegion, output: ModelOutput) -> int:
        node = lowered.returned[output.places[0]] if output.places else None
        if node is None:
            raise ValueError("its outputs are not those of the graph with fixed sizes")
        return lowered.storage_of.get(node, RESIDENT)
