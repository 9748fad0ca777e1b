"""What it would cost to recompute a storage, by what else is gone around it.

The model of the world: storages that are gone but wanted form *holes*, connected by the ops that
make one from another; recomputing one storage of a hole recomputes most of it.

Blind spot: a hole never splits, so prices err on the high side once parts of it have come back.
"""

from __future__ import annotations

import numpy as np

from planner.solvers.problem import Problem

_LARGE_RIM = 64


class EvictedNeighborhood:
    """Connected sets of storages that are gone but wanted, and what it costs to recompute them.

    Dropping a storage joins the holes next to it, so its price is theirs and its own: that is what
    keeps checkpoints apart on a chain (the neighbourhood of Dynamic Tensor Rematerialization).
    A union-find that never splits: a storage that comes back only takes its own cost along.
    """

    def __init__(self, problem: Problem, both_ways: bool) -> None:
        self.own = [problem.ops[storage.producer].cost for storage in problem.storages]
        self.price = np.array(self.own, dtype=float)
        """Per storage: its own cost and that of the holes next to it."""
        self.near = [
            sorted({*problem.ops[storage.producer].inputs,
                    *(out for reader in problem.consumers[index]
                      for out in problem.ops[reader].outputs)})
            for index, storage in enumerate(problem.storages)]
        self.made_from = [problem.ops[storage.producer].inputs for storage in problem.storages]
        self.both_ways = both_ways
        self.node: dict[int, int] = {}  # of each storage that is gone but wanted
        self.parent: list[int] = []
        self.cost: list[float] = []
        self.rim: list[set[int]] = []  # storages next to the hole that may be held

    def open(self, storage: int) -> None:
        """The storage is gone but wanted."""
        if storage in self.node:
            return
        root = len(self.parent)
        self.node[storage] = root
        self.parent.append(root)
        self.cost.append(self.own[storage])
        self.rim.append(set())
        for other in self.near[storage]:
            if other in self.node:
                root = self._join(root, self._root(self.node[other]))
            else:
                self.rim[root].add(other)
        self.rim[root].discard(storage)
        self._reprice_around(storage, root)

    def fill(self, storage: int) -> None:
        """The storage is there again."""
        node = self.node.pop(storage, None)
        if node is not None:
            root = self._root(node)
            self.cost[root] -= self.own[storage]
            self.rim[root].add(storage)
            self._reprice_around(storage, root)
        else:
            self._reprice(storage)

    def _reprice_around(self, storage: int, root: int) -> None:
        """Update prices next to a hole that has changed at `storage`; next to a large one, where
        the change matters little, only those next to the storage."""
        rim = self.rim[root]
        if len(rim) > _LARGE_RIM:
            for other in (storage, *self.near[storage]):
                self._reprice(other)
            return
        left = [other for other in rim if root not in self._reprice(other)]
        rim.difference_update(left)

    def _reprice(self, storage: int) -> set[int]:
        """Update the price of a storage; the holes next to it."""
        roots = {self._root(self.node[other]) for other in self.near[storage]
                 if other in self.node}
        counted = roots if self.both_ways else {
            self._root(self.node[other]) for other in self.made_from[storage]
            if other in self.node}
        self.price[storage] = self.own[storage] + sum(self.cost[root] for root in counted)
        return roots

    def _root(self, node: int) -> int:
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def _join(self, first: int, second: int) -> int:
        if first == second:
            return first
        if len(self.rim[first]) < len(self.rim[second]):
            first, second = second, first
        self.parent[second] = first
        self.cost[first] += self.cost[second]
        self.rim[first] |= self.rim[second]
        self.rim[second] = set()
        return first
