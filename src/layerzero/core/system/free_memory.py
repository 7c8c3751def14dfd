"""What memory a device has left: the machine's or its control group's for a CPU, the driver's for a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from layerzero.core.device import Device
from layerzero.core.system import control_group

_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> float:
    """What processes can still get without another one losing it; infinite where the system does not say."""
    return min(_of_machine(), control_group.available_bytes())


def free_bytes(device: Device) -> float:
    """What a call on a device can still get: for a GPU also what its allocator keeps; infinite where nothing says."""
    if device.torch_type == "cpu":
        return available_bytes()
    if device.torch_type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return math.inf
    kept = torch.cuda.memory_reserved(device.index) - torch.cuda.memory_allocated(device.index)
    return float(torch.cuda.mem_get_info(device.index)[0] + kept)


def _of_machine() -> float:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024.0
    except (OSError, KeyError, ValueError):  # another system, or an old one
        return math.inf
