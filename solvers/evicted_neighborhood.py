"""The cost to recompute a storage, given the other storages evicted around it.

The model of the world: storages that are evicted but needed later form *evicted neighborhoods*,
connected by the ops that make one from another; recomputing one storage recomputes most of its
neighborhood.

Blind spot: a neighborhood never splits, so costs err on the high side once parts of it have come
back.
"""

from __future__ import annotations

import numpy as np

from planner.solvers.problem import Problem

_LARGE_RIM = 64


class EvictedNeighborhood:
    """Connected sets of storages that are evicted but needed later, and the cost to recompute them.

    Evicting a storage joins the neighborhoods next to it, so its cost is theirs and its own.  This
    keeps checkpoints apart on a chain (the neighborhood of Dynamic Tensor Rematerialization).  A
    union-find that never splits: a storage that comes back removes only its own cost.
    """

    def __init__(self, problem: Problem, both_ways: bool) -> None:
        self.own = [problem.ops[storage.producer].cost for storage in problem.storages]
        self.price = np.array(self.own, dtype=float)
        """Per storage: its own cost and that of the neighborhoods next to it."""
        self.near = [
            sorted({*problem.ops[storage.producer].inputs,
                    *(out for reader in problem.consumers[index]
                      for out in problem.ops[reader].outputs)})
            for index, storage in enumerate(problem.storages)]
        self.made_from = [problem.ops[storage.producer].inputs for storage in problem.storages]
        self.both_ways = both_ways
        self.node: dict[int, int] = {}  # of each storage that is evicted but needed later
        self.parent: list[int] = []
        self.cost: list[float] = []
        self.rim: list[set[int]] = []  # storages next to the neighborhood that may be alive

    def open(self, storage: int) -> None:
        """Add a storage that is evicted but needed later."""
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
        """Remove a storage that exists again."""
        node = self.node.pop(storage, None)
        if node is not None:
            root = self._root(node)
            self.cost[root] -= self.own[storage]
            self.rim[root].add(storage)
            self._reprice_around(storage, root)
        else:
            self._reprice(storage)

    def _reprice_around(self, storage: int, root: int) -> None:
        """Update the costs next to a neighborhood that has changed at `storage`.  Next to a large
        one the change matters little, so only those next to the storage are updated."""
        rim = self.rim[root]
        if len(rim) > _LARGE_RIM:
            for other in (storage, *self.near[storage]):
                self._reprice(other)
            return
        left = [other for other in rim if root not in self._reprice(other)]
        rim.difference_update(left)

    def _reprice(self, storage: int) -> set[int]:
        """Update the cost of a storage; return the neighborhoods next to it."""
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
