"""Everything in this folder needs a CUDA device, and is skipped without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

try:
    import cuda.core  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked mode, as with PREFIXKIT_CHECK=1."""
    monkeypatch.setattr("prefixkit.backends.cuda.checks._check", True)


@pytest.fixture
def num_gpu_forests() -> int:
    """How many random forests to try, for each dtype and backend."""
    return int(os.environ.get("PREFIXKIT_GPU_FORESTS", "25"))
