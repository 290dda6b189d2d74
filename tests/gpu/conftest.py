"""Everything in this folder needs a CUDA device, and is skipped without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prefixkit.checking import checked_mode
from prefixkit.ops import backend

HERE = Path(__file__).parent

try:
    import cuda.core  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, cuda = f"{HERE}{os.sep}", torch.cuda.is_available()
    for item in items:
        if str(item.path).startswith(here):  # to make the parents of 12,000 paths takes half a second
            item.add_marker(pytest.mark.gpu)
            if not cuda:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    """Processes share the GPU: what torch holds of a large test is given back."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def checked() -> Iterator[None]:
    """Checked mode, as with PREFIXKIT_CHECK=1."""
    with checked_mode():
        yield


@pytest.fixture(params=["cuda", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each test runs with both backends."""
    monkeypatch.setenv(backend.VARIABLE, request.param)
    backend.choose_again()
    yield request.param
    backend.choose_again()


@pytest.fixture
def num_gpu_forests() -> int:
    """How many random forests to try, for each dtype and backend."""
    return int(os.environ.get("PREFIXKIT_GPU_FORESTS", "25"))
