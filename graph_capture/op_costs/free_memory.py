"""The free memory of a device right now, to decide which ops may safely be run."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` without evicting anything; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        limits = [limit for limit in (_available_bytes(), _left_in_control_group_bytes())
                  if limit is not None]
        return min(limits, default=0)
    return 0


def _available_bytes() -> int | None:
    """Available memory as Linux reports it; elsewhere a cautious constant."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 2**31


def _left_in_control_group_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that the container's limit leaves; `None` if there is no limit."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None
