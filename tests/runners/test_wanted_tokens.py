"""Steps over what is uncomputed and what is wanted: each token once, in steps of at most so many."""

import numpy as np
import pytest

from prefixkit.runners.batch import Outputs
from prefixkit.runners.wanted_tokens import compute_wanted
from prefixkit.testing.fake_model import make_engine


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
