"""Memory that is free on devices."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch


def free_memory(device: torch.device) -> int:
    """Bytes free on a device, including memory that torch's allocator has reserved but does not use."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(spare)
    try:
        with open("/proc/meminfo") as meminfo:
            return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_for(shares: Mapping[torch.device, float], beside: int = 0) -> int:
    """The most bytes that fit if each device holds its share of them: the device with the least room decides.

    On one device, whose share is 1, these are all free bytes.

    Args:
        shares: The share of each device, above 0.
        beside: Bytes that each device must leave free; the result has them once, so that callers subtract them as on
            one device.
    """
    return beside + min(int((free_memory(device) - beside) / share) for device, share in shares.items())
