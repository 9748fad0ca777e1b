"""The link to the host over which a plan may store results.

Model of the world: the GPU's slot has the bandwidth of its PCIe generation, in both directions at
the same time, minus protocol overhead; each copy is launched like an op.

Blind spots: a slot with fewer lanes, a switch or a host shared with other GPUs, hosts with several
sockets.  `planner.Gpu(host_link_gb=...)` sets another bandwidth.
"""

from __future__ import annotations

import torch

from planner._graph_capture.op_costs.devices import device_model
from planner.arguments.planning import Planning
from planner.solvers.problem import Link


def host_link(planning: Planning, device: str) -> Link | None:
    """The host link of the device of `planning`; `None` if storing is not allowed.

    Raises `ValueError` if the device has no memory of its own.
    """
    if "offload" not in planning.allow:
        return None
    model = device_model(device, gpu=planning.gpu)
    if model.gpu is None:
        raise ValueError(f'allow="offload" on the device `{torch.device(device)}`: its results are '
                         'in the memory of the host already; plan for device="cuda", or leave '
                         '"offload" out')
    return Link(model.host_bytes_per_second, model.launch_seconds)
