"""The inputs behind the placeholders, updates and gradients of a joint graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    DifferentiableAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)


def mutated_inputs(output: fx.Node) -> dict[int, int]:
    """For each forward output that AOTAutograd copies back into an input after the forward:
    position among the outputs -> index of the input."""
    return _described_inputs(output, InputMutationAOTOutput, "mutated_input")


def effect_tokens(output: fx.Node) -> frozenset[int]:
    """Positions of the outputs that stand for the order of ops with effects, such as the check of
    errors behind `torch.linalg.solve`; AOTAutograd does not return them."""
    return frozenset(position for position, description in enumerate(output.meta.get("desc", ()))
                     if isinstance(description, ForwardTokenAOTOutput))


def gradient_targets(output: fx.Node) -> dict[int, int]:
    """For each output that is a gradient: position among the outputs -> index of the input."""
    return _described_inputs(output, GradAOTOutput, "grad_of")


def _described_inputs(output: fx.Node, kind: type, attribute: str) -> dict[int, int]:
    # A tensor subclass has a placeholder for each tensor in it.
    place_of = {description: place for place, description in enumerate(
        node.meta.get("desc") for node in output.graph.find_nodes(op="placeholder"))}
    found: dict[int, int] = {}
    for position, description in enumerate(output.meta.get("desc", ())):
        attributes: list[str] = []
        while isinstance(description, SubclassGetAttrAOTOutput):
            attributes.append(description.attr)
            description = description.base
        if not isinstance(description, kind):
            continue
        source: Any = getattr(description, attribute)
        for name in reversed(attributes):
            source = SubclassGetAttrAOTInput(source, name)
        if isinstance(source, SubclassGetAttrAOTInput | DifferentiableAOTInput) and (
                source in place_of):
            found[position] = place_of[source]
    return found


class PrimalSource(NamedTuple):
    """The origin of an input of a joint graph."""

    position: int
    """Position among the inputs given to the backend."""
    attributes: tuple[str, ...] = ()
    """Attributes from a tensor subclass at that position inwards to the tensor."""

    def of(self, inputs: Sequence[Any]) -> Any:
        """The input, among the inputs given to the backend."""
        return functools.reduce(getattr, self.attributes, inputs[self.position])

    def name(self, names: Sequence[str | None]) -> str | None:
        """Its name, by the names of the inputs given to the backend."""
        known = names[self.position]
        return None if known is None else ".".join((known, *self.attributes))


def primal_sources(primals: Sequence[fx.Node]) -> list[PrimalSource]:
    """The origin of each input of a joint graph."""
    sources = []
    for position, node in enumerate(primals):
        description: Any = node.meta.get("desc")
        attributes: tuple[str, ...] = ()
        while isinstance(description, SubclassGetAttrAOTInput):
            attributes = (description.attr, *attributes)
            description = description.base
        sources.append(PrimalSource(description.idx, attributes)
                       if isinstance(description, PlainAOTInput) else PrimalSource(position))
    return sources
