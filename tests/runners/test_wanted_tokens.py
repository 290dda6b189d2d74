"""Steps over what is uncomputed and what is wanted: each token once, in steps of at most so many."""

import numpy as np
import pytest

from prefixkit.runners.batch import Outputs
from prefixkit.runners.wanted_tokens import compute_wanted
from prefixkit.testing.fake_model import make_engine
from prefixkit.tree.spelling import Spelling


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("most_wanted", [1, 2, 100])
def test_steps_are_within_their_bounds_and_each_wanted_token_runs_once(chunk, most_wanted):
    engine, model = make_engine()
    tree = engine.store.tree
    for branch in range(3):
        tree.insert([*range(10), 20 + branch, 1, 2, 3])
    tree.snapshot()
    nodes = tree.nodes()
    tree.mark_computed(nodes[:2], [10, 2])
    wanted = [(3, 3), (0, 7), (1, 1), (0, 2), (3, 0), (0, 7), (1, 3)]  # nodes, and places in them
    rows_of = {}

    def outputs(rows, which):
        rows_of.update(zip(which.tolist(), rows.tolist(), strict=True))
        return Outputs(np.unique(rows))

    node, offset = np.array(wanted).T
    given = []
    for batch, which in compute_wanted(engine.runner, tree, node, offset, outputs, chunk, most_wanted):
        queries = batch.tree.queries
        runs = zip(queries.node.tolist(), queries.begin.tolist(), queries.end.tolist(), strict=True)
        places = [(node, at) for node, begin, end in runs for at in range(begin, end)]
        assert len(places) <= chunk
        assert len({wanted[number] for number in which.tolist()}) <= most_wanted
        assert all(places[rows_of[number]] == wanted[number] for number in which.tolist())
        given += which.tolist()
        if len(which):
            engine.runner.read()
    assert sorted(given) == list(range(len(wanted)))
    assert all(node.computed == node.length for node in nodes)
    assert max(model.computed.values()) == 1


@pytest.mark.parametrize("most_wanted", [1, 2, 3, 100])
def test_of_a_span_more_may_be_wanted_than_a_step_gives(most_wanted):
    """Then its tokens run as a whole, and those after which more is wanted once more."""
    engine, model = make_engine()
    tree = engine.store.tree
    tree.spelling = Spelling(lambda length: np.array([[1, 6]]))
    (node,) = [tree.insert(range(8)).node]
    given, ran = [], []
    places = np.arange(8)

    def outputs(rows, which):
        return Outputs(np.unique(rows))

    steps = compute_wanted(engine.runner, tree, places * 0, places, outputs, 5, most_wanted)
    for batch, which in steps:
        ((begin, end),) = zip(batch.tree.queries.begin.tolist(), batch.tree.queries.end.tolist(), strict=True)
        ran.append((begin, end))
        assert len(which) <= most_wanted
        given += which.tolist()
        if len(which):
            engine.runner.read()
    assert given == [*range(8)]
    assert node.computed == 8
    assert all(begin >= 6 or end <= 1 or end >= 6 or begin > 1 for begin, end in ran)
    assert next(end for begin, end in ran if end > 1) >= 6, "what is computed first is all of the span"
