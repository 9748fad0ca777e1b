"""Plans as JSON: canonical, so that equal plans give equal bytes and files diff well.

The layout is that of `plan.schema.json`, which is published with the package.  Objects have a fixed
order of keys; lists of ops hold one op per line.  Nothing in a file depends on when, where or how
fast it was made: no timestamps, no host, no duration of the solver.

A file is written beside its destination and moved into place: readers see the old plan or the new
one.  Reading checks every field and the fingerprint, so that a file cut short or edited by hand is
refused with the field's path, what was expected and what came.

Blind spot: the fingerprint guards the ops and tensors that the plan was made for, not the numbers
that were predicted.
"""

from __future__ import annotations

import hashlib
import json
from os import PathLike
from pathlib import Path
from typing import Any

from apply.recipe import InplaceReuse, OpKey, ParameterKey, Recipe, Recomputation, RegionRecipe
from graph_capture.training_graph import CodeMemory, Outline
from planner.errors import PlanFileError
from planner.plans.decisions import Decision
from planner.plans.plan import Plan
from planner.plans.reader import Reader
from planner.step.accounting import CATEGORIES, MemoryByCategory, OptimizerMemory
from planner.whole_file import write_whole

SCHEMA_VERSION = 5
"""Layout that this version writes and reads."""

EPILOGUE = "/update of mutated inputs#0"
"""End of the name of the one moment that is no op and before which ops may run again; see
`graph_capture.joint_graph.lower.epilogue_name`, which cannot be asked here without importing
torch."""


def save(plan: Plan, path: str | PathLike[str]) -> None:
    """Write `plan` to `path`, all of it or nothing; an existing file is replaced.

    Raises `OSError` where the path cannot be written.
    """
    write_whole(path, dumps(plan).encode())


def load(path: str | PathLike[str]) -> Plan:
    """The plan in the file `path`.

    Raises `PlanFileError` for a file that holds no plan, or one of another schema version, and
    `OSError` for a file that cannot be read.
    """
    source = Path(path)
    try:
        return loads(source.read_text(encoding="utf-8"), name=str(source))
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{source} is no plan: expected JSON in UTF-8, got other bytes at "
                            f"position {error.start}; plan again and save to a new file") from None


def dumps(plan: Plan) -> str:
    """The text of the plan's file."""
    return _pretty(to_dict(plan)) + "\n"


def loads(text: str, *, name: str = "the text") -> Plan:
    """The plan whose file holds `text`; `name` stands for the file in errors."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{name} is no plan: expected JSON, got text that is none or is cut "
                            f"short ({error}); plan again and save to a new file") from None
    return from_dict(document, name=name)


def to_dict(plan: Plan) -> dict[str, Any]:
    """What the file holds, as JSON values in the file's order."""
    decisions = iter(plan.decisions)
    optimizer = plan.optimizer
    return {
        "schema_version": SCHEMA_VERSION,
        "created_with": dict(plan.created_with),
        "fingerprint": fingerprint(plan.recipe),
        "device": plan.device,
        "backend": plan.backend,
        "cost_model": plan.cost_model,
        "training": plan.recipe.training,
        "inputs": plan.inputs,
        "overrides": dict(plan.recipe.overrides),
        "lean_backward": plan.recipe.low_peak,
        "strict_order": plan.recipe.strict_order,
        "optimizer": None if optimizer is None else {
            "name": optimizer.name,
            "state_bytes": optimizer.state_bytes,
            "step_peak_bytes": optimizer.step_peak_bytes,
        },
        "budget_bytes": plan.budget_bytes,
        "solver": {
            "name": plan.solver,
            "status": plan.status,
            "overhead_bound": plan.overhead_bound,
        },
        "predicted": {
            "peak_bytes": plan.peak_bytes,
            "baseline_peak_bytes": plan.baseline_peak_bytes,
            "resident_bytes": plan.resident_bytes,
            "forward_backward_peak_bytes": plan.forward_backward_peak_bytes,
            "optimizer_step_peak_bytes": plan.optimizer_step_peak_bytes,
            "memory": dict(plan.memory),
            "overhead": plan.overhead,
            "recompute_flops": plan.recompute_flops,
            "step_flops": plan.step_flops,
        },
        "notes": list(plan.notes),
        "tensors": [
            {"name": key.name, "shape": list(key.shape), "dtype": key.dtype,
             "requires_grad": key.requires_grad}
            for key in plan.recipe.tensors],
        "regions": [
            {
                "block": region.block,
                "cotangents": list(region.cotangents),
                "decisions": [_decision_to_dict(key, next(decisions)) for key in region.forward],
                "backward": [_op_to_dict(key) for key in region.backward],
                "recomputations": [{"before": group.before, "ops": list(group.ops)}
                                   for group in region.recomputations],
                "takeovers": [{"op": reuse.op, "run": reuse.run, "candidate": reuse.candidate}
                              for reuse in region.inplace_reuses],
                "outline": _outline_to_dict(region.outline),
                "early": list(region.hoisted),
                "code": [{"peak_bytes": code.peak_bytes, "left_bytes": code.left_bytes}
                         for code in region.code],
            }
            for region in plan.recipe.regions],
    }


