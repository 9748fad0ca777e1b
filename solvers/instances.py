"""Published rematerialization instances: networkx node-link JSON in, `Problem` out.

Each node is one op with one output: `size` (bytes of its result) and `cost` (one run), with `label`
and `backward` where known.  A node with `backward: true` runs exactly once; any other may be
recomputed anywhere after its first run.  If the graph has `bytes_per_cost`, the rate of a link to
the host, the result of a node with `offloadable: true` may be stored there.  Nodes are numbered 0 …
n-1 in a topological order, which is the order of first runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from planner.solvers.problem import Link, Op, Problem, Storage


def load_problem(path: str | PathLike[str]) -> Problem:
    """Return the problem in the file at `path`.

    Raises `OSError` if the file cannot be read, and `ValueError` if it is no such instance; the
    message names the file and the fault.
    """
    source = Path(path)
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: expected networkx node-link JSON, got a file that is no "
                         f"JSON ({error})") from error
    try:
        return problem_from_node_link(data, name=source.stem)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def problem_from_node_link(data: Any, name: str = "") -> Problem:
    """Return the problem in parsed node-link data; raise `ValueError` if it is no instance."""
    if not isinstance(data, Mapping) or "nodes" not in data or "edges" not in data:
        raise ValueError("expected a JSON object with 'nodes' and 'edges' (networkx node-link "
                         "data written with edges=\"edges\")")
    import networkx as nx  # half a second, for published instances only

    try:
        graph = nx.node_link_graph(dict(data), directed=True, multigraph=False, edges="edges")
    except (nx.NetworkXError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"expected networkx node-link data, got what networkx refuses: "
                         f"{type(error).__name__}: {error}") from error
    count = len(data["nodes"])
    if count == 0:
        raise ValueError("expected at least one node, got none")
    strangers = [node for node in graph.nodes if type(node) is not int or not 0 <= node < count]
    if strangers or graph.number_of_nodes() != count:
        got = f"node {strangers[0]!r}" if strangers else "the same number twice"
        raise ValueError(f"expected nodes numbered 0 to {count - 1}, got {got}")
    wrong_way = next(((u, v) for u, v in graph.edges if u >= v), None)
    if wrong_way is not None:
        raise ValueError(f"expected nodes numbered in a topological order, got the edge "
                         f"{wrong_way[0]} -> {wrong_way[1]}")

    ops, storages = [], []
    for node in range(count):
        fields = graph.nodes[node]
        size = _number(node, fields, "size")
        if size != int(size):
            raise ValueError(f"expected node {node} to have a whole number of bytes as 'size', "
                             f"got {size}")
        backward, offloadable = _flag(node, fields, "backward"), _flag(node, fields, "offloadable")
        storages.append(Storage(size_bytes=int(size), producer=node, offloadable=offloadable))
        ops.append(Op(
            name=str(fields.get("label", node)), cost=float(_number(node, fields, "cost")),
            inputs=tuple(sorted(graph.predecessors(node))), outputs=(node,),
            recomputable=not backward))
    rate = graph.graph.get("bytes_per_cost")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float)):
        raise ValueError(f"expected a number as 'bytes_per_cost' of the graph, got {rate!r}")
    return Problem(tuple(ops), tuple(storages), name=str(graph.graph.get("name") or name),
                   link=None if rate is None else Link(float(rate)))


def _flag(node: int, fields: Mapping[str, Any], key: str) -> bool:
    """Return a boolean field, false if it is missing; raise `ValueError` for anything else."""
    value = fields.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"expected node {node} to have true or false as {key!r}, got {value!r}")
    return value


def _number(node: int, fields: Mapping[str, Any], key: str) -> float:
    """Return a finite number >= 0; raise `ValueError` for anything else."""
    if key not in fields:
        raise ValueError(f"expected node {node} to have a {key!r}, got the fields "
                         f"{sorted(map(str, fields))}")
    value = fields[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf"):
        raise ValueError(f"expected node {node} to have a finite number >= 0 as {key!r}, "
                         f"got {value!r}")
    return cast(float, value)
