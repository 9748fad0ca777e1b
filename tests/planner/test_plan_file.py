"""Plan files: canonical, readable by the published schema, and refused where they are no plan."""

import copy
import json
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner._graph_capture.training_graph import OptimizerMemory
from planner.plans.document import SCHEMA_VERSION
from planner.plans.file import dumps, from_dict, loads
from planner.plans.writing import fingerprint
from planner.search.planning import Effort, plan_within
from tests.support.altered_plans import places, signed
from tests.support.graphs import HandMadeStep, chain, prepared, steps
from tests.support.plan_schema import schema

SCHEMA = json.loads(files("planner").joinpath("plan.schema.json").read_text(encoding="utf-8"))

MAKE_AND_PRINT = """
from planner.plans.file import dumps
from tests.support.plan_schema import schema
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


@pytest.mark.slow
def test_equal_plans_give_equal_files_in_every_process(tmp_path):
    texts = set()
    for seed in ("0", "4242"):
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


def test_saving_follows_a_link_and_keeps_the_mode(saved, tmp_path):
    saved.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(saved.name)
    make_plan(2200).save(link)
    assert link.is_symlink() and planner.load(saved).budget_bytes == 2200
    assert saved.stat().st_mode & 0o777 == 0o640
    (tmp_path / "dangling.json").symlink_to("made.json")
    make_plan().save(tmp_path / "dangling.json")
    assert planner.load(tmp_path / "made.json") == make_plan()


def test_saving_writes_to_a_pipe_or_a_device(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        make_plan().save(pipe)
        assert read.result(timeout=30) == dumps(make_plan())
    assert pipe.is_fifo()
    make_plan().save(os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_saving_writes_to_a_pipe_that_has_no_path(tmp_path):
    reading, writing = os.pipe()
    with ThreadPoolExecutor() as pool, os.fdopen(reading) as stream:
        read = pool.submit(stream.read)
        make_plan().save(f"/proc/self/fd/{writing}")
        os.close(writing)
        assert read.result(timeout=30) == dumps(make_plan())


def test_a_circle_of_links_or_a_folder_is_no_destination(tmp_path):
    (tmp_path / "one.json").symlink_to("two.json")
    (tmp_path / "two.json").symlink_to("one.json")
    with pytest.raises(OSError, match="one"):
        make_plan().save(tmp_path / "one.json")
    with pytest.raises(IsADirectoryError, match="new/"):
        make_plan().save(f"{tmp_path}/new/")
    assert (tmp_path / "one.json").is_symlink() and not (tmp_path / "new").exists()


def test_drafts_of_writers_that_were_killed_are_removed(saved, monkeypatch):
    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        patch.setattr(type(saved), "unlink", lambda *_, **__: None)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                make_plan(2200).save(saved)
    old, recent = (saved.with_name(name) for name in os.listdir(saved.parent)
                   if name.endswith(".tmp"))
    other = saved.with_name(".other.tmp")
    other.write_text("")
    for left in (old, other):
        os.utime(left, (0, 0))
    make_plan(2200).save(saved)
    assert {*os.listdir(saved.parent)} == {"plan.json", recent.name, other.name}


@pytest.mark.parametrize("name", ["p" * 250 + ".json", "\u00e4" * 125 + ".json"])
def test_saving_works_with_the_longest_names(tmp_path, name):
    assert len(os.fsencode(name)) == 255
    for _ in range(2):
        make_plan().save(tmp_path / name)
    assert os.listdir(tmp_path) == [name] and planner.load(tmp_path / name) == make_plan()


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


@pytest.mark.parametrize("version", [0, 2, 5, 8, 99])
def test_another_schema_version_is_refused(version):
    document = {**make_plan().to_dict(), "schema_version": version}
    with pytest.raises(planner.PlanFileError,
                       match=f"schema_version {version}, .*expected {SCHEMA_VERSION}: plan again"):
        from_dict(document)


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
    for field, value in (
        ("budget_bytes", 1901),
        ("low_memory_codegen", True),
        ("notes", ["other"]),
    ):
        with pytest.raises(planner.PlanFileError, match="fingerprint"):
            from_dict({**document, field: value})

    def refused(change, match):
        changed = copy.deepcopy(document)
        change(changed, changed["regions"][0])
        changed["fingerprint"] = fingerprint(changed)
        with pytest.raises(planner.PlanFileError, match=match):
            from_dict(changed)

    region = document["regions"][0]
    row = next(n for n, row in enumerate(region["decisions"]) if row["action"] == "recompute")
    group = region["insertions"][0]
    refused(lambda _, region: region["insertions"][0].update(
        actions=[{"kind": "run", "op": "net.other/aten.linear#0"}]), r"net\.other")
    refused(lambda _, region: region["decisions"][row].update(action="keep"), "'keep'")
    refused(lambda _, region: region["insertions"].reverse(), "insertions: the schedule gives")
    refused(lambda _, region: region["insertions"][0].update(before="loss/backward#0"),
            "segment that must not recompute it")
    refused(lambda _, region: region["insertions"].append(group), "insertions: the schedule gives")
    refused(lambda _, region: region["inplace_reuses"].append(
        {"op": group["before"], "run": 0, "candidate": 0}), "inplace_reuses: the schedule gives")
    refused(lambda whole, _: whole["predicted"].update(
        peak_bytes=whole["predicted"]["peak_bytes"] - 1), "peak_bytes: the simulator finds")
    refused(lambda whole, _: whole["resident"].update(inputs_bytes=0), "resident_bytes")
    refused(lambda whole, _: whole.update(budget_bytes=10), "more than the budget")
    refused(lambda whole, _: whole["buffers"][0].update(size_bytes=1000), "the plan says")
    refused(lambda whole, _: whole["ops"][3].update(inputs=[400]), "names buffer 400")
    refused(lambda whole, _: whole["ops"][3].update(region=4), "is of region 4")
    refused(lambda whole, _: whole["ops"][3].update(name=whole["ops"][2]["name"]), "two ops")
    refused(lambda whole, _: whole.update(chunks=10 ** 9), "chunks")
    refused(lambda whole, _: whole["memory_timeline"]["gradients"].pop(), "different lengths")


def test_a_plan_that_was_changed_in_a_program_is_not_applied():
    plan = make_plan()
    model = torch.nn.Linear(3, 2)
    for changed in (replace(plan, peak_bytes=plan.peak_bytes - 1),
                    replace(plan, spec=replace(plan.spec, ops=())),
                    replace(plan, spec=replace(plan.spec, regions=tuple(
                        replace(region, insertions=()) for region in plan.spec.regions)))):
        for use in (changed.apply, lambda model, plan=changed: planner.within(model, plan=plan)):
            with pytest.raises(planner.PlanMismatch, match="not a plan as it was made"):
                use(model)


@pytest.mark.parametrize("text", ["\ud800", "\x1b[31mred", "\x9b2J", "\x00", "[/b]", "a[/]b"])
@pytest.mark.parametrize("path", [
    ("notes", 0), ("device",), ("solver", "name"), ("regions", 0, "block"), ("ops", 0, "module"),
    ("inputs", "args", 0, "dtype"), ("created_with", "torch"), ("tensors", 0, "name")])
def test_a_text_that_cannot_be_printed_is_refused(path, text):
    document = {**make_plan().to_dict(), "notes": ["a note"]}
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = text
    with pytest.raises(planner.PlanFileError, match="is no plan: expected text without") as caught:
        from_dict({**document, "fingerprint": fingerprint(document)})
    assert str(caught.value).isprintable()


def test_a_name_of_a_field_that_cannot_be_printed_is_refused():
    document = make_plan().to_dict()
    for key in ("\ud800", "[/b]"):
        with pytest.raises(planner.PlanFileError, match="is no plan: expected text without"):
            from_dict({**document, "inputs": {key: 1}})


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "1" + "0" * 4000, "1" + "0" * 5000,
                                    "9223372036854775808"])
@pytest.mark.parametrize("field", ["budget_bytes", "overhead_bound", "training", "inputs"])
def test_a_number_that_is_none_of_64_bits_is_refused(field, number):
    text, count = re.subn(rf'"{field}": [^,\n]+', f'"{field}": {number}', dumps(make_plan()),
                          count=1)
    assert count == 1
    with pytest.raises(planner.PlanFileError, match="is no plan"):
        loads(text)


@pytest.mark.parametrize("depth", [65, 900, 5000])
@pytest.mark.parametrize("field", ["inputs", "overrides", "notes"])
def test_a_deep_nesting_is_refused(field, depth):
    text = json.dumps({**make_plan().to_dict(), field: "HERE"}).replace(
        '"HERE"', "[" * depth + "]" * depth)
    with pytest.raises(planner.PlanFileError, match="is no plan"):
        loads(text)


def test_a_field_that_stands_twice_is_refused():
    text = dumps(make_plan())
    with pytest.raises(planner.PlanFileError, match="twice"):
        loads(text.replace('"device": "cpu"', '"device": "cpu", "device": "cpu"', 1))


def test_a_plan_is_printed_as_its_texts_are():
    """Text in brackets is no markup."""
    document = make_plan().to_dict()
    document["notes"] = ["see [bold]that[green]"]
    for row in (*document["ops"], *document["regions"][0]["decisions"]):
        row["module"] = "net.[red]" if row["module"] else ""
    printed = str(from_dict(signed(document)))
    assert "[red]" in printed and "[bold]that[green]" in printed


def test_files_diff_well():
    """One op, tensor or group per line, and no line that differs where nothing does."""
    lines = dumps(make_plan(1900)).splitlines()
    assert sum('"action"' in line for line in lines) == 12
    assert sum('"digest"' in line for line in lines) == 37
    assert len(lines) < 215


def test_the_published_schema_is_itself_valid_and_that_of_the_types():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert schema() == SCHEMA, "python -m tests.support.plan_schema > planner/plan.schema.json"


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
    (("predicted", "overhead"), float("-inf"), "expected a finite number as predicted.overhead"),
    (("predicted", "overhead"), -1.0, "expected a number > -1 as predicted.overhead"),
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
