"""Fixtures of the tests of models."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
import torch._dynamo.guards  # by now, for tests/conftest.py changes it
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
def scaled_twice(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Makes the eager attention function of a module of transformers scale by twice what it is asked to."""

    def change(module: ModuleType) -> None:
        eager = module.eager_attention_forward
        twice = lambda *args, **given: eager(*args, **given | {"scaling": 2 * given["scaling"]})  # noqa: E731
        monkeypatch.setattr(module, "eager_attention_forward", twice)

    return change


@pytest.fixture
def dynamo() -> None:
    """The compiler without what earlier tests have left in it."""
    torch._dynamo.reset()
