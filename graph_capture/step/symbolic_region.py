"""One captured graph with symbolic sizes: what it is where the symbols have values.

The model of the world: the model is one region, whose joint graph torch has traced once with
symbols for sizes.  It is cleaned and lowered like any other, once for each variant; where the
symbols have values, the same ops exchange storages of so many bytes.  `at` gives the region with
numbers in the place of symbols, for the breakdown of a step; nothing is traced for it.

Blind spots: sizes that depend on the values of tensors; variants in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.fake_copies.input_values import values_of_inputs
from planner._graph_capture.joint_graph.joint import count_cotangents, primals_of
from planner._graph_capture.joint_graph.lower import RESIDENT, LoweredRegion, region_at
from planner._graph_capture.joint_graph.naming import name_modules, names_in_model
from planner._graph_capture.joint_graph.pipeline import (
    JointVariant,
    has_low_peak_variant,
    lower_joint_graph,
)
from planner._graph_capture.joint_graph.symbolic_sizes import Sizes, Values
from planner._graph_capture.module_forward import in_place_of_forward, own_forward
from planner._graph_capture.step.regions import RegionUse
from planner._graph_capture.torch_compat import (
    aot_backend,
    as_plain_code,
    compile_forward,
    compile_settings,
    expression_of,
    extents_of_whole,
    guards_hold,
    primal_sources,
    quiet_fake_tensors,
    smallest_value,
    storage_key,
    symbolic_dimensions,
    text_of,
)
from planner._graph_capture.training_graph import ModelOutput

NamedDimensions = Mapping[str, Mapping[int, str]]
"""For each input, the names of sizes by dimension."""


@dataclass(frozen=True, eq=False)
class SymbolicRegion:
    """A joint graph with symbolic sizes, in each of its variants."""

    variants: Mapping[bool, LoweredRegion]
    """The base variant (`False`), and the low-peak variant where there is one."""
    sizes: Sizes
    parameters: tuple[str | None, ...]
    """Names of the parameters and buffers among its inputs."""
    cotangents: tuple[bool, ...]
    names: Mapping[Any, str]
    """Name of each symbol."""
    same: Mapping[str, str]
    """For each named size that varies, the one among `names` that the model's code takes to be
    equal: the length of a mask is that of the tokens."""
    smallest: Mapping[str, int]
    """The smallest value of each named size that the graph serves."""

    @classmethod
    def of(cls, joint: fx.GraphModule, num_forward_outputs: int, cotangents: Sequence[bool],
           given: Sequence[str | None], called_with: Sequence[str | None],
           dimensions: NamedDimensions) -> SymbolicRegion:
        """Lower a joint graph; comparisons of sizes become guards of the graph, so that it must be
        under compilation.  Raises `ValueError` where it cannot be.

        `given`: names of the parameters and buffers among its inputs; `called_with`: of the call's
        tensors among them; `dimensions`: the named sizes of these tensors."""
        if count_cotangents(joint) != len(cotangents):
            raise ValueError(f"{count_cotangents(joint)} differentiable outputs, where the graph "
                             f"with fixed sizes has {len(cotangents)}")
        sources = primal_sources(primals_of(joint))
        names = [source.name(given) for source in sources]
        symbols = _named_symbols(zip(primals_of(joint), (
            source.name(called_with) for source in sources), strict=True), dimensions)

        def lowered(low_peak: bool) -> LoweredRegion:
            found = lower_joint_graph(joint, num_forward_outputs, JointVariant(low_peak=low_peak),
                                      cotangents=cotangents, input_names=names)
            # Names of symbols differ between captures.
            return replace(found, ops=tuple(replace(op, digest=op.structure) for op in found.ops))

        base = lowered(False)
        variants = {False: base}
        if has_low_peak_variant(base):
            variants[True] = lowered(True)
        sizes = Sizes.of(base.joint.primals)
        if not sizes.symbols:
            raise ValueError("all sizes of the graph are fixed")
        found = {expression_of(symbol): (symbol, name) for name, symbol in reversed(symbols)}
        if unnamed := [str(each) for each in sizes.symbols if each not in found]:
            raise ValueError(f"no tensor among the inputs has the size {', '.join(unnamed)}")
        smallest: dict[str, int] = {}
        for each in sizes.symbols:
            symbol, name = found[each]
            smallest[name] = max(smallest.get(name, 0), smallest_value(symbol))
        same = {name: found[expression][1] for name, symbol in symbols
                if (expression := expression_of(symbol)) in sizes.symbols}
        return cls(variants, sizes, tuple(names), tuple(cotangents),
                   {each: found[each][1] for each in sizes.symbols}, same, smallest)

    def serves(self, values: Values) -> bool:
        """True if the graph is that of calls where the symbols have these values."""
        symbol = self.variants[False].joint.primals[self.symbol_places[0]].meta["val"]
        return guards_hold(symbol, dict(zip(self.sizes.symbols, values, strict=True)),
                           self.sizes.places)

    def text(self, size: Any) -> str:
        """A size in terms of the named ones."""
        return text_of(size, self.names)

    def values_at(self, named: Mapping[str, int]) -> Values:
        """The symbols' values where the named sizes have these values."""
        return tuple(named[self.names[each]] for each in self.sizes.symbols)

    def named(self, values: Values) -> dict[str, int]:
        """The inverse of `values_at`."""
        return {self.names[each]: value
                for each, value in zip(self.sizes.symbols, values, strict=True)}

    @cached_property
    def symbol_places(self) -> tuple[int, ...]:
        """Index of the graph input that holds each symbol."""
        joint = self.variants[False].joint
        givers = self.sizes.givers(joint.graph)[:len(self.sizes.symbols)]
        return tuple(map(joint.primals.index, givers))

    def values_of(self, inputs: Sequence[object]) -> Values:
        """The symbols' values where the graph is called with these inputs."""
        return tuple(int(inputs[place]) for place in self.symbol_places)  # type: ignore[call-overload]

    def at(self, values: Values, *, low_peak: bool = False
           ) -> AbstractContextManager[LoweredRegion]:
        """One variant where the symbols have these values; inside, its nodes hold numbers."""
        return region_at(self.variants[low_peak], self.sizes, values)

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
            raise CaptureError("its outputs are not those of the graph with fixed sizes")
        return lowered.storage_of.get(node, RESIDENT)


