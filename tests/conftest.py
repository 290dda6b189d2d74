"""Options of the whole suite."""

from __future__ import annotations

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each use all cores starve each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forests", type=int, default=2000, help="random forests in tests/attention/test_forests.py")


@pytest.fixture
def num_forests(request: pytest.FixtureRequest) -> int:
    """How many random forests to try."""
    count: int = request.config.getoption("--forests")
    return count