def from_dict(document: object, *, name: str = "the document") -> Plan:
    """The inverse of `to_dict`; raises `PlanFileError` where the document is no plan."""
    root = Reader(document, name)
    version = root.integer("schema_version")
    if version != SCHEMA_VERSION:
        raise PlanFileError(f"{name} has schema_version {version}, expected {SCHEMA_VERSION}: "
                            "plan again with this version of checkpoint-planner, or read the file "
                            "with the version that wrote it")
    solver, predicted = root.object("solver"), root.object("predicted")
    memory = predicted.object("memory")
    optimizer = root.optional_object("optimizer")
    decisions: list[Decision] = []
    regions = tuple(_region(region, decisions) for region in root.objects("regions"))
    recipe = Recipe(
        tensors=tuple(
            ParameterKey(name=row.text("name"), shape=row.integers("shape"),
                         dtype=row.text("dtype"), requires_grad=row.boolean("requires_grad"))
            for row in root.objects("tensors")),
        regions=regions,
        training=root.boolean("training"),
        overrides=tuple(root.mapping("overrides").items()),
        backend=root.text("backend"),
        low_peak=root.boolean("lean_backward"),
        strict_order=root.boolean("strict_order"),
    )
    plan = Plan(
        budget_bytes=root.optional_integer("budget_bytes"),
        peak_bytes=predicted.integer("peak_bytes"),
        baseline_peak_bytes=predicted.integer("baseline_peak_bytes"),
        resident_bytes=predicted.integer("resident_bytes"),
        memory=MemoryByCategory(**{category: memory.integer(category) for category in CATEGORIES}),
        forward_backward_peak_bytes=predicted.integer("forward_backward_peak_bytes"),
        optimizer_step_peak_bytes=predicted.integer("optimizer_step_peak_bytes"),
        recompute_flops=predicted.integer("recompute_flops"),
        step_flops=predicted.integer("step_flops"),
        overhead=predicted.change("overhead"),
        overhead_bound=solver.change("overhead_bound"),
        status=solver.choice("status", ("optimal", "feasible")),
        solver=solver.text("name"),
        optimizer=None if optimizer is None else OptimizerMemory(
            name=optimizer.text("name"), state_bytes=optimizer.integer("state_bytes"),
            step_peak_bytes=optimizer.integer("step_peak_bytes")),
        device=root.text("device"),
        backend=root.text("backend"),
        cost_model=root.text("cost_model"),
        decisions=tuple(decisions),
        recipe=recipe,
        inputs=root.value("inputs"),
        notes=root.texts("notes"),
        created_with=tuple(
            (package, root.object("created_with").text(package))
            for package in root.mapping("created_with")),
    )
    _check_consistency(plan, root.text("fingerprint"), name)
    return plan


