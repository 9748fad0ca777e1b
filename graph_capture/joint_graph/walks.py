"""Walks over fx graphs: the nodes that can be reached by operands or by readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

Choice = Callable[[fx.Node], bool]
"""Predicate of the nodes that a walk may visit."""


def ancestors(nodes: Iterable[fx.Node], within: Choice = lambda node: True) -> set[fx.Node]:
    """These nodes and all that they are computed from, among the nodes of `within`."""
    return _reached(filter(within, nodes), lambda node: filter(within, node.all_input_nodes))


def descendants(nodes: Iterable[fx.Node], within: Choice = lambda node: True) -> set[fx.Node]:
    """These nodes and all that is computed from them, the graph's output included, among the nodes
    of `within`."""
    return _reached(filter(within, nodes), lambda node: filter(within, node.users))


def operands(node: fx.Node, through: Choice) -> set[fx.Node]:
    """The operands of a node, with nodes of `through` replaced by their own operands."""
    return {source for source in _reached(
        node.all_input_nodes, lambda source: source.all_input_nodes if through(source) else ())
            if not through(source)}


def sources(nodes: Iterable[fx.Node], is_source: Choice) -> set[fx.Node]:
    """The nodes of a choice that these are, or are computed from without another one between."""
    return set(filter(is_source, _reached(
        nodes, lambda node: () if is_source(node) else node.all_input_nodes)))


def readers(node: fx.Node, through: Choice) -> set[fx.Node]:
    """The readers of a node, with nodes of `through` replaced by their own readers."""
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