def input_bytes(dimensions: NamedDimensions, inputs: Mapping[str, torch.Tensor]
                ) -> tuple[str, ...]:
    """Bytes, in terms of the named sizes, of each input that fills a storage of its own or is a
    slice of one that does.  What a slice leaves out counts at any size, and no less than now."""
    found: dict[int, str] = {}
    for name, tensor in inputs.items():
        places = dimensions.get(name)
        if not places:
            continue
        storage_bytes, element_bytes = tensor.untyped_storage().nbytes(), tensor.element_size()
        extents = extents_of_whole(tensor)
        if math.prod(extent for _, extent in extents) * element_bytes != storage_bytes:
            continue
        sizes = [places.get(place, str(tensor.size(place))) + (
            f" + {left_out}" if (left_out := extent - tensor.size(place)) else "")
            for place, extent in extents]
        text = "*".join([str(element_bytes), *(f"({size})" if "+" in size else size
                                               for size in reversed(sizes))])
        found.setdefault(storage_key(tensor),
                         f"max({storage_bytes}, {text})" if "+" in text else text)
    return tuple(found.values())


def _named_symbols(primals: Iterable[tuple[fx.Node, str | None]], dimensions: NamedDimensions
                   ) -> list[tuple[str, torch.SymInt]]:
    """The symbols among the named sizes; those of one name become one."""
    found: list[tuple[str, torch.SymInt]] = []
    fixed: dict[str, str] = {}
    for node, name in primals:
        for place, size in dimensions.get(name or "", {}).items():
            symbol = node.meta["val"].shape[place]
            if not isinstance(symbol, torch.SymInt) or symbol.node.maybe_as_int() is not None:
                fixed[size] = f"dimension {place} of {name}"
                continue
            for other, known in found:
                if other == size and not bool(known == symbol):  # torch notes the comparison
                    raise ValueError(f"the sizes {size} differ")
            found.append((size, symbol))
    for size, _ in found:
        if size in fixed:
            raise ValueError(f"the model's code fixes {fixed[size]}, one of the sizes {size}")
    return found


class _Traced(Exception):
    """Ends the compilation."""


class _Backend:
    """The Dynamo backend, which keeps the joint graph."""

    def __init__(self, fake_copy: FakeCopy, cotangents: Sequence[bool],
                 inputs: Mapping[str, torch.Tensor], dimensions: NamedDimensions) -> None:
        self.model, self.cotangents = fake_copy.model, tuple(cotangents)
        self.dimensions = dimensions
        self.inputs = {id(tensor): name for name, tensor in inputs.items()}
        self.region: SymbolicRegion | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        name_modules(module, self.model)
        given = names_in_model(self.model, inputs)
        called_with = [self.inputs.get(id(value)) for value in inputs]

        def partition(joint: fx.GraphModule, joint_inputs: object, *, num_fwd_outputs: int,
                      **_: object) -> Any:
            self.region = SymbolicRegion.of(joint, num_fwd_outputs, self.cotangents, given,
                                            called_with, self.dimensions)
            raise _Traced

        return aot_backend(partition, _no_code, _no_code)(module, list(inputs))


def _no_code(graph: fx.GraphModule, inputs: object) -> Any:
    raise ValueError("it has no backward")


@quiet_fake_tensors()
def trace_with_symbols(fake_copy: FakeCopy, cotangents: Sequence[bool],
                       inputs: Mapping[str, torch.Tensor], dimensions: NamedDimensions
                       ) -> SymbolicRegion:
    """The graph of a fake copy, captured before with fixed sizes, with symbols for these dimensions
    of its `inputs`.  Dynamo and AOTAutograd are stopped once they have made it; nothing is run.

    Raises `CaptureError` where it cannot be traced so.
    """
    backend = _Backend(fake_copy, cotangents, inputs, dimensions)
    model = fake_copy.model
    compiled = partial(compile_forward(type(model).__name__, backend, dynamic=None), model,
                       own_forward(model))
    marks = [(tensor, sorted(dimensions.get(name, {}))) for name, tensor in inputs.items()]
    with (compile_settings(), as_plain_code(partial(values_of_inputs, fake_copy)),
          fake_copy.as_on_device(), fake_copy.mode, symbolic_dimensions(marks),
          in_place_of_forward(model, compiled)):
        try:
            with fake_copy.forward_context():
                fake_copy.call()
        except Exception as error:  # what ends the trace, or whatever the user's code raises
            inner = getattr(error, "inner_exception", error)
            if not isinstance(inner, _Traced):
                words = str(inner).strip().partition("\n")[0] or type(inner).__name__
                raise CaptureError("the model cannot be captured with symbolic sizes: "
                                   f"{words}") from error
    if backend.region is None:
        raise CaptureError("the model cannot be captured with symbolic sizes: torch.compile runs "
                           "it as it is written")
    return backend.region
