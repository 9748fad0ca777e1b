"""Forward override of a model that is trained within a budget: it plans the steps that it meets.

Model of the world: a call with gradients is the forward of a training step.  Its call signature
(`apply.call_signature`) selects the plans that may serve it, and the plan's own digests decide.  A
step that no plan serves is captured from its call, planned, and run under that plan, including the
first step.  Unknown parts - optimizer, earlier gradients, the caller's loss - are observed while
steps run, and the plan is remade before the next step; see `planner.attached.known`.

The budget is that of the training step, which may contain many calls.  Memory that calls of this
and other planned models keep for their backward is counted (`planner.attached.outside`), and so is
memory that the loop keeps alive outside the models (`planner.attached.held`).

A copy of the model gets its own forward override with the same settings, which plans separately.

Blind spots: an optimizer that is not torch's is counted as none, and the log says so; memory that
the loop allocates only after its sixth step.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from planner._apply.blocks import PlannedBlocks, run_step
from planner._apply.call_signature import Call, differences, input_tensors
from planner._apply.errors import PlanMismatch
from planner._apply.plan_backend import LargerSizes
from planner._apply.planned_forward import can_be_pickled
from planner._apply.symbolic_code import SizesNotPlanned, SymbolicCallable
from planner._graph_capture.errors import CaptureError, OtherOutputs
from planner._graph_capture.garbage import collected, fewer_collections
from planner._graph_capture.model_state import ModelState
from planner._graph_capture.module_forward import Forward, in_place_of_forward
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.outside_state import OutsideState
from planner._graph_capture.plain_step.loss import Until
from planner._graph_capture.plain_step.observed_loss import (
    LossWatch,
    ObservedLoss,
    UnmeasuredLoss,
    end_watches,
    watch_output,
    without_watches,
)
from planner._graph_capture.random_state import remembered_random_state
from planner._graph_capture.step.symbolic_region import NamedDimensions
from planner._graph_capture.torch_compat import (
    DoubleBackwardWatch,
    backward_keeps_graph,
    marked_dimensions,
    no_saved_tensors_hooks,
    pytree,
    runs_again,
)
from planner.arguments.inputs import named_dimensions, size_name
from planner.attached.held import attributes_of
from planner.attached.known import GraphPlanner, OptimizerTraces
from planner.attached.measuring import (
    CLOSE,
    abandon,
    enter_phase,
    is_watching,
    note_call,
)
from planner.attached.methods import with_methods_of_class
from planner.attached.observing import (
    ObservingForward,
    Settings,
    alive,
    needs_gradient,
)
from planner.attached.optimizers import observers
from planner.attached.outside import Known
from planner.attached.plain_values import PlainValues
from planner.attached.planned_graph import (
    PendingCall,
    PlannedGraph,
    Present,
    pending_calls,
)
from planner.attached.symbolic_graph import (
    SymbolicGraph,
    SymbolicGraphs,
    enlarged_arguments,
)
from planner.errors import InfeasibleBudget
from planner.plans.plan import Plan, summarize
from planner.progress import Watch, watched
from planner.step.wrapped import defers_reduction, other_ranks
from planner.units import format_bytes

log = logging.getLogger("planner")

_TRIES = 4
"""Attempts to plan a step for which no schedule serves its sizes, and to observe a loss."""
_MOST_CALLS = 256
"""Of how many kinds of calls it is remembered which graph has served them."""
_HOOKS = (
    "saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks, save_on_cpu) are active around "
    "a planned call: they do not apply to what its plan saves, so that the budget is kept; they "
    "apply to the loss and all that is not planned")
_HAD_NO_GRADIENT = (
    "nothing that such a call returned needed a gradient so far, and now something does: this call "
    "ran as it is written, and the next one is planned")
_HAD_NO_PARAMETERS = (
    "the model has lazy parameters, which its first call makes: this call ran as it is written, "
    "and the next one is planned")
_DIFFERENTIATED_AGAIN = (
    "calls whose gradients are differentiated again (create_graph=True, as for a gradient penalty) "
    "run as they are written, and nothing keeps them within the budget")


_MOST_REFUSED = 2
"""Plans in a row that did not fit a call of other sizes, after which none is tried for one."""
_MOST_TRIED = 3
"""Planned graphs for which a call is compiled, before it is planned itself."""
_LITTLE = 2**16
"""Bytes of an argument that no op reads, above which its size still counts."""
_PATHS = 2
"""Of how many paths through the model's code that values decide each has its own plan; after them a
plan by blocks is tried."""
_MOST_SELECTIONS = 3
"""Of how many times that a call selects more by values than planned, the last makes no plan."""
_SELECTS_MORE = (
    "the sizes of a step depend on values, and grow beyond what was planned again and again: from "
    "here on, larger ones run under the schedule planned for smaller ones, and a step may take "
    "more than the budget")
_COMPILED_EACH_TIME = 5
"""Calls in a row of one planned graph in which code is compiled, before a warning says so."""
_IS_COMPILED_EACH_TIME = (
    "parts of the model are compiled anew in each call, which takes seconds: its code takes "
    "another path each time (loops whose length follows from sizes, lists that grow), or a number "
    "that changes, or that it reads from a tensor (.item(), float(tensor)), decides a size, a "
    "text, an exponent, a rounding or the p of a dropout; compute with a tensor instead, and store "
    "it")


class PlanningForward(ObservingForward):
    """Forward override that plans the training steps of a model."""

    def __init__(self, module: nn.Module, inner: Forward | None, settings: Settings) -> None:
        super().__init__(module, inner, settings)
        self._begin()

    def _begin(self) -> None:
        """Reset: nothing known, nothing planned."""
        self._name = type(self.__self__).__name__
        given = self.settings.given
        self.graphs: list[PlannedGraph] = []
        """In the order of their first call."""
        if given is not None:
            self.graphs.append(PlannedGraph())
            self.graphs[0].adopt(self.__self__, given)
        self.running: PlannedGraph | None = None
        """The graph of the last step."""
        self._served: dict[Call, PlannedGraph] = {}
        self._without_gradient = set[Call]()
        """Calls of which nothing that they returned needed a gradient."""
        self._with_double_backward = set[Call]()
        """Calls whose gradients are differentiated again."""
        self._plain_values = PlainValues(self._name)
        self._has_other_loss = False
        """True if the loop has differentiated outputs beside the model's own loss."""
        self._other_calls_refused = 0
        """Plans in a row that did not fit a call of other sizes than theirs."""
        self._unread = frozenset[str]()
        """Arguments that no op reads."""
        self._grown = Counter[Call]()
        """How often a call selected more by values than was planned."""
        self._may_select_more = True
        """True if steps may be planned for larger selections by values than they make."""
        self._symbolic = SymbolicGraphs(self.__self__, self.inner)
        self._optimizer_traces = OptimizerTraces()
        self._begin_observing()

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
                                or not can_be_pickled(value)}  # a copied optimizer steps nothing
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
        """Start over with other settings."""
        self._end_watch()
        self.settings = settings
        self._begin()

    def release_optimizer(self) -> None:
        """Refer no longer to the optimizer that the user gave, whose training is over."""
        self.settings = replace(
            self.settings, planning=replace(self.settings.planning, optimizer=None))
        for graph in self.graphs:
            if graph.planner is not None:
                graph.planner.release_optimizer()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward; in a training step, under a plan."""
        args = self.without_self(args)
        # A loss may call the model, or a frozen copy of it, for a target.
        is_step = (torch.is_grad_enabled() and needs_gradient(self.__self__, args, kwargs)
                   and not self._is_without_gradient(args, kwargs))
        end_watches(of_losses=is_step)
        if is_step:
            self._end_watch()
        self._begin_call()
        is_foreign = self.is_foreign()
        if is_foreign and torch.is_grad_enabled():
            abandon()  # what is measured would be none of a step
        is_lazy_yet = is_step and not self.graphs and any(map(is_lazy, self.__self__.parameters()))
        if is_foreign or not is_step or is_lazy_yet:
            with (contextlib.nullcontext() if is_foreign
                  else self._compared_without_gradients(args, kwargs)):
                output = self.plain(*args, **kwargs)
            if is_lazy_yet:
                self._counts.calls += 1
                self.steps.count(_HAD_NO_PARAMETERS)
            if self._without_gradient and any(
                    tensor.requires_grad for tensor in output_tensors(output)):
                self._without_gradient.discard(self.call_of(args, kwargs))
                self.steps.count(_HAD_NO_GRADIENT)
            return output
        call = self._plain_values.begin(self.call_of(args, kwargs), may_try=(
            self.running is not None and not self.running.has_control_flow))
        known = self._served.get(call)
        if known is None and call not in self._with_double_backward and not (
                isinstance(self.running, SymbolicGraph) and self.running.call
                and call.may_be_served_as(self.running.call)):
            self._watch_next_steps()  # smaller sizes of one graph hold no more beside it
        if not self._optimizers and self._backward_seen and not self._has_gradients:
            self._end_step()
        self._defers_reduction |= defers_reduction(self.__self__)
        self._observe_hooks()
        self._begin_measuring(args, kwargs)
        enter_phase(f"in the forward of {self._name}")
        if known is not None and known.is_differentiated_again and (
                call not in self._with_double_backward):
            self._with_double_backward.add(call)
            gc.collect()  # a graph of gradients refers to itself
        if call in self._with_double_backward:
            self._counts.calls += 1
            self.steps.count(_DIFFERENTIATED_AGAIN)
            return self.plain(*args, **kwargs)
        returned = self._returned_before(args, kwargs)
        attributes = self._attributes.of_earlier_steps()
        present = self._present(returned, attributes)
        before = [*map(ref, returned)], [*map(ref, attributes)]
        del returned, attributes  # the loop may let go of them
        compiled = self._compilations
        if on_trial := self._plain_values.are_on_trial:
            known = None  # it may turn out to be another graph
        try:
            graph, output = self._step(call, known, present, args, kwargs)
        except Exception as error:
            abandon()  # what comes next is another step
            if isinstance(error, CaptureError):
                with DoubleBackwardWatch() as watch:
                    output = self.plain(*args, **kwargs)  # what the model raises is for the caller
                if watch.found:
                    self._with_double_backward.add(call)
                    self._counts.calls += 1
                    self.steps.count(_DIFFERENTIATED_AGAIN)
                    return output
                if (returned := output_tensors(output)) and not any(
                        tensor.requires_grad for tensor in returned):
                    self._without_gradient.add(self.call_of(args, kwargs))
                    return output
            raise
        is_compiled = self._compilations != compiled
        if on_trial:
            self._plain_values.note(
                is_read=is_compiled or graph.call == self._plain_values.given)
        graph.compiled_in_a_row = graph.compiled_in_a_row + 1 if is_compiled else 0
        if graph.compiled_in_a_row > _COMPILED_EACH_TIME:
            self.steps.warn(_IS_COMPILED_EACH_TIME)
        self._served.pop(call, None)
        if self.running is not None:
            self.running.followed_by = ref(graph)
        self._served[call] = self.running = graph
        if len(self._served) > _MOST_CALLS:
            del self._served[next(iter(self._served))]
        reason = graph.code.why_unplanned()
        self.steps.count(reason)
        note_call(self, graph, is_planned=reason is None)
        enter_phase(f"after the forward of {self._name}, for example by the loss")
        self._counts.calls += 1
        self._observe(graph, present, output, *before)
        return output

    def _is_without_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if nothing that such a call returned needed a gradient, though a parameter does."""
        return bool(self._without_gradient) and (
            self.call_of(args, kwargs) in self._without_gradient)

    def call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """As of the base, without what no op reads, and may have another size in each call."""
        return super().call_of(args, kwargs).without(self._unread)

    def _unread_by(self, planner: GraphPlanner, args: tuple[Any, ...], kwargs: dict[str, Any]
                   ) -> frozenset[str]:
        """The small tensors among the arguments of a call that its graph does not read."""
        if not planner.unread:
            return frozenset()
        leaves = [leaf for leaf in pytree.tree_leaves((args, [*kwargs.values()]))
                  if isinstance(leaf, torch.Tensor)]
        read = {id(leaf) for place, leaf in enumerate(leaves) if place not in planner.unread}
        tensors = input_tensors(self.__self__, self.inner, args, kwargs)
        return frozenset(name for name, tensor in tensors.items()
                         if id(tensor) not in read and tensor.nbytes <= _LITTLE)

    @property
    def _compilations(self) -> int:
        return sum(graph.code.compilations for graph in self.graphs)

    def _step(self, call: Call, known: PlannedGraph | None, present: Present,
              args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlannedGraph, Any]:
        """Run the step under a plan that serves it; returns that graph, and the output.  `known`:
        the graph that has served such a call."""
        if not self._has_other_loss and any(
                graph.code.met_unplanned_gradient for graph in self.graphs):
            log.warning("%s: the loop differentiates more of its outputs than its loss: the step "
                        "before was computed as it is written, and nothing kept it within the "
                        "budget; steps are planned with these outputs from now on", self._name)
            self._has_other_loss = True
            self.graphs.clear()
            self._symbolic = SymbolicGraphs(self.__self__, self.inner)
            self._unforeseen_bytes = 0  # as written, it took more than it will
        named = self._named_sizes(args, kwargs)
        may_vary = self.settings.on_new != "refuse" and not self._early
        pending = present.graphs
        is_apart = bool(pending) and may_vary and not named and self._symbolic.keeps_apart(
            call, self.graphs, pending)
        symbolic = None if not may_vary or is_apart else (
            self._symbolic.graph_for(call, self.graphs, at_once=bool(named)))
        if symbolic is not None and (found := self._symbolic_step(
                symbolic, call, named, present, args, kwargs)):
            return found
        refusal = ""
        grew = False
        # Calls may take turns: of the graphs of such a call, the one after a graph's is tried
        # first, the last one's next.
        after = None if self.running is None else self.running.followed_by()
        tried = 0
        for graph in sorted(self.graphs, key=lambda graph: (
                graph.call not in (None, call), graph is not after, graph is not known)):
            is_other = graph.call not in (None, call)
            if not graph.may_serve(call) or (is_other and (is_apart or (
                    graph is not known and self._other_calls_refused >= _MOST_REFUSED))) or (
                    graph is not known and tried >= _MOST_TRIED):
                continue
            refusal = "" if graph.planner else other_ranks(graph.plan.parallel, self.__self__)
            if refusal:
                continue
            is_sure = not (is_other or self._plain_values.are_on_trial)
            self._bring_up_to_date(graph, call, present, args, kwargs,
                                   takes_part=is_sure or graph is known)
            # A mismatch may show only after a part has run; then the next graph starts from the
            # beginning.
            is_trial = (graph.has_control_flow and not graph.takes_larger) or (
                graph is not known and bool(graph.plan.spec.blocks)) or (
                self._plain_values.are_on_trial and not graph.is_one_graph)
            compiled = graph.code.compilations
            try:
                output = self._run(graph, args, kwargs, is_trial=is_trial)
                self._share_step(graph)
                if is_other:
                    self._other_calls_refused = 0
                return graph, output
            except PlanMismatch as error:
                if graph.code.has_begun and not is_trial:
                    raise
                has_compiled = graph.code.compilations != compiled
                tried += has_compiled
                grew |= isinstance(error, LargerSizes) and graph.call == call
                if is_other and not graph.has_control_flow:
                    self._other_calls_refused += 1
                refusal = str(self.explained(graph.plan.spec, error, call))
            if has_compiled or graph.code.has_begun:
                gc.collect()  # the error's frames keep results alive
        smaller = None if not grew else next(
            (graph for graph in self.graphs if graph.call == call), None)
        if smaller is not None:
            self._grown[call] += 1
            if self._grown[call] >= _MOST_SELECTIONS and smaller.take_larger():
                self.steps.warn(_SELECTS_MORE)
                return self._step(call, smaller, present, args, kwargs)
        if self.graphs and self.settings.on_new == "refuse":
            raise self._refusal(call, refusal)
        if refusal and any(graph.planner is None for graph in self.graphs):
            log.warning("%s: the plan that was given does not fit this step, which is planned "
                        "anew: %s", self._name, refusal)
        call = self._plain_values.given or call
        graph = self._new_graph(call, present, args, kwargs, smaller=smaller)
        if named and symbolic is None:  # the first step has shown what the symbolic one is to be
            symbolic = self._symbolic.graph_for(call, [graph], at_once=True)
            if symbolic is not None and (found := self._symbolic_step(
                    symbolic, call, named, present, args, kwargs)):
                return found
        planner = graph.planner
        selects_more = planner is not None and planner.selects_more
        if planner is not None and planner.sets_up:
            self._set_up(args, kwargs)
        try:
            return graph, self._run(graph, args, kwargs, is_trial=selects_more)
        except PlanMismatch:
            if graph.code.has_begun and not selects_more:
                raise
        self.graphs.remove(graph)
        if selects_more:  # its code goes another way where it does
            self._may_select_more = False
            return self._step(call, known, present, args, kwargs)
        self._set_up(args, kwargs)
        graph = self._new_graph(call, present, args, kwargs)
        return graph, self._run(graph, args, kwargs)

    def _set_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the model set up what its first call does, which so far only a copy has had."""
        restore = ModelState(self.__self__).restore
        try:
            with torch.no_grad():
                self.plain(*args, **kwargs)
        finally:
            restore()

    def _named_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NamedDimensions:
        """Sizes that the user has named or marked, which are symbolic from the first step on."""
        dynamic = self.settings.planning.dynamic
        marked = [marked_dimensions(leaf) for leaf in pytree.tree_leaves((args, kwargs))
                  if isinstance(leaf, torch.Tensor)]
        if (not dynamic and not any(marked)) or self.settings.on_new == "refuse":
            return {}
        tensors = {name: tensor for name, tensor in input_tensors(
            self.__self__, self.inner, args, kwargs).items() if name not in self._unread}
        return {**{name: {place: size_name(name, place) for place in places}
                   for name, tensor in tensors.items() if (places := marked_dimensions(tensor))},
                **named_dimensions(dynamic, tensors)}

    def _symbolic_step(self, graph: SymbolicGraph, call: Call, named: NamedDimensions,
                       present: Present, args: tuple[Any, ...], kwargs: dict[str, Any]
                       ) -> tuple[SymbolicGraph, Any] | None:
        """Run the step on a graph with symbolic sizes, planned for them where no plan serves them;
        returns the graph and the output, `None` where there is no such graph."""
        graph.note_sizes(call, named)
        before = None if self._served.get(call) is graph else (
            OutsideState(self.__self__, with_attributes=True))
        with contextlib.ExitStack() as tracing:
            if not graph.has_run:
                tracing.enter_context(fewer_collections())
                tracing.enter_context(watched(
                    None, f"tracing a training step of {self._name} with symbolic sizes"))
            for _ in range(_TRIES):
                try:
                    self._bring_up_to_date(graph, call, present, args, kwargs)
                except CaptureError as error:
                    self._symbolic.give_up(graph, call, error)
                    return None
                started = time.monotonic()
                try:
                    with contextlib.nullcontext() if graph.has_run else graph.limit.kept():
                        output = self._run(graph, args, kwargs, is_trial=not graph.has_run)
                except SizesNotPlanned as unknown:
                    self._counts.planning_seconds += time.monotonic() - started
                    if before is not None:
                        before.put_back()
                    try:
                        self._plan_sizes(graph, unknown.graph, call, present, args, kwargs)
                    except CaptureError as error:
                        self._symbolic.give_up(graph, call, error)
                        return None
                except InfeasibleBudget:
                    raise
                except Exception as error:  # whatever tracing the user's code raises
                    if graph.has_run and not isinstance(error, PlanMismatch):
                        raise
                    self._symbolic.give_up(graph, call, error)
                    return None
                else:
                    graph.note_run(call)
                    if graph not in self.graphs:
                        self.graphs.insert(0, graph)
                    return graph, output
        self._symbolic.give_up(graph, call, PlanMismatch(
            "the model's code takes another path in each run of the same step"))
        return None

    def _plan_sizes(self, graph: SymbolicGraph, target: SymbolicCallable, call: Call,
                    present: Present, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan a graph with symbolic sizes for those of a call, or larger ones."""
        with self._planning() as watch:
            chosen, planner = graph.choose_sizes(target, call), None
            if chosen is not call:
                # The model's code may refuse values that go on at larger sizes.
                with contextlib.suppress(Exception):
                    planner = self._planner_at(graph, chosen, args, kwargs)
            if planner is None:
                graph.take_sizes(call)
                planner = self._planner_at(graph, call, args, kwargs)
            graph.note(present)
            graph.loss, graph.planner = self._expected_loss(planner, graph), planner
            self._look_outside(graph, args, kwargs)
            self._plan(graph, self._known(graph, present), call, args, kwargs)
            watch.conclude(f": {summarize(graph.plan)}")

    def _planner_at(self, graph: SymbolicGraph, chosen: Call, args: tuple[Any, ...],
                    kwargs: dict[str, Any]) -> GraphPlanner:
        """Capture a step of the chosen sizes."""
        args, kwargs = graph.arguments_at(chosen, args, kwargs)
        return self._planner_of(args, kwargs, symbolic=graph.symbolic_step(args, kwargs),
                                earlier=graph.earlier)

    def _run(self, graph: PlannedGraph, args: tuple[Any, ...], kwargs: dict[str, Any], *,
             is_trial: bool = False) -> Any:
        before = graph.code.compilations
        try:
            with (no_saved_tensors_hooks() as has_hooks,
                  with_methods_of_class(self.__self__)):
                if has_hooks:
                    self.steps.warn(_HOOKS)
                return run_step(graph.code, graph.plan.spec, self.__self__, self.inner, args,
                                kwargs, is_trial=is_trial)
        except PlanMismatch:
            raise
        except Exception:
            graph.compile_again(self.__self__)
            raise
        finally:
            if graph.code.compilations != before:
                gc.collect()  # as after planning

    def _refusal(self, call: Call, refusal: str) -> PlanMismatch:
        words = differences(self.graphs[0].plan.spec, self.__self__, call.signature)
        reason = "; ".join(words) or refusal or "the model's code takes another path"
        return PlanMismatch(
            f'no plan serves this step of {self._name}, and on_new="refuse" allows no other: '
            f'{reason}. Begin with the largest step, or use on_new="replan"')

    def _planner_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], **more: Any
                    ) -> GraphPlanner:
        """Capture a step; `more`: what `GraphPlanner` is told beside what all graphs share."""
        settings = self.settings
        return GraphPlanner(
            self.__self__, args, kwargs, settings.planning, settings.limit, settings.batches_ahead,
            partial(alive, self._optimizers), self._optimizer_traces,
            self._attributes.of_earlier_steps, **more)

    def _new_graph(self, call: Call, present: Present, args: tuple[Any, ...],
                   kwargs: dict[str, Any], *, smaller: PlannedGraph | None = None
                   ) -> PlannedGraph:
        """Capture and plan a step that no plan serves.  `smaller`: an earlier graph of such a call,
        which would serve it but for tensors that are larger now."""
        planners = [(graph.call, graph.planner) for graph in self.graphs
                    if graph.planner is not None]
        same = None if smaller is None or smaller.is_provisional else smaller
        # Of this call, perhaps with other sizes.
        paths = [each for other, each in planners if each.has_control_flow
                 and other is not None and other.without_sizes == call.without_sizes]
        with self._planning() as watch:
            make = partial(
                self._planner_of, args, kwargs, early=dict(self._early),
                has_other_loss=self._has_other_loss,
                is_whole=any(each.is_whole for _, each in planners),
                has_control_flow=bool(paths),
                paths_vary=len([each for each in paths if not (
                    each.may_skip or each.selects_more)]) == _PATHS,
                earlier_answers=next((each.seen_answers for other, each in planners
                                      if other == call), ()),
                may_select_more=self._may_select_more and all(
                    each.may_select_more for _, each in planners))
            planner = make(known=None if same is None else same.known)
            if same is not None and not planner.returns_as_much_as(same.planner):
                same, planner = None, make()  # its loss is another one
            self._unread |= self._unread_by(planner, args, kwargs)
            call = call.without(self._unread)
            graph = PlannedGraph(call, planner)
            graph.note(present)
            self._share_step(graph)
            if same is not None:
                graph.loss = same.loss
            graph.lives = self._expected_output(planner)
            replaced = next(filter(graph.may_replace, self.graphs), None)
            if replaced is not None:
                graph.take_code(replaced)
            self._look_outside(graph, args, kwargs)
            self._plan(graph, self._known(graph, present), call, args, kwargs)
            watch.conclude(f": {summarize(graph.plan)}")
        self._compare_values_call(graph.plan, planner.values_bytes)
        if replaced is not None and graph.code is replaced.code:
            self.graphs.remove(replaced)
            self._served = {call: each for call, each in self._served.items()
                            if each is not replaced}
        self.graphs.insert(0, graph)
        return graph

    def _compare_values_call(self, plan: Plan, values_bytes: int) -> None:
        """Say so where the call that learned values took more than the budget; once, unless another
        one takes more."""
        taken_bytes, limit_bytes = plan.resident_bytes + values_bytes, plan.budget_bytes
        if not values_bytes or limit_bytes is None or (
                taken_bytes <= limit_bytes * max(1.0, (1 + CLOSE) * self.worst_ratio)):
            return
        self.worst_ratio = taken_bytes / limit_bytes
        log.warning("%s: values of tensors decide sizes or branches of the step; to learn them it "
                    "was called without gradients as it is written, which took %s of the budget "
                    "of %s: raise the budget, or select outside of the model", self._name,
                    format_bytes(taken_bytes), format_bytes(limit_bytes))

    def _bring_up_to_date(self, graph: PlannedGraph, call: Call, present: Present,
                          args: tuple[Any, ...], kwargs: dict[str, Any], *,
                          takes_part: bool = True) -> None:
        """Plan a graph again if more is known than its plan counts.  `takes_part`: false if the
        call may turn out to be another graph's."""
        planner = graph.planner
        if planner is None or runs_again():
            return
        if self._is_looked_at or is_watching() or not graph.is_held_known:
            self._look_outside(graph, args, kwargs)
        if graph.note(present):
            self._learned += 1
            self._watch_next_steps()
        if takes_part:
            self._share_step(graph)
        if isinstance(graph.code, PlannedBlocks) and planner.note_runs(graph.code):
            self._learned += 1
        if graph.checked == self._learned:
            return
        if graph.unmeasured is not None:
            graph.loss, graph.unmeasured = planner.measured(graph.unmeasured), None
        elif graph.is_followed and graph.loss is None:
            graph.loss = planner.passing_loss
        known = self._known(graph, present)
        if known is not None and graph.known is not None and self._are_remade:
            known = self._with_remade(known, graph.known)
        if known is not None and graph.serves(known) and not (
                graph.is_provisional or planner.lacks_runs):
            graph.checked, graph.is_settled = self._learned, graph.is_observed
            return
        if known is None and graph.serves(self._assumed(graph)):
            return
        needs_capture = known is not None and planner.needs_capture_for(known)
        is_smaller = needs_capture and call != graph.call
        if is_smaller and (planner.has_control_flow or graph.call is None):
            return
        with self._planning() as watch:
            if is_smaller:
                # A call of its own sizes, which none of this one's exceeds, may never come again.
                assert graph.call is not None
                call = graph.call
                args, kwargs = enlarged_arguments(input_tensors(
                    self.__self__, self.inner, args, kwargs), call, args, kwargs)
            if known is not None and needs_capture:
                try:
                    planner.capture_again(self.__self__, args, kwargs, known)
                except OtherOutputs:
                    return  # values decide what it returns: this call is another graph's
            self._plan(graph, known, call, args, kwargs)
            watch.conclude(f": {summarize(graph.plan)}")

    def _plan(self, graph: PlannedGraph, known: Known | None, call: Call, args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> None:
        """Make the plan of a graph; `known`: `None` if a part of the step is not known."""
        planner = graph.planner
        assert planner is not None
        counted, was_whole = known or self._assumed(graph), planner.is_whole
        try:
            plan = planner.plan(self.__self__, args, kwargs, counted, is_provisional=known is None)
        except CaptureError:
            if self._optimizers or not self._expected:
                raise
            self._expected.clear()  # perhaps a step of them cannot be traced, and is not taken
            self._plan(graph, None, call, args, kwargs)
            return
        except InfeasibleBudget as refusal:
            if planner.is_percentage and graph.compare(self.graphs):
                # The last batch of an epoch may be far smaller than those that the budget is for.
                outside = graph.outside(self._unforeseen_bytes)
                self._plan(graph, known and replace(known, outside=outside), call, args, kwargs)
                return
            if graph.lives is graph.expected_lives is None and not planner.loss_is_outside and (
                    planner.output_tensors > 1):
                # Most loops keep the loss alone.
                graph.expected_lives = (Until.LOSS,) * planner.output_tensors
                counted = replace(counted, lives=graph.expected_lives)
                if planner.needs_capture_for(counted):
                    planner.capture_again(self.__self__, args, kwargs, counted)
                self._plan(graph, known and counted, call, args, kwargs)
                return
            # From the next step on the others leave more.
            makes_way = bool(graph.companions) and graph.make_way(planner.leanest(counted))
            is_certain = graph.is_observed and not (
                makes_way or graph.room_bytes or self._unforeseen_bytes)
            if is_certain or not planner.may_fit(counted):
                raise
            plan = planner.leanest(counted)
            log.log(logging.WARNING if graph.is_observed else logging.INFO,
                    "%s: this call does not fit in the budget beside %s: %s", self._name,
                    "what others hold; it runs under the schedule of the smallest peak, and they "
                    "leave more from the next step on" if makes_way else
                    "what was measured in the loop; it runs under the schedule of the smallest "
                    "peak" if graph.is_observed else
                    "what its backward is assumed to meet; until that was seen, it runs under the "
                    "schedule of the smallest peak",
                    f"{format_bytes(refusal.minimum_bytes)} where "
                    f"{format_bytes(refusal.budget_bytes)} are allowed" if makes_way else refusal)
        if planner.is_whole != was_whole:
            graph.call = call
        graph.known, graph.is_provisional = counted, known is None
        graph.is_settled = known is not None and graph.is_observed
        graph.adopt(self.__self__, plan)
        planner.note_saved(plan, counted)
        graph.plans_made += 1
        self._counts.plans += 1
        self._watch_next_steps()
        self._learned += 1
        graph.checked = self._learned
        for each in observers():
            if each is not self and isinstance(each, PlanningForward):
                each._learned += 1  # its plan counts what this model's calls save
        log.info("%s (%s) %s%s", self._name, graph.call, summarize(plan), self._words(known))

    def _known(self, graph: PlannedGraph, present: Present) -> Known | None:
        """The step as observed; `None` while a part of it is not known."""
        planner = graph.planner
        assert planner is not None
        if planner.loss_is_outside and graph.loss is None:
            return None
        if self._backward_seen and not self._optimizers and not present.has_gradients:
            self._expected.clear()  # somebody else has used the gradients
        optimizers = self._stepping
        if optimizers is None and self.settings.planning.optimizer is None:
            if present.has_gradients or not self._backward_seen:
                return None
            optimizers = ()  # gradients are gone: the optimizer is not torch's
        lives = graph.lives or graph.expected_lives
        # A structured output may create more tensors when the loss reads its attributes.
        lets_go = (not planner.loss_is_outside and lives and {*lives} != {Until.END}
                   and len(lives) == planner.output_tensors)
        return Known(optimizers, graph.outside(self._unforeseen_bytes), graph.shared_loss,
                     lives if lets_go else None, self._defers_reduction, self._early,
                     graph.room_bytes, graph.is_lean)

    def _assumed(self, graph: PlannedGraph) -> Known:
        """The step as observed, with assumptions for the unknown parts."""
        assert graph.planner is not None
        return Known(self._stepping, graph.outside(self._unforeseen_bytes),
                     self._expected_loss(graph.planner), graph.expected_lives,
                     self._defers_reduction, self._early)

    def _expected_output(self, planner: GraphPlanner) -> tuple[Until, ...] | None:
        """Lifetimes of the output tensors of another graph with as many of them."""
        return next((graph.lives for graph in self.graphs if graph.lives is not None
                     and len(graph.lives) == planner.output_tensors), None)

    def _expected_loss(self, planner: GraphPlanner, same: SymbolicGraph | None = None
                       ) -> ObservedLoss | None:
        """The observed loss of another graph, or of the `same` one at other sizes, scaled to the
        size of the output."""
        graph = same or next((graph for graph in self.graphs if graph.loss is not None), None)
        if not planner.loss_is_outside or graph is None or graph.loss is None:
            return None
        of, seen, assumed = graph.loss_planner, graph.loss, planner.assumed_loss
        if of is None or len(assumed.outputs) != len(seen.outputs) or (same is None and any(
                each.flows != other.flows for each, other
                in zip(assumed.outputs, seen.outputs, strict=True))):
            return None
        flows = [each.flows for each in seen.outputs]
        before, after = of.returned_bytes(flows), planner.returned_bytes(flows)
        scale = after / before if before else 1.0
        outputs = tuple(replace(each, flows=other.flows, until=other.until,
                                size_bytes=each.size_bytes if other.size_bytes else 0)
                        for each, other in zip(assumed.outputs, seen.outputs, strict=True))
        return replace(assumed, outputs=outputs,
                       peak_bytes=math.ceil(scale * seen.peak_bytes),
                       held_bytes=math.ceil(scale * seen.held_bytes))

    def _observe(self, graph: PlannedGraph, present: Present, output: Any,
                 returned_before: Sequence[ref[torch.Tensor]],
                 attributes_before: Sequence[ref[torch.Tensor]]) -> None:
        """Watch the loss and the backward as long as they are not known."""
        pending = PendingCall(graph)
        pending.returned_before = returned_before
        self._returned.add(output_tensors(output), pending)
        planner = graph.planner
        if planner is not None and planner.has_attributes:
            self._attributes.add(
                attributes_of(self.__self__, planner.own_tensors), pending)
        pending.attributes_before = attributes_before
        watch_output(output, partial(_note_backward, ref(self), graph, present, pending))
        if planner is None or runs_again():
            return
        if self._has_other_loss and graph.loss is None and planner.may_leave_losses:
            graph.loss = planner.assumed_loss
            self._learned += 1
        if planner.loss_is_outside and graph.loss is None and graph.unmeasured is None:
            watch = LossWatch(output, partial(_note_loss, ref(self), ref(graph)))
            graph.steps_to_observe.add(self._counts.steps)
            if not watch.is_possible or len(graph.steps_to_observe) > _TRIES:
                graph.loss = planner.assumed_loss
                self._learned += 1
            elif watch.begin():  # else another model's watch is active; next time
                self._watch = watch
                finalize(self, watch.end)  # else it would outlive the model
        for each in observers():
            if isinstance(each, PlanningForward):
                each._follow(graph)

    def _follow(self, last: PlannedGraph) -> None:
        """Mark graphs whose calls still wait for their loss as followed by another call."""
        for graph in self.graphs:
            if graph is not last and graph.loss is None and any(
                    call.graph() is graph for call in pending_calls()):
                graph.is_followed = True
                self._learned += 1

    @contextlib.contextmanager
    def _planning(self) -> Iterator[Watch]:
        """Context in which the module has its original forward, for planning."""
        started = time.monotonic()
        restore = remembered_random_state(self.__self__)
        try:
            with (collected(), without_watches(), with_methods_of_class(self.__self__),
                  in_place_of_forward(self.__self__, self.inner),
                  watched(None, f"planning a training step of {self._name}") as watch):
                yield watch
        finally:
            restore()
            self._counts.planning_seconds += time.monotonic() - started

    def _words(self, known: Known | None) -> str:
        if known is None:
            is_given = self.settings.planning.optimizer is not None
            unknown = "loss" if is_given or self._stepping is not None else "optimizer"
            return f"; for the first step, while its {unknown} is not known"
        if self.settings.planning.optimizer is not None and known.optimizers is None:
            return ""
        names = Counter(type(found).__name__ for each in known.optimizers or ()
                        if (found := each()) is not None)
        counted = " and ".join(name if number == 1 else f"{number} {name}" for name, number
                               in names.items()) or (
            "no optimizer, since none of torch's has stepped")
        return f"; counting {counted}" + (
            " and gradients of earlier micro-batches" if known.accumulates else "")


def _note_loss(forward: ref[PlanningForward], graph: ref[PlannedGraph], seen: UnmeasuredLoss
               ) -> None:
    found, owner = graph(), forward()
    if found is not None and owner is not None:
        if owner._has_other_loss and found.planner is not None and backward_keeps_graph():
            found.loss = found.planner.assumed_loss  # this is the first of several backwards
        else:
            found.unmeasured = seen
        owner._learned += 1


def _note_backward(forward: ref[PlanningForward], graph: PlannedGraph, present: Present,
                   pending: PendingCall, lives: tuple[Until, ...]) -> None:
    if graph.lives is None:
        graph.lives = lives
    found = forward()
    if found is not None:
        found.note_backward(graph, present, pending)
