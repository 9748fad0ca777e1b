"""Cost of one run of a captured op: FLOPs, traffic, seconds and workspace.

Workspace comes from the probe of `graph_capture.op_costs.probe`.  Three models of seconds:

- `roofline`: the estimated duration of an op, by the table of `graph_capture.op_costs.devices`;
  equal on every machine.
- `measured`: the median duration of the op run alone on the device, by the probe, which keeps it on
  disk.  Ops that cannot be run there are estimated by the table.
- `flops`: the duration of its arithmetic at one rate for every dtype, for the fewest recomputed
  FLOPs rather than the least time; memory traffic counts a millionth, as a tie-break between ops
  without arithmetic.

Blind spot of `measured`: an op run over and over finds its operands in the caches if they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from planner._graph_capture.joint_graph.fresh_results import written_in_place
from planner._graph_capture.joint_graph.joint import tensors_of, traced_call
from planner._graph_capture.joint_graph.replay import draws, original_call
from planner._graph_capture.op_costs.devices import Gpu, assumption, device_model
from planner._graph_capture.op_costs.flops import bytes_moved, op_flops
from planner._graph_capture.op_costs.probe import OpProbe
from planner._graph_capture.progress import Progress
from planner._graph_capture.torch_compat import OpOverload

if TYPE_CHECKING:
    from planner._graph_capture.torch_compat.inductor import KernelCall


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one run of an op."""

    flops: int
    bytes_moved: int
    seconds: float
    workspace_bytes: int


class OpCosts:
    """Costs of the ops on one device; workspace is measured once for each signature."""

    def __init__(self, device: torch.device, *, cost_model: str = "roofline", probe: bool = True,
                 gpu: str | Gpu | None = None, progress: Progress | None = None,
                 headroom: Callable[[], int] | None = None) -> None:
        """`gpu`: whose figures to use, from the table; `progress` receives the number of timed ops
        now and then; `headroom`: as for `OpProbe`."""
        self.device_model = device_model(device, gpu=gpu)
        self._assumption = None if cost_model == "flops" else assumption(device, gpu)
        self._cost_model = cost_model
        self._probe = OpProbe(device, probe=probe, headroom=headroom, gpu=gpu)
        self._progress = progress or (lambda message: None)
        self._timed = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about what was assumed so far."""
        facts = (("workspace is a stated margin, not a measurement", self._probe.assumed),
                 ("seconds are estimated, since they could not be measured", self._probe.untimed))
        return (*(f"{what}, for: {', '.join(sorted(ops))}" for what, ops in facts if ops),
                *((self._assumption,) if self._assumption is not None else ()))

    def workspace_bytes(
        self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> int:
        """Workspace of the op's kernel."""
        target, kwargs, beyond = original_call(target, kwargs)
        target, args = written_in_place(target, args, out)
        return self._probe.workspace_bytes(target, args, kwargs, out) + beyond

    def known_workspace_bytes(
        self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> int:
        """`workspace_bytes` as far as it was measured before."""
        target, kwargs, beyond = original_call(target, kwargs)
        target, args = written_in_place(target, args, out)
        return self._probe.known_workspace_bytes(target, args, kwargs) + beyond

    def __call__(self, node: fx.Node) -> OpCost:
        """The cost of a node, from its traced values."""
        target, (args, kwargs, out) = node.target, traced_call(node)
        if not isinstance(target, OpOverload):
            moved = sum(t.numel() * t.element_size() for t in tensors_of((args, kwargs, out)))
            return OpCost(0, moved, self._seconds(0, moved, torch.float32), 0)
        flops = op_flops(*written_in_place(target, args, out), kwargs, out)
        moved = bytes_moved(target, args, kwargs, out)
        return OpCost(flops, moved, self.seconds(target, args, kwargs, out),
                      self.workspace_bytes(target, args, kwargs, out))

    def seconds(self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                out: Any) -> float:
        """Duration of one run of an op; tensors may be fake."""
        target, kwargs, _ = original_call(target, kwargs)
        moved = bytes_moved(target, args, kwargs, out)
        target, args = written_in_place(target, args, out)
        tensors = tensors_of(out) or tensors_of(args)
        dtype = tensors[0].dtype if tensors else torch.float32
        seconds = self._seconds(op_flops(target, args, kwargs, out), moved, dtype,
                                _numbers_drawn(target, args, kwargs, out))
        if self._cost_model == "measured" and seconds > 0:
            seconds = self._measured(target, args, kwargs, out, seconds)
        return seconds

    def seconds_of_kernels(self, calls: Sequence[KernelCall]) -> float:
        """Duration of calls of Inductor's kernels, each run alone on the device; of its operands'
        traffic if that fails.  Kernels without a known duration are compiled."""
        unknown = {call.kernel.text: call.kernel for call in calls
                   if self._probe.known_seconds(call.kernel.text, call.args, call.kwargs) is None}
        built = {text: kernel.build() for text, kernel in unknown.items()}
        total = 0.0
        for number, call in enumerate(calls, start=1):
            self._progress(f"timing kernels, {number} of {len(calls)}")
            text = call.kernel.text
            measured = self._probe.seconds_of_function(
                text, partial(_bound, built.get(text), call.method), call.args, call.kwargs)
            total += measured if measured is not None else self.device_model.traffic_seconds(
                sum(t.numel() * t.element_size() for t in tensors_of((call.args, call.kwargs))))
        return total

    def _measured(self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                  out: Any, estimate: float) -> float:
        """Duration by the probe, otherwise the estimate."""
        self._timed += 1
        if self._timed % 20 == 0:
            self._progress(f"timing ops, {self._timed} so far")
        measured = self._probe.seconds(target, args, kwargs, out)
        return estimate if measured is None else measured

    def _seconds(self, flops: int, moved: int, dtype: torch.dtype, drawn: int = 0) -> float:
        if self._cost_model == "flops":
            return (self.device_model.arithmetic_seconds(flops, torch.float32)
                    + 1e-6 * self.device_model.traffic_seconds(moved))
        return self.device_model.op_seconds(flops, moved, dtype, drawn)


def _numbers_drawn(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
                   ) -> int:
    """Random numbers that an op draws: one for each element of its result."""
    if not draws(target, args, kwargs):
        return 0
    return max((tensor.numel() for tensor in tensors_of(out)), default=0)


def _bound(built: Callable[[], Any] | None, method: str) -> Callable[..., Any]:
    assert built is not None, "what is not known was built"
    return getattr(built(), method)