def fingerprint(recipe: Recipe) -> str:
    """Hash of the graph that a recipe was made for, the same in every process.

    Covers names and digests of all ops, the cotangents, the sizes served, every parameter and
    buffer, and the mode; not what is recomputed.
    """
    graph = [
        [[key.name, list(key.shape), key.dtype, key.requires_grad] for key in recipe.tensors],
        [[region.block, list(region.cotangents), [[key.name, key.digest] for key in region.forward],
          [[key.name, key.digest] for key in region.backward], _outline_to_dict(region.outline),
          list(region.hoisted)]
         for region in recipe.regions],
        recipe.training,
        [list(override) for override in recipe.overrides],
    ]
    text = json.dumps(graph, ensure_ascii=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _decision_to_dict(key: OpKey, decision: Decision) -> dict[str, Any]:
    return {**_op_to_dict(key), "module": decision.module, "action": decision.action,
            "recomputations": decision.recomputations, "flops": decision.flops,
            "saved_bytes": decision.saved_bytes, "plain_saved_bytes": decision.plain_saved_bytes}


def _op_to_dict(key: OpKey) -> dict[str, Any]:
    return {"op": key.name, "result": key.result, "digest": key.digest}


def _outline_to_dict(outline: Outline | None) -> dict[str, Any] | None:
    return None if outline is None else {
        "structure": outline.structure, "input_layout": outline.input_layout,
        "input_bytes": list(outline.input_bytes), "storage_bytes": list(outline.storage_bytes)}


def _op(row: Reader) -> OpKey:
    return OpKey(name=row.text("op"), digest=row.text("digest"), result=row.text("result"))


def _region(region: Reader, decisions: list[Decision]) -> RegionRecipe:
    """One region of the recipe; what it does with its forward ops goes to `decisions`."""
    forward = []
    for row in region.objects("decisions"):
        forward.append(_op(row))
        decisions.append(Decision(
            op=row.text("op"), module=row.text("module"),
            action=row.choice("action", ("keep", "recompute")),
            recomputations=row.integer("recomputations"), flops=row.integer("flops"),
            saved_bytes=row.integer("saved_bytes"),
            plain_saved_bytes=row.integer("plain_saved_bytes")))
    outline = region.optional_object("outline")
    return RegionRecipe(
        forward=tuple(forward),
        backward=tuple(_op(row) for row in region.objects("backward")),
        cotangents=region.booleans("cotangents"),
        recomputations=tuple(Recomputation(before=row.text("before"), ops=row.texts("ops"))
                             for row in region.objects("recomputations")),
        inplace_reuses=tuple(InplaceReuse(op=row.text("op"), run=row.integer("run"),
                                 candidate=row.integer("candidate"))
                        for row in region.objects("takeovers")),
        outline=None if outline is None else Outline(
            structure=outline.text("structure"),
            storage_bytes=outline.integers("storage_bytes"),
            input_bytes=outline.integers("input_bytes"),
            input_layout=outline.text("input_layout")),
        block=region.text("block"),
        hoisted=region.integers("early"),
        code=tuple(CodeMemory(row.integer("peak_bytes"), row.integer("left_bytes"))
                   for row in region.objects("code")),
    )


def _check_consistency(plan: Plan, claimed_fingerprint: str, name: str) -> None:
    """Raise `PlanFileError` where fields are well formed but contradict each other."""
    expected = fingerprint(plan.recipe)
    if claimed_fingerprint != expected:
        raise PlanFileError(f"{name}: the fingerprint does not match the ops and tensors listed: "
                            f"expected {expected}, got {claimed_fingerprint}; the file was "
                            "changed after it was saved, plan again")
    again: dict[str, int] = {}
    for region in plan.recipe.regions:
        here = {key.name for key in region.forward}
        known = here | {key.name for key in region.backward}
        for group in region.recomputations:
            unknown = [op for op in group.ops if op not in here]
            if group.before not in known and not group.before.endswith(EPILOGUE):
                unknown.append(group.before)
            if unknown:
                raise PlanFileError(f"{name}: a recomputation names {unknown[0]!r}, which is no "
                                    "op of its region; the file was changed, plan again")
            for op in group.ops:
                again[op] = again.get(op, 0) + 1
    for decision in plan.decisions:
        count = again.get(decision.op, 0)
        if decision.recomputations != count or (decision.action == "recompute") != (count > 0):
            raise PlanFileError(f"{name}: op {decision.op!r} is recomputed {count} times by the "
                                f"list of recomputations, but its decision says "
                                f"{decision.action!r}, {decision.recomputations} times; the file "
                                "was changed, plan again")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with one scalar, one small object or one short list per line."""
    inner = indent + "  "
    if isinstance(value, dict) and value and not _is_row(value):
        fields = (f"{inner}{_compact(key)}: {_pretty(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list, str)) for item in value):
        return "[\n" + ",\n".join(f"{inner}{_pretty(item, inner)}" for item in value) + (
            f"\n{indent}]")
    return _compact(value)


def _is_row(value: dict[str, Any]) -> bool:
    """Whether an object belongs on one line: an op, a tensor or a group of recomputations."""
    return "op" in value or "before" in value or "shape" in value


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
