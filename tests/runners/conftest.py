"""Engines that decode by graphs, without a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from prefixkit.engine.decode_run import DecodeSettings
from prefixkit.runners import graph as graphs
from prefixkit.runners import graph_arrays
from tests.engine.fake_model import make_engine
from tests.runners.stand_ins import Decoder, Planning, Ring


@pytest.fixture
def decoding(monkeypatch):
    """A function that makes an engine which decodes by such graphs, and its fake model."""
    monkeypatch.setattr(graph_arrays, "BUCKETS", (1, 2, 3, 5, 8, 13, 21, 34))
    monkeypatch.setattr(graph_arrays, "Ring", Ring)
    monkeypatch.setattr(graphs, "_no_waiting", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))

    def make(**options):
        made, model = make_engine(settings=DecodeSettings(fewest_steps=1, slack=2), **options)
        made.decoder = Decoder(model, Planning(made.planner), made.tree.page_size, "cpu")
        return made, model

    return make
