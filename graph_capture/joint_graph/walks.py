"""Walks over fx graphs: what is to be reached from a node, by its operands or by its readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

Choice = Callable[[fx.Node], bool]
"""Of the nodes that a walk may take."""


def ancestors(nodes: Iterable[fx.Node], within: Choice = lambda node: True) -> set[fx.Node]:
    """These nodes and all that they are computed from, as far as `within` says."""
    return _reached(filter(within, nodes), lambda node: filter(within, node.all_input_nodes))


def descendants(nodes: Iterable[fx.Node], within: Choice = lambda node: True) -> set[fx.Node]:
    """These nodes and all that is computed from them, the graph's output too, as far as `within`
    says."""
    return _reached(filter(within, nodes), lambda node: filter(within, node.users))


def operands(node: fx.Node, through: Choice) -> set[fx.Node]:
    """What a node reads, itself or by way of nodes that `through` lets pass; these are left out."""
    return {source for source in _reached(
        node.all_input_nodes, lambda source: source.all_input_nodes if through(source) else ())
            if not through(source)}


def sources(nodes: Iterable[fx.Node], is_source: Choice) -> set[fx.Node]:
    """The nodes of a choice that these are, or are computed from without another one between."""
    return set(filter(is_source, _reached(
        nodes, lambda node: () if is_source(node) else node.all_input_nodes)))


def readers(node: fx.Node, through: Choice) -> set[fx.Node]:
    """What reads a node, itself or by way of nodes that `through` lets pass; these are left out."""
    return {user for user in _reached(
        node.users, lambda user: user.users if through(user) else ()) if not through(user)}


def _reached(nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]
             ) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(following(node))
    return found
