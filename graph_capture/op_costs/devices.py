"""Estimated seconds of an op on a device, by a table.

The model of the world: the roofline of Williams, Waterman and Patterson, "Roofline: an insightful
visual performance model for multicore architectures" (CACM 2009).  The duration of an op is its
arithmetic at the device's peak rate or its memory traffic at the device's bandwidth, whichever is
longer, plus a constant for the launch and, on a CPU, the time to generate its random numbers.  The
figures are the manufacturers' (dense, without sparsity), scaled by the efficiency of large kernels
in practice; they are the same on every machine, so that equal models give equal plans.  A GPU's row
also has its compute capability, memory and number of multiprocessors.

A GPU that is not in the table, or neither here nor named, counts as an A100, and `assumption` tells
the user so.  A new GPU is a row of the table.

Blind spots: caches, small matrices that leave units idle, overlap of ops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Throughput of a device."""

    name: str
    flops_per_second: Mapping[torch.dtype, float]
    """Peak by dtype of the operands; a missing dtype runs at the rate of float32."""
    bytes_per_second: float
    launch_seconds: float
    """Time from the start of one op to the start of the next, if neither does anything."""
    arithmetic_efficiency: float = 0.6
    """Share of the peak that large matrix products reach."""
    bandwidth_efficiency: float = 0.8
    draw_seconds: float = 0.0
    """Time for one random number by torch's generator; 0 where the memory traffic is slower."""
    gpu: Gpu | None = None
    """The row of the table; `None` for a CPU."""

    @property
    def host_bytes_per_second(self) -> float:
        """Bytes per second of copies between a GPU and pinned host memory, each way; infinite for a
        CPU, which is the host."""
        return math.inf if self.gpu is None else (
            self.gpu.host_bytes_per_second * self.bandwidth_efficiency)

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


@dataclass(frozen=True, slots=True)
class Gpu:
    """The figures of a GPU: a row of the table, or one that the user gives as `gpu=`."""

    name: str
    compute_capability: tuple[int, int]
    """As `torch.cuda.get_device_capability` gives it: it decides which kernels there are."""
    memory_bytes: int
    """Total memory as the driver states it; a process gets some hundred MB less."""
    float32_tflops: float
    """Rate of float32 without TF32, as in torch."""
    half_tflops: float
    """Rate of float16, and of bfloat16 unless `bfloat16_tflops` is given."""
    bandwidth_gb: float
    """GB/s."""
    bfloat16_tflops: float | None = None
    float64_tflops: float | None = None
    """`None`: a 32nd of the rate of float32."""
    host_link_gb: float | None = None
    """GB/s each way between GPU and host; `None`: sixteen lanes of PCIe, of generation 5 from
    compute capability 9.0 on, 4 from 8.0, 3 before."""
    multiprocessors: int = 132
    """Number of multiprocessors, which determines the workspace of kernels that sum over blocks."""

    def __post_init__(self) -> None:
        capability = self.compute_capability
        if not (isinstance(capability, tuple) and len(capability) == 2
                and all(isinstance(part, int) for part in capability)):
            raise TypeError("compute_capability must be two whole numbers, such as (9, 0), got "
                            f"{capability!r}")
        for each in ("memory_bytes", "float32_tflops", "half_tflops", "bandwidth_gb",
                     "multiprocessors"):
            if not getattr(self, each) > 0:
                raise ValueError(f"{each} must be above 0, got {getattr(self, each)!r}")
        if self.host_link_gb is not None and not self.host_link_gb > 0:
            raise ValueError(f"host_link_gb must be above 0, got {self.host_link_gb!r}")

    @property
    def threads_of_multiprocessor(self) -> int:
        """Maximum of threads that a multiprocessor runs at a time."""
        capability = self.compute_capability
        if capability == (7, 5):
            return 1024
        is_large = capability[0] in (6, 9, 10) or capability in ((7, 0), (8, 0))
        return 2048 if is_large else 1536

    @property
    def host_bytes_per_second(self) -> float:
        """Nominal bandwidth of the link to the host each way (PCI-SIG: 8, 16 and 32 GT/s a lane in
        generations 3 to 5)."""
        standard = 64 if self.compute_capability >= (9, 0) else (
            32 if self.compute_capability >= (8, 0) else 16)
        return 1e9 * (standard if self.host_link_gb is None else self.host_link_gb)

    def model(self) -> DeviceModel:
        """Throughput of this GPU."""
        half = self.half_tflops
        return DeviceModel(
            name=self.name,
            flops_per_second={
                torch.float32: self.float32_tflops * 1e12,
                torch.float16: half * 1e12,
                torch.bfloat16: (half if self.bfloat16_tflops is None
                                 else self.bfloat16_tflops) * 1e12,
                torch.float64: (self.float32_tflops / 32 if self.float64_tflops is None
                                else self.float64_tflops) * 1e12},
            bytes_per_second=self.bandwidth_gb * 1e9,
            launch_seconds=5e-6, gpu=self)


