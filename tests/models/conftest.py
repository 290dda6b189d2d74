"""Fixtures of the tests of models."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.models.driver import TreeDriver, dense
from tests.models.tiny_families import make_model


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture
def drive() -> type[TreeDriver]:
    return TreeDriver


@pytest.fixture
def dense_logits() -> Callable[[nn.Module, list[int]], Tensor]:
    return dense


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def dynamo() -> None:
    """The compiler without what earlier tests have left in it."""
    torch._dynamo.reset()
