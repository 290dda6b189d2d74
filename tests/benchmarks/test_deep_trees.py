"""Random deep trees of the benchmark: what their names mean, and plans that share nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np

from benchmarks.deep_trees import MOST_TOKENS, Unshared, names
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.testing.named_trees import leaf_queries, lineages, tree_of


def test_what_beams_leave_are_the_paths_of_the_last_ones():
    parents = np.random.default_rng(3).integers(5, size=(40, 5))
    beam_of = {0: [[beam] for beam in range(5)]}  # of each beam, the beams it goes through, by step
    for step, above in enumerate(parents, 1):
        beam_of[step] = [[*beam_of[step - 1][parent], beam] for beam, parent in enumerate(above.tolist())]
    paths = [tuple(path) for path in beam_of[40]]
    nodes = lineages(parents)
    tokens = {path[: end + 1] for path in paths for end in range(len(path))}
    assert sum(count for _, count in nodes) == len(tokens)
    parent = np.array([above for above, _ in nodes])
    assert np.count_nonzero(~np.isin(np.arange(1, len(nodes) + 1), parent)) == len(paths), "leaves"
    children = Counter(path[:-1] for path in tokens)
    begin = sum(count for path, count in children.items() if not path or count > 1)
    assert len(nodes) == begin, "a node begins at the root, and where a path forks"


def test_names_are_of_trees_that_can_be_read_without_sharing():
    found = names(40, seed=1)
    assert found == names(40, seed=1) != names(40, seed=2)
    assert {name.split()[0] for name in found} == {"spine", "beams"}
    for name in found[:8]:
        snapshot = tree_of(name)
        leaves = leaf_queries(snapshot).node
        assert int((snapshot.start + snapshot.length)[leaves].sum()) <= 1.1 * MOST_TOKENS
        if name.startswith("beams"):
            assert set((snapshot.start + snapshot.length)[leaves].tolist()) == {2000 + int(name.split()[2][1:])}


def test_a_plan_that_shares_nothing_has_no_tiles():
    snapshot = tree_of("spine p64 d80 t1-4 s1-4")
    tree = StepTree(snapshot, leaf_queries(snapshot))
    shape = HeadShape(32, 8, 128, 2)
    tiles, items, *_ = Unshared(shape, H200, 132).specify(tree).counts.tolist()
    assert tiles == 0
    assert items >= len(leaf_queries(snapshot).node)
