"""Which weights may be moved in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from prefixkit.models.joint import movable


@pytest.fixture
def weights():
    return [nn.Parameter(torch.randn(4, 8)) for _ in range(3)]


def test_weights_that_nobody_else_holds(weights):
    assert movable(weights)


def test_weights_that_somebody_else_holds(weights):
    held = weights[1].detach()
    assert not movable(weights)
    del held
    assert movable(weights)


def test_a_weight_cannot_lie_in_two_places(weights):
    """Counted twice, it would make up for whoever else holds it."""
    held = weights[0].detach()
    assert not movable([weights[0], *weights])
    del held
    assert not movable([weights[0], *weights])


def test_memory_that_other_processes_share_stays(weights):
    weights[2].data.share_memory_()
    assert not movable(weights)
