"""The way to the host that a plan may store results by, and which plans may.

The model of the world: the slot of the GPU carries what its generation of PCIe does, each way and
at the same time, less what protocols take; each copy is started like an op.

Blind spots: a slot with fewer lanes, a switch or a host shared with other GPUs, memory of a host
with several sockets.  `planner.Gpu(host_link_gb=...)` states another figure.
"""

from __future__ import annotations

import torch

from planner._graph_capture.op_costs.devices import device_model
from planner.arguments.planning import Planning
from planner.solvers.problem import Link


def host_link(planning: Planning, device: str) -> Link | None:
    """The link of the device that `planning` is for; `None` where nothing may be stored.

    Raises `ValueError` where the device has no memory of its own.
    """
    if "offload" not in planning.allow:
        return None
    model = device_model(device, gpu=planning.gpu)
    if model.gpu is None:
        raise ValueError(f'allow="offload" on the device `{torch.device(device)}`: its results are '
                         'in the memory of the host already; plan for device="cuda", or leave '
                         '"offload" out')
    return Link(model.host_bytes_per_second, model.launch_seconds)
