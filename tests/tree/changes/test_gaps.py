"""Tokens in the middle of a sequence that go: their pages are free, everything else stays as it was."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import PrefixTree
from prefixkit.tree.changes.gaps import drop_between
from tests.tree.model import assert_snapshot_is_fresh, fingerprint


def computed(tree: PrefixTree) -> None:
    nodes = tree.nodes()
    tree.mark_computed(nodes, [node.length for node in nodes])


def positions(tree: PrefixTree) -> list[tuple[int, int]]:
    snapshot = tree.snapshot()
    return list(zip(snapshot.start.tolist(), snapshot.length.tolist(), strict=True))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("sinks", [0, 1, 4, 6])
def test_a_long_sequence_holds_its_first_tokens_and_its_last(page_size: int, sinks: int) -> None:
    """Pages held are flat while it grows, and every token that is left keeps its position and its slot."""
    tree = PrefixTree(64, page_size)
    sample = tree.insert(np.arange(1, 9))
    window, most = 20, 0
    slot_of: dict[int, int] = {}
    for token in range(max(40, 12 * page_size)):
        tree.extend_each([sample], [token % 7])
        computed(tree)
        drop_between(tree, sample, sinks, sample.length - window)
        check_tree(tree)
        assert_snapshot_is_fresh(tree)
        assert sample.length == 9 + token
        held = {node.start + i: slot for node in sample.path() for i, slot in enumerate(node.slots.tolist())}
        assert set(held) >= {*range(min(sinks, sample.length)), *range(max(0, sample.length - window), sample.length)}
        assert all(slot_of.setdefault(position, slot) == slot for position, slot in held.items())
        most = max(most, tree.allocator.num_pages - tree.allocator.free)
    assert most <= -(-sinks // page_size) + -(-window // page_size) + 2 and sample.length > window + sinks
    tree.release(sample)
    assert tree.allocator.free == 64


def test_only_whole_pages_of_a_leaf_of_its_own_go() -> None:
    tree = PrefixTree(64, 4)
    first = tree.insert(range(30))
    computed(tree)
    (second,) = tree.fork(first)
    before = fingerprint(tree)
    assert drop_between(tree, first, 4, 20) == 0, "another sequence ends there"
    assert fingerprint(tree) == before
    tree.release(second)
    before = fingerprint(tree)
    assert drop_between(tree, first, 4, 7) == drop_between(tree, first, 5, 11) == 0, "no page is full"
    assert fingerprint(tree) == before
    assert drop_between(tree, first, 5, 12) == 1  # slots 8 to 11
    assert positions(tree) == [(0, 5), (12, 18)]
    assert drop_between(tree, first, 5, 12) == 0, "they are gone"


def test_what_is_not_computed_and_the_last_token_stay() -> None:
    tree = PrefixTree(64, 4)
    one = tree.insert(range(32))
    assert drop_between(tree, one, 4, 32) == 0
    tree.mark_computed([one.node], [17])
    assert drop_between(tree, one, 4, 32) == 3  # up to position 16
    computed(tree)
    assert drop_between(tree, one, 4, 99) == 3  # up to position 28
    assert positions(tree) == [(0, 4), (28, 4)]


def test_behind_a_gap_nothing_is_found_or_retained() -> None:
    tree = PrefixTree(64, 4)
    one, tokens = tree.insert(range(40)), np.arange(40)
    computed(tree)
    drop_between(tree, one, 6, 24)
    assert tree.match(tokens).length == 6
    other = tree.insert(tokens)  # beside what is left, and shares its first tokens alone
    check_tree(tree)
    assert positions(tree) == [(0, 6), (24, 16), (6, 34)]
    with pytest.raises(ValueError, match=r"holds no tokens before position 24 .* released once no query saw them"):
        one.tokens()
    with pytest.raises(ValueError, match="holds no tokens before position 24"):
        one.slots()
    assert other.tokens().tolist() == tokens.tolist()
    tree.release(other)
    node = tree.retain(one)
    assert node is not None and (node.start, node.length, node.cached) == (0, 6, True)
    check_tree(tree)
    assert tree.match(tokens).length == 6 and tree.allocator.free == 62


def test_what_is_retained_below_a_gap_ends_above_it() -> None:
    tree = PrefixTree(64, 4)
    one = tree.insert(range(40))
    computed(tree)
    drop_between(tree, one, 6, 24)
    forks = tree.fork(one, 2)
    tree.extend_each([one, *forks], [1, 2, 3])
    computed(tree)
    assert tree.retain(forks[0]) is not None
    check_tree(tree)
    tree.release(forks[1])  # the last child goes back into the node behind the gap
    check_tree(tree)
    assert [node.cached for node in tree.every_node()] == [False, True, False]
    assert one.length == 41


def test_a_sequence_is_trimmed_on_either_side_of_a_gap_but_not_into_it() -> None:
    tree = PrefixTree(64, 4)
    one = tree.insert(range(40))
    computed(tree)
    drop_between(tree, one, 6, 24)
    before = fingerprint(tree)
    for length in (7, 24):
        with pytest.raises(ValueError, match=rf"cannot trim sequence \d+ to {length} tokens: the last of these were"):
            tree.trim(one, length)
    assert fingerprint(tree) == before
    tree.trim(one, 30)
    assert positions(tree) == [(0, 6), (24, 6)]
    tree.trim(one, 6)
    check_tree(tree)
    assert one.tokens().tolist() == [*range(6)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(8))
def test_trees_with_gaps_stay_consistent(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    tree = PrefixTree(400, int(rng.integers(1, 6)))
    live = [tree.insert(rng.integers(0, 3, rng.integers(1, 40))) for _ in range(3)]
    for _ in range(120):
        kind, one = rng.integers(8), live[int(rng.integers(len(live)))]
        if kind == 0:
            live.append(tree.insert(rng.integers(0, 3, rng.integers(1, 40))))
        elif kind == 1:
            live += tree.fork(one, int(rng.integers(1, 3)))
        elif kind == 2 and len(live) > 1:
            live.remove(one)
            (tree.release, tree.retain)[int(rng.integers(2))](one)
        elif kind == 3:
            tree.compact(tree.allocator.free)
        elif kind == 4:
            computed(tree)
        else:
            length, before = one.length, tree.allocator.free
            freed = drop_between(tree, one, int(rng.integers(0, 8)), int(rng.integers(0, one.length + 1)))
            assert freed == tree.allocator.free - before and one.length == length
            tree.extend_each(live, rng.integers(0, 3, len(live)))
        if tree.allocator.free < 100:
            live = [tree.release(other) for other in live[2:]] and live[:2]
        check_tree(tree)
        assert_snapshot_is_fresh(tree)
    for one in live:
        tree.release(one)
    assert tree.allocator.free + len({p for node in tree.every_node() for p in node.pages.tolist()}) == 400
