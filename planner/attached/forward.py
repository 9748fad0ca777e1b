"""The forward of a model that is trained within a budget: it plans what it meets.

The model of the world: a call with gradients is the forward of a training step.  Its circumstances
(`apply.circumstances`) tell which plans may serve it, the plan's own digests which one does; a
step that none serves is captured as it is called, planned, and run under its plan, the first one
too.  What is not known then - optimizer, earlier gradients, the caller's loss - is seen while steps
run, and the plan is made again with it before the next step; see `planner.attached.known`.

A copy of the model has a forward of its own with the same settings, which plans for itself.

Blind spots: two calls before one backward are each taken for a step; an optimizer that is none of
torch's is counted as none, which the log says.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from weakref import finalize, ref

import torch
from torch import nn
from torch.optim import Optimizer

from apply.blocks import code_of, run_step
from apply.circumstances import Call, differences
from apply.errors import PlanMismatch
from apply.planned_forward import CountingForward, can_be_pickled
from graph_capture.module_forward import Forward, in_place_of_forward
from graph_capture.plain_step.loss import Until
from graph_capture.plain_step.seen_loss import LossWatch, SeenLoss, UnmeasuredLoss, watch_output
from graph_capture.torch_compat import pytree, running_node_number
from planner.arguments.budget import Budget
from planner.arguments.planning import Planning
from planner.attached.known import GraphPlanner, Known
from planner.attached.optimizers import observe
from planner.captured_graph import with_least_memory
from planner.plans.plan import Plan
from planner.progress import Watch, watched
from planner.reporters.one_line import summarize
from planner.step.wrapped import defers_reduction, other_ranks

log = logging.getLogger("planner")

OnNew = Literal["replan", "refuse"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for."""

    planning: Planning
    """Its `regions` are `None` for what suits the wrappers of the model."""
    limit: Budget | None
    on_new: OnNew = "replan"
    given: Plan | None = None
    """A saved plan."""
    batches_ahead: int = 0
    """How many batches the caller holds beside the one in use."""


class PlannedGraph:
    """One graph of the model, and the plan that it runs under now."""

    def __init__(self, module: nn.Module, plan: Plan,
                 call: Call | None = None,
                 planner: GraphPlanner | None = None) -> None:
        """`call`, `planner`: what it was captured from; `None`: the plan was given."""
        self.call, self.planner = call, planner
        self.known: Known | None = None
        """What the plan counts; `None`: it is for the first step alone, or was given."""
        self.loss: SeenLoss | None = None
        """The loss that the caller made of this graph's output."""
        self.unmeasured: UnmeasuredLoss | None = None
        """It, seen and not yet measured."""
        self.lives: tuple[Until, ...] | None = None
        """How long each tensor of the output is there."""
        self.adopt(module, plan)

    def adopt(self, module: nn.Module, plan: Plan) -> None:
        """Run under this plan from here on."""
        earlier = getattr(self, "code", None)
        self.plan = plan
        self.code = code_of(module, plan.recipe)
        self.code.fall_back(with_least_memory)
        if earlier is not None:
            self.code.compare_with(earlier)

    @property
    def is_steered(self) -> bool:
        """Whether values of tensors decide what the step is, so that any call may need another
        graph."""
        return self.planner is not None and self.planner.is_steered

    def may_serve(self, call: Call) -> bool:
        """Whether the plan may be for this call; its digests decide."""
        return self.call is None or call.may_be_served_as(self.call)


