"""Node-link files: what is read, and what is refused in which words."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from planner.solvers import Link, load_problem, simulate
from planner.solvers.instances import problem_from_node_link


def _data() -> dict[str, Any]:
    return {
        "directed": True, "multigraph": False, "graph": {"name": "tiny"},
        "nodes": [{"id": 0, "size": 10, "cost": 1, "label": "a", "backward": False},
                  {"id": 1, "size": 20, "cost": 2.5},
                  {"id": 2, "size": 5, "cost": 0, "backward": True}],
        "edges": [{"source": 0, "target": 1}, {"source": 1, "target": 2},
                  {"source": 0, "target": 2}]}


def _write(path: Path, data: Any) -> Path:
    file = path / "instance.json"
    file.write_text(json.dumps(data))
    return file


def test_a_file_is_read(tmp_path: Path) -> None:
    problem = load_problem(_write(tmp_path, _data()))
    assert problem.name == "tiny"
    assert [op.name for op in problem.ops] == ["a", "1", "2"]
    assert [op.recomputable for op in problem.ops] == [True, True, False]
    assert problem.ops[2].inputs == (0, 1)
    assert simulate(problem, problem.keep_all_schedule) == (35, 3.5)


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: d.pop("edges"), "'nodes' and 'edges'"),
    (lambda d: d.update(nodes=[], edges=[]), "at least one node"),
    (lambda d: d["nodes"][1].pop("size"), "node 1 to have a 'size'"),
    (lambda d: d["nodes"][1].update(size=-1), ">= 0 as 'size'"),
    (lambda d: d["nodes"][1].update(size=1.5), "whole number of bytes"),
    (lambda d: d["nodes"][1].update(cost="x"), "as 'cost'"),
    (lambda d: d["nodes"][1].update(cost=float("nan")), "as 'cost'"),
    (lambda d: d["nodes"][1].update(backward=1), "true or false"),
    (lambda d: d["nodes"][2].update(id=7), "nodes numbered 0 to 2"),
    (lambda d: d["nodes"].append(dict(d["nodes"][0])), "the same number twice"),
    (lambda d: d["edges"].append({"source": 0, "target": 5}), "got node 5"),
    (lambda d: d["edges"].append({"source": 2, "target": 0}), "2 -> 0"),
    (lambda d: d["edges"].append({"source": 1, "target": 1}), "1 -> 1"),
    (lambda d: d["edges"].append({"target": 1}), "networkx refuses"),
    (lambda d: d.update(nodes=3), "networkx refuses"),
])
def test_a_broken_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    data = _data()
    change(data)
    with pytest.raises(ValueError, match=message) as caught:
        load_problem(_write(tmp_path, data))
    assert "instance.json" in str(caught.value)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    file.write_text('{"nodes": [')
    with pytest.raises(ValueError, match="no JSON"):
        load_problem(file)
    with pytest.raises(ValueError, match="'nodes' and 'edges'"):
        load_problem(_write(tmp_path, [1, 2]))
    with pytest.raises(FileNotFoundError):
        load_problem(tmp_path / "missing.json")


def test_a_link_to_the_host_and_what_may_go_there_are_read():
    document = {"directed": True, "multigraph": False,
                "graph": {"bytes_per_cost": 8}, "edges": [{"source": 0, "target": 1}],
                "nodes": [{"id": 0, "size": 4, "cost": 1, "offloadable": True},
                          {"id": 1, "size": 4, "cost": 1}]}
    problem = problem_from_node_link(document)
    assert problem.link == Link(8.0)
    assert [storage.offloadable for storage in problem.storages] == [True, False]
    for key, message in (("bytes_per_cost", "expected a number"), ("offloadable", "true or false")):
        damaged = copy.deepcopy(document)
        (damaged["graph"] if key == "bytes_per_cost" else damaged["nodes"][0])[key] = "8"
        with pytest.raises(ValueError, match=message):
            problem_from_node_link(damaged)
