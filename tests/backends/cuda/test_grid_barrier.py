"""Counters of grid barriers: one for each stream and each graph, whatever threads ask, and in whichever order."""

import threading
from contextlib import suppress

import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda.grid_barrier import BarrierCounters
from prefixkit.cuda.launch import CudaError
from tests.fake_gpu import pretend


@pytest.fixture
def counters(monkeypatch):
    pretend(monkeypatch)
    return BarrierCounters(torch.device("cpu"))


def test_there_is_a_counter_for_every_graph_however_many_are_captured(counters):
    """As long as something runs without a graph now and then, which alone can allocate."""
    with pytest.raises(CudaError, match="call it once before"):
        counters.address(("graph", -1), capturing=True)
    alone = counters.address(7, capturing=False)
    assert counters.address(7, capturing=False) == alone
    seen, graphs = {alone}, 10_000
    for number in range(graphs):
        seen.add(counters.address(("graph", number), capturing=True))
        if number % 1000 == 0:
            assert counters.address(7, capturing=False) == alone
    assert len(seen) == 1 + graphs, "no two share one"


def test_a_refused_graph_leaves_later_owners_counters_of_their_own(counters):
    counters.address(0, capturing=False)
    seen = set()
    for number in range(10_000):  # more than were allocated: the last ones are refused
        try:
            seen.add(counters.address(("graph", number), capturing=True))
        except CudaError:
            break
    taken = len(seen)
    seen |= {counters.address(stream, capturing=False) for stream in range(1, 100)}
    assert len(seen) == taken + 99


class Meeting(int):
    """A stream whose thread meets the others where a table looks it up, if nothing keeps them apart."""

    place: threading.Barrier

    def __hash__(self):
        with suppress(threading.BrokenBarrierError):
            self.place.wait(timeout=0.05)
        return int.__hash__(self)


def test_two_threads_that_ask_together_get_two_counters(counters):
    """Launches of their streams overlap: with one counter, blocks of one launch would go on for those of the other."""
    counters.address(0, capturing=False)
    for first in range(1, 40, 2):
        Meeting.place, found = threading.Barrier(2), []

        def ask(stream, found=found):
            found.append(counters.address(stream, capturing=False))

        threads = [threading.Thread(target=ask, args=(Meeting(first + number),)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 2, first