class PlanningForward(CountingForward):
    """Stands in for the forward of a model."""

    def __init__(self, module: nn.Module, inner: Forward | None, settings: Settings) -> None:
        super().__init__(module, inner)
        self.settings = settings
        self._begin()

    def _begin(self) -> None:
        """Nothing is known, nothing planned."""
        self._name = type(self.__self__).__name__
        given = self.settings.given
        self.graphs = [] if given is None else [PlannedGraph(self.__self__, given)]
        """In the order in which they were met."""
        self.running: PlannedGraph | None = None
        """The graph of the last step."""
        self._served: dict[Call, PlannedGraph] = {}
        self._watch: LossWatch | None = None
        self._optimizers: list[ref[Optimizer]] = []
        self._accumulates = self.settings.planning.accumulation > 1
        self._defers_reduction = self._backward_seen = False
        observe(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"__self__", "inner", "settings", "steps"}
        return {name: value for name, value in super().__getstate__().items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.__getstate__()
        planning = self.settings.planning
        lost: dict[str, Any] = {name: None for name in ("loss_fn", "optimizer")
                                if isinstance(value := getattr(planning, name), Optimizer)
                                or not can_be_pickled(value)}  # a copied one steps nothing
        for name in lost:
            warnings.warn(f"the {name} that planner.within was given cannot be pickled: the loaded "
                          "model plans without it", stacklevel=2)
        planning = replace(planning, **lost)
        state["settings"] = replace(self.settings, planning=planning)
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = super().__deepcopy__(memo)
        assert isinstance(new, PlanningForward)
        new._begin()
        return new

    def change(self, settings: Settings) -> None:
        """Begin anew with other settings."""
        self._end_watch()
        self.settings = settings
        self._begin()

    @property
    def plan(self) -> Plan | None:
        """The plan that the last step ran under."""
        return None if self.running is None else self.running.plan

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, in a training step under a plan."""
        self._end_watch()
        args = self.without_self(args)
        if self.is_foreign() or not torch.is_grad_enabled() or not _needs_gradient(
                self.__self__, args, kwargs):
            return self.plain(*args, **kwargs)
        call = self.call_of(args, kwargs)
        has_gradients = any(p.grad is not None for p in self.__self__.parameters())
        self._defers_reduction |= defers_reduction(self.__self__)
        self._accumulates |= has_gradients or self._defers_reduction
        graph, output = self._step(call, has_gradients, args, kwargs)
        self._served[call] = self.running = graph
        self.steps.count(graph.code.why_unplanned())
        self._observe(graph, output)
        return output

    def _step(self, call: Call, has_gradients: bool, args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> tuple[PlannedGraph, Any]:
        """Run the step under a plan that serves it; returns that graph, and the output."""
        refusal = ""
        known = self._served.get(call)
        for graph in sorted(self.graphs, key=lambda graph: graph is not known):
            if not graph.may_serve(call):
                continue
            refusal = "" if graph.planner else other_ranks(graph.plan.parallel, self.__self__)
            if refusal:
                continue
            self._bring_up_to_date(graph, call, has_gradients, args, kwargs)
            # What does not fit may show when a part has run; then another is tried from the start.
            is_trial = graph.is_steered or (graph is not known and bool(graph.plan.recipe.blocks))
            try:
                return graph, self._run(graph, args, kwargs, is_trial=is_trial)
            except PlanMismatch as error:
                if graph.code.has_begun and not is_trial:
                    raise
                refusal = str(self.explained(graph.plan.recipe, error, call))
            gc.collect()  # the error's frames hold what has run
        if self.graphs and self.settings.on_new == "refuse":
            raise self._refusal(call, refusal)
        if refusal and any(graph.planner is None for graph in self.graphs):
            log.warning("%s: the plan that was given does not fit this step, which is planned "
                        "anew: %s", self._name, refusal)
        graph = self._new_graph(call, has_gradients, args, kwargs)
        return graph, self._run(graph, args, kwargs)

    def _run(self, graph: PlannedGraph, args: tuple[Any, ...], kwargs: dict[str, Any], *,
             is_trial: bool = False) -> Any:
        before = graph.code.compilations
        try:
            return run_step(graph.code, graph.plan.recipe, self.__self__, self.inner, args, kwargs,
                            is_trial=is_trial)
        finally:
            if graph.code.compilations != before:
                gc.collect()  # as after planning

    def _refusal(self, call: Call, refusal: str) -> PlanMismatch:
        words = differences(self.graphs[0].plan.recipe, self.__self__, call.circumstances)
        reason = "; ".join(words) or refusal or "the model's code takes another path"
        return PlanMismatch(
            f'no plan serves this step of {self._name}, and on_new="refuse" allows no other: '
            f'{reason}. Begin with the largest step, or use on_new="replan"')

    def _new_graph(self, call: Call, has_gradients: bool, args: tuple[Any, ...],
                   kwargs: dict[str, Any]) -> PlannedGraph:
        """Capture and plan a step that no plan serves."""
        settings, module = self.settings, self.__self__
        with self._planning() as watch:
            planner = GraphPlanner(module, args, kwargs, settings.planning, settings.limit,
                                   settings.batches_ahead, partial(_alive, self._optimizers))
            known = self._known(planner, None, has_gradients, self._expected_output(planner))
            if known is not None:
                plan = planner.plan(known)
            else:
                plan = planner.provisional_plan(Known(
                    self._stepping, self._accumulates, self._expected_loss(planner),
                    defers_reduction=self._defers_reduction))
            watch.conclude(f": {summarize(plan)}")
        graph = PlannedGraph(module, plan, call, planner)
        graph.known = known
        self._say(graph, "" if known is not None else
                  "; for the first step, while its optimizer or loss is not known")
        self.graphs.insert(0, graph)
        return graph

    def _bring_up_to_date(self, graph: PlannedGraph, call: Call, has_gradients: bool,
                          args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan a graph again where more is known than its plan counts."""
        # What a checkpoint calls again must save what the first call did.
        if graph.planner is None or running_node_number() is not None:
            return
        if graph.unmeasured is not None:
            graph.loss, graph.unmeasured = graph.planner.measured(graph.unmeasured), None
        known = self._known(graph.planner, graph.loss, has_gradients, graph.lives)
        if known is None or known == graph.known:
            return
        with self._planning() as watch:
            if graph.planner.needs_capture_for(known):
                if call != graph.call:
                    return
                graph.planner.capture_again(self.__self__, args, kwargs, known)
            graph.adopt(self.__self__, graph.planner.plan(known))
            watch.conclude(f": {summarize(graph.plan)}")
        graph.known = known
        self._say(graph, self._words(known))

    @property
    def _stepping(self) -> tuple[ref[Optimizer], ...] | None:
        """The optimizers that have stepped; `None`: not known, or the user said."""
        if self.settings.planning.optimizer is not None:
            return None
        alive = tuple(each for each in self._optimizers if each() is not None)
        return alive or None

    def _known(self, planner: GraphPlanner, loss: SeenLoss | None, has_gradients: bool,
               lives: tuple[Until, ...] | None) -> Known | None:
        """What there is to know of a step; `None` as long as a part of it is not known."""
        if planner.loss_is_outside and loss is None:
            return None
        optimizers = self._stepping
        if optimizers is None and self.settings.planning.optimizer is None:
            if has_gradients or not self._backward_seen:
                return None
            optimizers = ()  # gradients were made and are gone: what took them is none of torch's
        lets_go = not planner.loss_is_outside and lives and {*lives} != {Until.END}
        return Known(optimizers, self._accumulates, loss, lives if lets_go else None,
                     self._defers_reduction)

    def _expected_output(self, planner: GraphPlanner) -> tuple[Until, ...] | None:
        """What the caller did with the output of another graph like this one's."""
        return next((graph.lives for graph in self.graphs if graph.lives is not None
                     and len(graph.lives) == planner.output_tensors), None)

    def _expected_loss(self, planner: GraphPlanner) -> SeenLoss | None:
        """The loss of another graph, scaled to the size of this one's output."""
        seen = next((graph for graph in self.graphs if graph.loss is not None), None)
        if not planner.loss_is_outside or seen is None or seen.loss is None:
            return None
        assumed = planner.assumed_loss
        if [each.flows for each in assumed.outputs] != [each.flows for each in seen.loss.outputs]:
            return None
        scale = assumed.gradient_bytes / max(seen.loss.gradient_bytes, 1)
        outputs = tuple(replace(each, until=other.until) for each, other
                        in zip(assumed.outputs, seen.loss.outputs, strict=True))
        return replace(assumed, outputs=outputs,
                       peak_bytes=math.ceil(scale * seen.loss.peak_bytes),
                       held_bytes=math.ceil(scale * seen.loss.held_bytes))

    def stepping(self, optimizer: Optimizer) -> None:
        """Note an optimizer that steps this model's parameters."""
        self._end_watch()
        if any(each() is optimizer for each in self._optimizers):
            return
        mine = {id(parameter) for parameter in self.__self__.parameters()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self._optimizers.append(ref(optimizer))

    def _observe(self, graph: PlannedGraph, output: Any) -> None:
        """See what comes after the forward, as long as it is not known."""
        planner = graph.planner
        if planner is None or running_node_number() is not None:  # a checkpoint calls it again
            return
        if planner.loss_is_outside and graph.loss is None and graph.unmeasured is None:
            watch = LossWatch(output, partial(_note_loss, ref(graph)))
            if watch.begin():
                self._watch = watch
                finalize(self, watch.end)  # else a model that is gone would leave it behind
            elif not watch.is_possible:  # Else that of another model is under way; next time.
                graph.loss = planner.assumed_loss
        if not self._backward_seen or graph.lives is None:
            watch_output(output, partial(_note_backward, ref(self), graph))

    def note_backward(self) -> None:
        """A backward through the model has begun."""
        self._backward_seen = True

    def _end_watch(self) -> None:
        # What is left in a backward is there again behind it.
        if (self._watch is not None and running_node_number() is None
                and self._watch.end()):
            self._watch = None

    @contextlib.contextmanager
    def _planning(self) -> Iterator[Watch]:
        """Inside, the module has the forward that is planned."""
        try:
            with (in_place_of_forward(self.__self__, self.inner),
                  watched(None, f"planning a training step of {self._name}") as watch):
                yield watch
        finally:
            # Caught errors and the compiler's garbage refer to frames, which refer to the caller's
            # frame, and so would hold its variables beyond the step.
            gc.collect()

    def _words(self, known: Known) -> str:
        if self.settings.planning.optimizer is not None:
            return ""
        names = [type(found).__name__ for each in known.optimizers or ()
                 if (found := each()) is not None]
        counted = " and ".join(names) or "no optimizer, since none of torch's has stepped"
        return f"; counting {counted}" + (
            " and gradients of earlier micro-steps" if known.accumulates else "")

    def _say(self, graph: PlannedGraph, more: str) -> None:
        log.info("%s (%s) %s%s", self._name, graph.call, summarize(graph.plan), more)


def _alive(optimizers: Iterable[ref[Optimizer]]) -> list[Optimizer]:
    return [found for each in optimizers if (found := each()) is not None]


def _note_loss(graph: ref[PlannedGraph], seen: UnmeasuredLoss) -> None:
    found = graph()
    if found is not None:
        found.unmeasured = seen


def _note_backward(forward: ref[PlanningForward], graph: PlannedGraph, lives: tuple[Until, ...]
                   ) -> None:
    if graph.lives is None:
        graph.lives = lives
    found = forward()
    if found is not None:
        found.note_backward()


def _needs_gradient(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    leaves: Iterable[Any] = pytree.tree_leaves((args, kwargs))
    return any(p.requires_grad for p in module.parameters()) or any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
