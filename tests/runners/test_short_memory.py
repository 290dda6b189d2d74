"""Short steps of several processes, one of which has no memory; and what their plans may take of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.agreement import Alone
from prefixkit.attention.gpu.capacity import MOST_PARTIAL_BYTES
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.visible import ALL, Visible
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.runners.graph_arrays import ShortTree
from prefixkit.runners.short_steps import USES
from prefixkit.testing.forests import make_snapshot
from tests.runners.stand_ins import Capturing
from tests.runners.test_short_steps import HEAD, assert_first_tokens, fresh


class OneOfTwo(Alone):
    """The agreement of one of two processes, which are threads here; without an answer from the other one it raises."""

    processes = 2

    def __init__(self, rank, barrier, numbers):
        self.rank, self.barrier, self.numbers = rank, barrier, numbers

    def least(self, number):
        self.numbers[self.rank] = number
        self.barrier.wait()
        least = min(self.numbers)
        self.barrier.wait()
        return least


class OutOfMemoryOnce:
    """Calls a function, but not at first."""

    def __init__(self, function):
        self.function, self.called = function, False

    def __call__(self, *args, **options):
        if not self.called:
            self.called = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return self.function(*args, **options)


@pytest.mark.parametrize("where", ["buffers", "check", "step", "capture"])
def test_processes_of_one_model_go_on_alike_where_one_of_them_has_no_memory(where, decoding):
    """A process that alone gave up, or alone left out a check, would wait for an answer of the other for ever."""
    barrier, numbers = threading.Barrier(2, timeout=10), [0, 0]
    no_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    captured = Capturing(no_memory if where == "capture" else None)
    pair = [decoding(short=4096)[0], decoding(captured, short=4096)[0]]
    short, planning = pair[1].runner.eager.graphs, pair[1].runner.plannings[0]
    places = {"buffers": (planning, "planner"), "check": (short, "plain"), "step": (short, "model")}
    if where in places:
        owner, name = places[where]
        setattr(owner, name, OutOfMemoryOnce(getattr(owner, name)))

    def calls(rank):
        made, rng = pair[rank], np.random.default_rng(10)
        made.runner.eager.graphs.agreement = OneOfTwo(rank, barrier, numbers)
        assert_first_tokens(made, [HEAD])
        counts = []
        for _ in range(18 * USES):
            assert_first_tokens(made, [fresh(rng, 9)])
            counts.append((made.runner.graphs.captures, made.runner.graphs.replays))
        return counts

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(calls, range(2))
    assert first == second
    assert first[USES] == (0, 0) and first[-1] >= (1, 1), "without a graph at first, with one later"


@pytest.mark.parametrize("branches", [1, 40])
@pytest.mark.parametrize("visible", [ALL, Visible(window=8)], ids=str)
def test_short_steps_over_long_dialogues_take_no_more_memory_than_is_left_for_graphs(branches, visible):
    """Attention allocates as many partial states as a plan may have: not one for each row and node above it.

    Of layers that see a part of the 200 nodes any length must fit, so they have no such graphs.
    """
    shape = HeadShape(32, 8, 128, 2)
    planner = CudaPlanner(shape, H200, 132, lambda *_: [], visible)
    parents, lengths = [*range(-1, 199), *[199] * branches], [40] * 200 + [480 // branches] * branches
    snapshot, _ = make_snapshot(np.random.default_rng(14), parents, lengths, 16, orderly=True)
    own = np.arange(200, 200 + branches, dtype=np.int32)
    snapshot = replace(snapshot, computed=np.where(np.arange(len(parents)) < 200, 40, 0).astype(np.int32))
    tree = StepTree(snapshot, Queries(own, np.zeros_like(own), snapshot.length[own]))
    if branches == 1 and visible is not ALL:
        with pytest.raises(torch.OutOfMemoryError, match=r"partial states of attention may take \d{4} MiB"):
            ShortTree(tree, 512, [planner], torch.device("cpu"))
        return
    made = ShortTree(tree, 512, [planner], torch.device("cpu"))
    assert made.holds(tree)
    assert made.kinds[0].planner.capacity.partials * shape.partial_bytes <= MOST_PARTIAL_BYTES
