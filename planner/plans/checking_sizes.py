"""Check the sizes that a plan states against its step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from planner._apply.call_signature import planned_sizes
from planner._apply.rewrite_spec import RewriteSpec, SymbolicSizes
from planner._apply.size_expressions import number
from planner._graph_capture.memory.allocator import allocated_bytes
from planner.step.other_sizes import check_calls


def of_sizes(spec: RewriteSpec, sizes: SymbolicSizes) -> Iterator[str]:
    """Yield, in words, what of a plan's sizes does not follow from its step."""
    names = sizes.names
    if len({*names}) < len(names) or not names:
        yield f"sizes.ranges names {', '.join(names) or 'none'}, expected different ones"
        return
    for each in sizes.ranges:
        if not each.name.isidentifier() or not 2 <= each.smallest <= each.largest:
            yield (f"sizes.ranges: {each.name} is {each.smallest} to {each.largest}, expected a "
                   "name and a range from 2 on")
            return
    yield from _of_dimensions(spec, sizes)
    largest = sizes.largest
    if len(sizes.buffer_bytes) != len(spec.buffers):
        yield (f"sizes.buffer_bytes has {len(sizes.buffer_bytes)} sizes, and there are "
               f"{len(spec.buffers)} buffers")
        return
    for place, (text, buffer) in enumerate(zip(sizes.buffer_bytes, spec.buffers, strict=True)):
        found = allocated_bytes(number(text, largest), torch.device(spec.device))
        if found != buffer.size_bytes:
            yield (f"sizes.buffer_bytes[{place}] is {found} at the planned sizes, the buffer "
                   f"{buffer.size_bytes}")
            return
    for text in sizes.input_bytes:
        number(text, largest)
    check_calls(sizes)
    for each_call in sizes.kernels:
        if any(not 0 <= place < len(spec.ops) for place in each_call.ops):
            yield f"sizes.kernels: {each_call.call} is of ops that there are not"
            return


def _of_dimensions(spec: RewriteSpec, sizes: SymbolicSizes) -> Iterator[str]:
    """Compare the named dimensions with the planned inputs."""
    planned = {} if spec.signature is None else planned_sizes(spec.signature)
    for each in sizes.dimensions:
        found = planned.get(each.input, ())
        if each.size not in sizes.largest or each.dimension >= len(found) or (
                found[each.dimension] != sizes.largest[each.size]):
            yield (f"sizes.dimensions: dimension {each.dimension} of {each.input} is {each.size}, "
                   f"which the planned inputs do not have")
            return
    if missing := {*sizes.names} - {each.size for each in sizes.dimensions}:
        yield f"sizes.dimensions: no dimension is {', '.join(sorted(missing))}"
