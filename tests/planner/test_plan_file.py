"""Plan files: canonical, readable by the published schema, and refused where they are no plan."""

import copy
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from graph_capture.training_graph import OptimizerMemory
from planner.plans.file import SCHEMA_VERSION, dumps, from_dict, loads
from planner.plans.schema import schema
from planner.search.planning import Effort, plan_within
from tests.support.graphs import HandMadeStep, chain, prepared, steps

SCHEMA = json.loads(files("planner").joinpath("plan.schema.json").read_text(encoding="utf-8"))

MAKE_AND_PRINT = """
from planner.plans.file import dumps
from planner.plans.schema import schema
from planner.search.planning import Effort, plan_within
from tests.support.graphs import HandMadeStep, chain, prepared
print(dumps(plan_within(prepared(HandMadeStep(chain(9), 2600)), 1800)), end="")
"""


def make_plan(budget_bytes=1900, optimizer=None):
    return plan_within(prepared(HandMadeStep(chain(12), 2600, optimizer)), budget_bytes)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    return path


@settings(max_examples=40, deadline=None)
@given(steps(), st.one_of(st.none(), st.integers(0, 3000)))
def test_every_plan_survives_its_file(step, budget_bytes):
    try:
        plan = plan_within(prepared(step), budget_bytes, Effort(time_limit=5.0))
    except planner.InfeasibleBudget as refusal:
        plan = plan_within(prepared(step), refusal.minimum_bytes, Effort(time_limit=5.0))
    text = dumps(plan)
    again = loads(text)
    assert again == plan
    assert dumps(again) == text
    assert json.loads(text) == plan.to_dict()
    jsonschema.validate(plan.to_dict(), SCHEMA)


def test_equal_plans_give_equal_files_in_every_process(tmp_path):
    texts = set()
    for seed in ("0", "1", "4242"):
        made = subprocess.run(
            [sys.executable, "-c", MAKE_AND_PRINT], check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()})
        texts.add(made.stdout)
    assert len(texts) == 1
    assert texts.pop() == dumps(plan_within(prepared(HandMadeStep(chain(9), 2600)), 1800))


