"""A machine with other GPUs than this one, as far as torch and the driver say."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


def pretend(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Let torch see one GPU of each compute capability, or none."""
    answers = {
        "is_available": lambda: bool(capabilities),
        "device_count": lambda: len(capabilities),
        "get_device_name": lambda device=None: "Test GPU",
        "synchronize": lambda device=None: None,
        "get_device_capability": lambda device=None: capabilities[getattr(device, "index", device) or 0],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def pretend_to_launch(
    monkeypatch: pytest.MonkeyPatch, by: ModuleType, load: Callable[..., Any], launch: Callable[..., Any]
) -> None:
    """Let the kernels that ``by`` launches be those of ``load(unit, device)``, which ``launch`` runs."""
    monkeypatch.setattr("prefixkit.cuda.jit.load", load)
    monkeypatch.setattr(by, "launch", launch)
