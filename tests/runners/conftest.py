"""Engines that decode by graphs, without a GPU."""

from __future__ import annotations

import pytest

from prefixkit.runners import graph_arrays
from prefixkit.runners.batch import Pace
from prefixkit.testing.fake_model import make_engine
from tests.runners.stand_ins import Capturing, graph_runner


@pytest.fixture
def decoding(monkeypatch):
    """A function that makes an engine which decodes by graphs that a stand-in captures, and its fake model."""
    monkeypatch.setattr(graph_arrays, "BUCKETS", (1, 2, 3, 5, 8, 13, 21, 34))

    def make(capturing=None, steps=None, **options):
        runs = {name: options.pop(name) for name in ("least_rows", "weights", "moves", "short") if name in options}
        made, model = make_engine(**options)
        run = model if steps is None else lambda step: steps(model, step)
        capturing = Capturing() if capturing is None else capturing
        made.runner = graph_runner(made, run, capturing, pace=Pace(ahead=2, slack=2, waited_for=8), **runs)
        return made, model

    return make
