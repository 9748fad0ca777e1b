"""Plan files with one value changed, by accident or by an adversary.

`Altering` changes one place of a document; `signed` states a matching fingerprint, and decisions
that match the insertions; `forged` states everything else that follows from a changed step or
schedule, so that only a look at the model's own graph reveals the change.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.errors import PlanFileError, PlannerError
from planner.plans.checking import stated_variant
from planner.plans.decisions import build_regions, decide, schedule_of
from planner.plans.document import Document
from planner.plans.file import _plan_of, fingerprint, read
from planner.plans.plan import Plan
from planner.solvers.simulator import unroll
from planner.step.breakdown import breakdown, memory_over
from planner.step.categories import StepTimeline

Place = tuple[str | int, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield every place in a document."""
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else ())
    for key, item in items:
        yield from places(item, (*place, key))


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # several times quicker than `copy.deepcopy`


def at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


class Altering:
    """Makes copies of a document with one place changed."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._kinds: dict[tuple[object, ...], list[Place]] = {}
        """Places by the fields above them, so that long lists do not crowd out others."""
        self._texts: dict[object, set[str]] = {}
        """Texts by their field."""
        for place in places(document):
            self._kinds.setdefault(
                tuple(key for key in place if isinstance(key, str)), []).append(place)
            if isinstance(text := at(document, place), str):
                self._texts.setdefault(place[-1], set()).add(text)

    def altered(self, dice: random.Random, within: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return a copy with one place changed, by default anywhere; `within`: fields of which it
        is one."""
        kinds = [kind for kind in self._kinds if not within or kind[0] in within]
        while True:
            place = dice.choice(self._kinds[dice.choice(kinds)])
            changed = copied(self.document)
            if (_change(at(changed, place[:-1]), place[-1], dice, self._alike(place))
                    and changed != self.document):
                return changed

    def _alike(self, place: Place) -> list[str]:
        """Return other texts that a text could be confused with."""
        old = at(self.document, place)
        if not isinstance(old, str):
            return []
        names = [op["name"] for op in self.document["ops"]]
        return names if old in names else sorted(self._texts[place[-1]])


def _change(holder: Any, key: Any, dice: random.Random, alike: list[str]) -> bool:
    old = holder[key]
    if isinstance(holder, list) and dice.random() < 0.4:
        how = dice.choice(("drop", "repeat", "swap"))
        if how == "drop":
            del holder[key]
        elif how == "repeat":
            holder.insert(key, copied(old))
        else:
            other = dice.randrange(len(holder))
            holder[key], holder[other] = holder[other], holder[key]
        return True
    match old:
        case bool():
            holder[key] = not old
        case int():
            holder[key] = dice.choice((old + 1, max(0, old - 1), 2 * old, 0))
        case float():
            holder[key] = dice.choice((old / 2, old + 1.0, 0.0))
        case str():
            holder[key] = dice.choice([each for each in alike if each != old] or [old + "x"])
        case list() if old:
            del old[dice.randrange(len(old))]
        case _:
            return False
    return True


def signed(document: dict[str, Any]) -> dict[str, Any]:
    """Return a copy whose decisions and fingerprint match the rest."""
    changed = copied(document)
    for region in changed["regions"]:
        again = Counter(action["op"] for group in region["insertions"]
                        for action in group["actions"] if action.get("kind") == "run")
        away = {action["op"] for group in region["insertions"] for action in group["actions"]
                if action.get("kind") == "store"}
        for row in region["decisions"]:
            row["recomputations"] = again[row["op"]]
            row["action"] = ("recompute" if again[row["op"]] else
                             "offload" if row["op"] in away else "keep")
    changed["fingerprint"] = fingerprint(changed)
    return changed


def forged(original: dict[str, Any], document: dict[str, Any]) -> Plan | None:
    """Return the plan of a changed document with all derived values derived again, and a budget
    that is just met.  Returns `None` if its schedule does not fit its step, or if the change is to
    memory outside of the regions, which is trusted."""
    ops = original["ops"]
    if any(old != new and old["region"] is None
           for old, new in zip(ops, document["ops"], strict=False)) or any(
               old != new and ops[old["producer"]]["region"] is None for old, new in zip(
                   original["buffers"], document["buffers"], strict=False)):
        return None
    try:
        plan = _plan_of(read(document, Document, "forged"))
        variant = stated_variant(plan)
        timeline = unroll(variant.problem, schedule_of(variant, plan.spec))
        regions = build_regions(variant.graph, timeline)
    except (PlanFileError, PlannerError, ValueError, AssertionError):
        return None
    is_eager = plan.backend == "eager"
    plan = replace(
        plan, decisions=decide(variant, timeline.schedule),
        offloaded_bytes=variant.offloaded_bytes(timeline.schedule),
        transfer_seconds=variant.transfer_seconds(timeline.schedule),
        step_flops=variant.graph.step_flops, spec=replace(plan.spec, regions=tuple(
            replace(found, code=stated.code,
                    inplace_reuses=found.inplace_reuses if is_eager else ())
            for found, stated in zip(regions, plan.spec.regions, strict=True))))
    plan = replace(plan, recompute_flops=sum(row.flops * row.recomputations
                                             for row in plan.decisions))
    if not is_eager:
        return plan
    taken, overhead = breakdown(variant, timeline), variant.overhead(timeline.schedule)
    return replace(
        plan,
        memory=taken.memory,
        peak_bytes=taken.peak_bytes,
        budget_bytes=taken.peak_bytes,
        resident_bytes=variant.budget.resident_bytes,
        optimizer_step_peak_bytes=variant.budget.optimizer_step_bytes,
        forward_backward_peak_bytes=taken.forward_backward_peak_bytes,
        overhead=overhead,
        overhead_bound=min(overhead, plan.overhead_bound),
        memory_timeline=StepTimeline.of(
            memory_over(variant.graph, timeline),
            plan.memory_timeline.backward_begins,
            variant.budget.resident,
            plan.memory_timeline.plain,
        ),
    )