_GPUS = {gpu.name: gpu for gpu in (
    Gpu("B200", (10, 0), 183359 << 20, 75, 2250, 8000, float64_tflops=37, multiprocessors=148),
    Gpu("H200", (9, 0), 143771 << 20, 67, 989, 4800, float64_tflops=67, multiprocessors=132),
    Gpu("H100", (9, 0), 81559 << 20, 67, 989, 3350, float64_tflops=67, multiprocessors=132),
    Gpu("A100", (8, 0), 81920 << 20, 19.5, 312, 1935, float64_tflops=19.5, multiprocessors=108),
    Gpu("A10G", (8, 6), 23028 << 20, 31.2, 70, 600, multiprocessors=80),
    Gpu("A10", (8, 6), 23028 << 20, 31.2, 125, 600, multiprocessors=72),
    Gpu("L40S", (8, 9), 46068 << 20, 91.6, 362, 864, multiprocessors=142),
    Gpu("L40", (8, 9), 46068 << 20, 90.5, 181, 864, multiprocessors=142),
    Gpu("L4", (8, 9), 23034 << 20, 30.3, 121, 300, multiprocessors=58),
    Gpu("V100", (7, 0), 32510 << 20, 15.7, 125, 900, 15.7, 7.8, multiprocessors=80),
    Gpu("T4", (7, 5), 15360 << 20, 8.1, 65, 320, 8.1, multiprocessors=40),
    Gpu("RTX 5090", (12, 0), 32607 << 20, 104.8, 209.5, 1792, multiprocessors=170),
    Gpu("RTX 4090", (8, 9), 24564 << 20, 82.6, 165.2, 1008, multiprocessors=128),
    Gpu("RTX 4080", (8, 9), 16376 << 20, 48.7, 97.5, 717, multiprocessors=76),
    Gpu("RTX 3090", (8, 6), 24576 << 20, 35.6, 71, 936, multiprocessors=82),
    Gpu("RTX A6000", (8, 6), 49140 << 20, 38.7, 154.8, 768, multiprocessors=84),
    Gpu("P100", (6, 0), 16280 << 20, 9.3, 18.7, 732, 9.3, 4.7, multiprocessors=56),
)}
"""The variant with the most memory, where a product has several."""

_CPU = DeviceModel(
    name="CPU",
    flops_per_second={torch.float32: 120e9, torch.float64: 60e9,
                      torch.bfloat16: 240e9, torch.float16: 60e9},
    bytes_per_second=10e9, launch_seconds=5e-6, draw_seconds=7e-9)
"""A small CPU: two cores with AVX-512.  Only ratios matter to a plan, and they change little
with the number of cores."""


_ASSUMED_GPU = "A100"


def device_model(device: torch.device | str, name: str | None = None, *,
                 gpu: str | Gpu | None = None) -> DeviceModel:
    """The model of `device`, by its product name if it is a GPU.

    `name`: as `torch.cuda.get_device_name` gives it; read from the device if that is here.  A GPU
    that is unknown or not here counts as an A100.  `gpu`: the name or the figures of the GPU to use
    instead; raises `ValueError` if the table lacks it, and if the device is no GPU.
    """
    device = torch.device(device)
    if gpu is not None:
        if device.type == "cpu":
            raise ValueError(f"gpu={known_gpu(gpu).name!r} names a GPU, but the device planned for "
                             "is the CPU: give device='cuda' too, or no gpu")
        return known_gpu(gpu).model()
    if device.type == "cpu":
        return _CPU
    return (_in_table(name or product_name(device)) or _GPUS[_ASSUMED_GPU]).model()


def known_gpu(gpu: str | Gpu) -> Gpu:
    """The row of the table for a name: the row's own, or a product name that contains it; figures
    are returned unchanged.

    Raises `TypeError` or `ValueError` if there is none.
    """
    if isinstance(gpu, Gpu):
        return gpu
    if not isinstance(gpu, str):
        raise TypeError("gpu must be the name of a GPU, such as 'H100', or its figures, a "
                        f"planner.Gpu, got {gpu!r}")
    known = _in_table(gpu)
    if known is None:
        raise ValueError(f"unknown gpu {gpu!r}; known: {', '.join(_GPUS)}; or give the figures of "
                         "one, a planner.Gpu")
    return known


def compute_capability(device: torch.device, gpu: str | Gpu | None = None
                       ) -> tuple[int, int] | None:
    """Compute capability of the GPU that `device_model` uses; `None` for a CPU."""
    found = device_model(device, gpu=gpu).gpu
    return None if found is None else found.compute_capability


def assumption(device: torch.device, gpu: str | Gpu | None = None) -> str | None:
    """Message about the GPU that `device_model` assumes; `None` if it knows the GPU."""
    name = product_name(device)
    if gpu is not None or device.type == "cpu" or _in_table(name):
        return None
    what = f"{name} is not in the table of GPUs" if name else "there is no GPU here to ask"
    return (f"kernels are chosen and seconds estimated for an {_ASSUMED_GPU}, since {what}: gpu= "
            f"names the one to plan for ({', '.join(_GPUS)})")


def product_name(device: torch.device) -> str:
    """Name of the device from its driver; empty if it is not here, or no GPU of CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    return torch.cuda.get_device_name(device)


def _in_table(name: str) -> Gpu | None:
    words = re.sub(r"RTX(?=\w)", "RTX ", name.upper().replace("-", " ")).split()
    for known in sorted(_GPUS, key=len, reverse=True):
        wanted = known.split()
        if any(words[i:i + len(wanted)] == wanted for i in range(len(words))):
            return _GPUS[known]
    return None
