"""Estimated seconds of an op on a device, by a table.

The model of the world: the roofline of Williams, Waterman and Patterson, "Roofline: an insightful
visual performance model for multicore architectures" (CACM 2009): an op takes as long as its
arithmetic at the device's peak rate or its memory traffic at the device's bandwidth, whichever is
longer, plus a constant for starting it and, on a CPU, the time that its generator takes for the
random numbers drawn.  The figures are the manufacturers' (dense, without sparsity), scaled by what
large kernels reach in practice; they are the same on every machine, so that equal models give equal
plans.

A GPU that is not in the table, or neither here nor named, counts as an A100, and `assumption` says
so in words for the user.  A new GPU is a row of the table.

Blind spots: caches, small matrices that leave units idle, overlap of ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What a device can do per second."""

    name: str
    flops_per_second: Mapping[torch.dtype, float]
    """Peak by dtype of the operands; a dtype that is missing runs at the rate of float32."""
    bytes_per_second: float
    launch_seconds: float
    """From the start of one op to the start of the next, if neither did anything."""
    arithmetic_efficiency: float = 0.6
    """Part of the peak that large matrix products reach."""
    bandwidth_efficiency: float = 0.8
    draw_seconds: float = 0.0
    """For one random number by torch's generator; 0 where the memory traffic takes longer."""

    def arithmetic_seconds(self, flops: int, dtype: torch.dtype) -> float:
        """Duration of the arithmetic alone."""
        peak = self.flops_per_second.get(dtype, self.flops_per_second[torch.float32])
        return flops / (peak * self.arithmetic_efficiency)

    def traffic_seconds(self, bytes_moved: int) -> float:
        """Duration of the memory traffic alone."""
        return bytes_moved / (self.bytes_per_second * self.bandwidth_efficiency)

    def op_seconds(self, flops: int, bytes_moved: int, dtype: torch.dtype, drawn: int = 0) -> float:
        """Duration of an op with operands of `dtype` that draws so many random numbers; 0 for one
        that does nothing (a view)."""
        if flops == 0 and bytes_moved == 0:
            return 0.0
        return self.launch_seconds + drawn * self.draw_seconds + max(
            self.arithmetic_seconds(flops, dtype), self.traffic_seconds(bytes_moved))


def _gpu(name: str, *, float32: float, half: float, bandwidth: float, bfloat16: float | None = None,
         float64: float | None = None) -> DeviceModel:
    """`float32`, `half`, …: TFLOP/s; `bandwidth`: GB/s.  `float32` is without TF32, as in torch."""
    return DeviceModel(
        name=name,
        flops_per_second={
            torch.float32: float32 * 1e12,
            torch.float16: half * 1e12,
            torch.bfloat16: (half if bfloat16 is None else bfloat16) * 1e12,
            torch.float64: (float32 / 32 if float64 is None else float64) * 1e12},
        bytes_per_second=bandwidth * 1e9,
        launch_seconds=5e-6)


_GPUS = {gpu.name: gpu for gpu in (
    _gpu("B200", float32=75, half=2250, bandwidth=8000, float64=37),
    _gpu("H200", float32=67, half=989, bandwidth=4800, float64=67),
    _gpu("H100", float32=67, half=989, bandwidth=3350, float64=67),
    _gpu("A100", float32=19.5, half=312, bandwidth=1935, float64=19.5),
    _gpu("A10G", float32=31.2, half=70, bandwidth=600),
    _gpu("A10", float32=31.2, half=125, bandwidth=600),
    _gpu("L40S", float32=91.6, half=362, bandwidth=864),
    _gpu("L40", float32=90.5, half=181, bandwidth=864),
    _gpu("L4", float32=30.3, half=121, bandwidth=300),
    _gpu("V100", float32=15.7, half=125, bfloat16=15.7, bandwidth=900, float64=7.8),
    _gpu("T4", float32=8.1, half=65, bfloat16=8.1, bandwidth=320),
    _gpu("RTX 5090", float32=104.8, half=209.5, bandwidth=1792),
    _gpu("RTX 4090", float32=82.6, half=165.2, bandwidth=1008),
    _gpu("RTX 4080", float32=48.7, half=97.5, bandwidth=717),
    _gpu("RTX 3090", float32=35.6, half=71, bandwidth=936),
    _gpu("RTX A6000", float32=38.7, half=154.8, bandwidth=768),
    _gpu("P100", float32=9.3, half=18.7, bfloat16=9.3, bandwidth=732, float64=4.7),
)}

_CPU = DeviceModel(
    name="CPU",
    flops_per_second={torch.float32: 120e9, torch.float64: 60e9,
                      torch.bfloat16: 240e9, torch.float16: 60e9},
    bytes_per_second=10e9, launch_seconds=5e-6, draw_seconds=7e-9)
"""A small CPU: two cores with AVX-512.  Only ratios matter to a plan, and they change little
with the number of cores."""


_ASSUMED_GPU = "A100"


def device_model(device: torch.device | str, name: str | None = None, *, gpu: str | None = None
                 ) -> DeviceModel:
    """The model of `device`, by its product name where it is a GPU.

    `name`: as `torch.cuda.get_device_name` gives it; asked for if the device is here.  A GPU that
    is not known, or not here, counts as an A100.  `gpu`: the one that the user names instead;
    raises `ValueError` where the table has none such, and where the device is no GPU.
    """
    device = torch.device(device)
    if gpu is not None:
        if device.type == "cpu":
            raise ValueError(f"gpu={gpu!r} names a GPU, but the device planned for is the CPU: "
                             "give device='cuda' too, or no gpu")
        return gpu_model(gpu)
    if device.type == "cpu":
        return _CPU
    return _in_table(name or product_name(device)) or _GPUS[_ASSUMED_GPU]


def gpu_model(gpu: str) -> DeviceModel:
    """The row of the table that a name means: its own, or a product's with that in it.

    Raises `TypeError` or `ValueError` where there is none.
    """
    if not isinstance(gpu, str):
        raise TypeError(f"gpu must be the name of a GPU, such as 'H100', got {gpu!r}")
    known = _in_table(gpu)
    if known is None:
        raise ValueError(f"unknown gpu {gpu!r}; known: {', '.join(_GPUS)}")
    return known


def assumption(device: torch.device, gpu: str | None = None) -> str | None:
    """In words, what `device_model` takes for granted of a GPU; `None` where it knows it."""
    name = product_name(device)
    if gpu is not None or device.type == "cpu" or _in_table(name):
        return None
    what = f"{name} is not in the table of GPUs" if name else "there is no GPU here to ask"
    return (f"seconds are estimated for an {_ASSUMED_GPU}, since {what}: gpu= names the one to "
            f"plan for ({', '.join(_GPUS)})")


def product_name(device: torch.device) -> str:
    """As the driver gives it; empty where the device is not here, or no GPU of CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    return torch.cuda.get_device_name(device)


def _in_table(name: str) -> DeviceModel | None:
    words = name.upper().replace("-", " ").split()
    for known in sorted(_GPUS, key=len, reverse=True):
        wanted = known.split()
        if any(words[i:i + len(wanted)] == wanted for i in range(len(words))):
            return _GPUS[known]
    return None
