"""A machine with other GPUs than this one, as far as torch says."""

from __future__ import annotations

import pytest
import torch


def pretend(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Let torch see one GPU of each compute capability, or none."""
    answers = {
        "is_available": lambda: bool(capabilities),
        "device_count": lambda: len(capabilities),
        "get_device_name": lambda device=None: "Test GPU",
        "get_device_capability": lambda device=None: capabilities[getattr(device, "index", device) or 0],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