def test_the_duration_of_the_solver_is_not_in_the_file(saved):
    plan = make_plan()
    assert plan.solve_seconds is not None and planner.load(saved).solve_seconds is None
    assert dumps(plan) == saved.read_text()


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(saved):
    make_plan(2200).save(saved)
    assert planner.load(saved).budget_bytes == 2200
    assert os.listdir(saved.parent) == ["plan.json"]


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OSError, match="missing") as caught:
        make_plan().save(tmp_path / "missing" / "plan.json")
    assert caught.value.filename.endswith("plan.json")
    with pytest.raises(OSError):
        make_plan().save(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        planner.load(tmp_path / "plan.json")


def test_text_that_is_no_json_is_refused(tmp_path):
    for content in (b"", b"no plan", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": NaN}'):
        path = tmp_path / "plan.json"
        path.write_bytes(content)
        with pytest.raises(planner.PlanFileError, match="is no plan") as caught:
            planner.load(path)
        assert str(path) in str(caught.value)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_truncated_file_is_refused(data):
    text = dumps(make_plan())
    cut = data.draw(st.integers(0, len(text) - 3))
    with pytest.raises(planner.PlanFileError, match="is no plan"):
        loads(text[:cut])


def test_json_that_is_no_plan_is_refused():
    for document in (None, [], 3, "plan", {}, {"schema_version": "1"}, {"schema_version": True}):
        with pytest.raises(planner.PlanFileError, match="is no plan"):
            from_dict(document)


LATER = ("offloaded_bytes", "transfer_seconds", "inner_pieces", "holds_output", "lean_code")
"""What version 8 got later."""


@pytest.mark.parametrize("version", [0, 1, 99])
def test_another_schema_version_is_refused(version):
    document = {**make_plan().to_dict(), "schema_version": version}
    with pytest.raises(planner.PlanFileError,
                       match=f"schema_version {version}, expected {SCHEMA_VERSION}"):
        from_dict(document)


def places(value, path=()):
    """Every place in a document."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else ())
    for key, item in items:
        yield from places(item, (*path, key))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_missing_field_is_named_by_its_path(data):
    document = make_plan(optimizer=OptimizerMemory("adam", 10, 20)).to_dict()
    free = ("inputs", "overrides")
    path = data.draw(st.sampled_from([
        path for path in places(document)
        if isinstance(path[-1], str) and not (path[0] in free and len(path) > 1)]))
    damaged = copy.deepcopy(document)
    holder = damaged
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    if path[-1] in LATER:
        assert from_dict(damaged).to_dict() == document
        return
    if path[0] == "created_with" and len(path) > 1:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(damaged, SCHEMA)
        return
    with pytest.raises(planner.PlanFileError, match="is missing") as caught:
        from_dict(damaged, name="plan.json")
    assert str(path[-1]) in str(caught.value) and "plan.json" in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_value_of_the_wrong_type_is_refused(data):
    document = make_plan(optimizer=OptimizerMemory("adam", 10, 20)).to_dict()
    path = data.draw(st.sampled_from([
        path for path in places(document) if path[0] not in ("inputs", "overrides")]))
    damaged = copy.deepcopy(document)
    holder = damaged
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]]
    wrong = data.draw(st.sampled_from([-1, 2.5, "no", [0.5], {"a": 1}]))
    if type(wrong) is type(old) or (isinstance(wrong, float) and isinstance(old, (int, float))
                                    and path[-1] in ("overhead", "overhead_bound")):
        return
    holder[path[-1]] = wrong
    with pytest.raises(planner.PlanFileError):
        from_dict(damaged)


def test_a_file_changed_by_hand_is_refused():
    document = make_plan().to_dict()
    region = document["regions"][0]

    other_digest = copy.deepcopy(document)
    other_digest["regions"][0]["backward"][0]["digest"] = "0"
    with pytest.raises(planner.PlanFileError, match="fingerprint"):
        from_dict(other_digest)

    stranger = copy.deepcopy(document)
    stranger["regions"][0]["insertions"][0]["actions"] = [
        {"kind": "run", "op": "net.other/aten.linear#0"}]
    with pytest.raises(planner.PlanFileError, match=r"net\.other"):
        from_dict(stranger)

    contradiction = copy.deepcopy(document)
    row = next(n for n, row in enumerate(region["decisions"]) if row["action"] == "recompute")
    contradiction["regions"][0]["decisions"][row]["action"] = "keep"
    with pytest.raises(planner.PlanFileError, match="recomputed 1 times"):
        from_dict(contradiction)


def test_files_diff_well():
    """One op, tensor or group per line, and no line that differs where nothing does."""
    lines = dumps(make_plan(1900)).splitlines()
    assert sum('"action"' in line for line in lines) == 12
    assert len(lines) < 134


def test_the_published_schema_is_itself_valid_and_that_of_the_types():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert schema() == SCHEMA, "python -m planner.plans.schema > planner/plan.schema.json"


def test_an_action_that_no_reader_knows_is_refused_by_its_path():
    document = make_plan().to_dict()
    document["regions"][0]["insertions"][0]["actions"][0]["kind"] = "offload"
    with pytest.raises(planner.PlanFileError, match=re.escape(
            "expected 'run' or 'store' or 'release' or 'fetch' as "
            "regions[0].insertions[0].actions[0].kind, got 'offload'")):
        from_dict(document)


@pytest.mark.parametrize("path, value, message", [
    (("predicted", "memory", "inputs"), -1,
     "expected a whole number >= 0 as predicted.memory.inputs, got -1"),
    (("tensors", 0, "shape", 1), "3", "expected a whole number >= 0 as tensors[0].shape[1], got"),
    (("predicted", "overhead"), float("-inf"), "expected a number > -1 as predicted.overhead"),
    (("solver", "status"), "fine", "expected 'feasible' or 'optimal' as solver.status, got 'fine'"),
    (("optimizer",), 3, "expected an object or null as optimizer, got 3"),
    (("created_with", "torch"), 2, "expected an object of texts as created_with"),
    (("fingerprint",), "sha", "expected text such as ^sha256"),
    (("regions", 0, "surprise"), 1, "the field regions[0].surprise is none of a plan"),
])
def test_an_error_says_where_what_was_expected_and_what_came(path, value, message):
    document = make_plan(optimizer=OptimizerMemory("adam", 10, 20)).to_dict()
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(planner.PlanFileError, match=re.escape(message)) as caught:
        from_dict(document, name="plan.json")
    assert str(caught.value).startswith("plan.json is no plan")
    assert str(caught.value).endswith("plan again and save to a new file")


def test_a_plan_that_is_no_json_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(make_plan(), overhead=float("nan")).save(tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []


VERSION_5 = Path(__file__).with_name("plan_version_5.json")


def test_a_file_of_version_5_holds_the_same_plan():
    step = HandMadeStep(chain(12), 2600, OptimizerMemory("adam", 10, 20))
    made = plan_within(prepared(step), 2000)
    assert planner.load(VERSION_5) == replace(made, course=None, created_with=planner.load(
        VERSION_5).created_with)


@pytest.mark.parametrize("version", [6, 7])
def test_a_file_of_a_version_since_then_holds_the_same_plan(version):
    """Without the fields that it did not have; those of version 6 as it was at first."""
    plan = make_plan()
    document = {**plan.to_dict(), "schema_version": version}
    later = ["pieces", "kernels", "budget_of"]
    of_region = ["unmade"]
    if version == 6:
        later += ["parallel", "circumstances", "course"]
        of_region += ["released"]
    for name in later:
        del document[name]
    for name in ("reserved_bytes", "baseline_reserved_bytes", "offloaded_bytes",
                 "transfer_seconds"):
        del document["predicted"][name]
    for region in document["regions"]:
        for name in of_region:
            del region[name]
    assert from_dict(document) == replace(plan, course=None if version == 6 else plan.course)


def test_a_damaged_file_of_version_5_is_refused():
    document = json.loads(VERSION_5.read_text())
    for key, value in (("regions", None), ("regions", [3]), ("regions", [{"early": []}]),
                       ("regions", [{"recomputations": [1, {"ops": 2}]}]), ("fingerprint", "")):
        with pytest.raises(planner.PlanFileError, match="is no plan"):
            from_dict({**document, key: value})
    document["regions"][0]["recomputations"][0]["ops"][0] = "net.other/aten.linear#0"
    with pytest.raises(planner.PlanFileError, match=r"net\.other"):
        from_dict(document)


def test_the_moment_before_which_ops_may_run_again_is_known_by_name():
    from graph_capture.joint_graph.lower import epilogue_name
    from planner.plans.file import EPILOGUE

    assert all(epilogue_name(region).endswith(EPILOGUE) for region in range(3))
