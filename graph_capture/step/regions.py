"""The captured regions of one recorded step: their ops, and the links of their inputs and outputs
with the model, the batch and the other regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from planner._graph_capture.dynamo.record import Recording, RegionCall
from planner._graph_capture.joint_graph.joint import count_cotangents
from planner._graph_capture.joint_graph.lower import RESIDENT, LoweredRegion
from planner._graph_capture.joint_graph.pipeline import JointVariant, lower_joint_graph
from planner._graph_capture.memory.sparse import tensors_inside
from planner._graph_capture.output_tensors import output_tensors
from planner._graph_capture.torch_compat import storage_key


@dataclass(frozen=True)
class RegionUse:
    """A lowered region and the links of its inputs and outputs with the rest of the step."""

    lowered: LoweredRegion
    cotangents: tuple[bool, ...]
    parameter_names: Mapping[int, str]
    """Index of a primal -> name, for those whose gradient the user gets."""
    linked_inputs: Mapping[int, tuple[int, int]]
    """Index of a primal -> (region, storage of that region) that it is."""
    returned: Mapping[int, tuple[list[int], list[int]]]
    """Storages of its outputs that the model returns, or holds in an attribute -> the tensors of
    the model's output in it, and the outputs of the region."""
    released: Mapping[int, int]
    """Storage of an output -> the last gap in which uncaptured code keeps it alive."""
    block: str = ""
    """The submodule of the graph; empty for the whole model."""
    repeated: bool = False
    """True if its code runs several times in one step, and under one schedule: nothing in it is
    replayed."""


def region_uses(recording: Recording, variant: JointVariant, *, elides_output: bool = False
                ) -> list[RegionUse]:
    """The regions of a recorded step in one variant.

    `elides_output`: only the loss, which is part of the last region, reads the model's output.
    """
    recording.check_any()
    model = recording.fake_copy.model
    trainable = {id(tensor): name for name, tensor in model.named_parameters()}
    names = {id(inside): inner_name
             for name, tensor in (*model.named_buffers(), *model.named_parameters())
             for inner_name, inside in tensors_inside(tensor, name)}
    held: dict[int, list[int]] = {}  # storage -> the tensors of the model's output in it
    for place, returned_tensor in enumerate(output_tensors(recording.output)):
        held.setdefault(storage_key(returned_tensor), []).append(place)
    runs_by_code = _count_runs(recording)
    made: dict[int, tuple[int, int]] = {}  # storage of an output -> (region, its storage there)
    runs: Counter[int] = Counter()
    uses: list[RegionUse] = []
    for number, call in enumerate(recording.calls):
        is_last = number == len(recording.calls) - 1  # no region reads what it returns
        cotangents = _cotangents(call, runs[id(call.region)])
        runs[id(call.region)] += 1
        lowered = lower_joint_graph(
            call.region.joint, call.region.num_forward_outputs, variant, cotangents=cotangents,
            input_names=[names.get(id(tensor)) for tensor in call.inputs], region=number,
            block=call.module, elided=range(len(call.outputs)) if elides_output and is_last else (),
            hoisted=None if variant.compiled else (),
            known=None if variant.compiled else call.region.lowered)
        # A parameter stays one where the code has put an output in the place of its data.
        linked = {
            index: made[storage_key(tensor)] for index, tensor in enumerate(call.inputs)
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) in made
            and id(tensor) not in names}
        given = {storage_key(each) for each in call.inputs if isinstance(each, torch.Tensor)}
        returned: dict[int, tuple[list[int], list[int]]] = {}
        released: dict[int, int] = {}
        for position, (node, tensor) in enumerate(
                zip(lowered.returned, call.outputs, strict=False)):
            storage = None if node is None else lowered.storage_of.get(node)
            if storage is None or storage == RESIDENT or not isinstance(tensor, torch.Tensor):
                continue
            made[storage_key(tensor)] = (number, storage)
            last = None if recording.uncaptured is None else (
                recording.uncaptured.outputs_released.get((number, position)))
            tensors = held.get(storage_key(tensor))
            is_kept = (number, position) in recording.kept_outputs and (
                storage_key(tensor) not in given)  # a buffer that it updates
            if tensors is not None or is_kept:
                returned.setdefault(storage, (tensors or [], []))[1].append(position)
            elif last is not None:
                released[storage] = max(last, released.get(storage, 0))
        uses.append(RegionUse(
            lowered=lowered, cotangents=cotangents,
            parameter_names={index: trainable.get(id(tensor), f"input {index}")
                             for index, tensor in enumerate(call.inputs)},
            linked_inputs=linked, returned=returned, released=released,
            block=call.module, repeated=(variant.compiled or elides_output) and (
                runs_by_code[id(call.region), call.module] > 1)))
    return uses


def shares_code(recording: Recording) -> bool:
    """True if the code of a region runs more than once in the step."""
    return any(count > 1 for count in _count_runs(recording).values())


def _count_runs(recording: Recording) -> Counter[tuple[int, str]]:
    """Number of runs of each captured region in the step, by its code."""
    return Counter((id(call.region), call.module) for call in recording.calls)


def _cotangents(call: RegionCall, earlier_runs: int) -> tuple[bool, ...]:
    """The outputs into which a gradient flows in the backward of a call, the region's next after
    some."""
    return call.region.cotangents.get(
        earlier_runs, (False,) * count_cotangents(call.region.joint))
