"""Trees that grow on the device: positions, slots and lengths are those of the tree itself, step after step."""

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import StepTree, decode_tree
from prefixkit.runners.decode_tree import BatchTooLarge, DecodeTree, TreeCapacity
from prefixkit.tree.radix import PrefixTree, Sequence
from tests.seeds import seeds


def make_batch(
    rng: np.random.Generator, page_size: int, most_steps: int
) -> tuple[PrefixTree, list[Sequence], StepTree]:
    """Some prompts, each with samples of a few tokens, the last of them uncomputed; pages for ``most_steps`` more."""
    tree = PrefixTree(4096, page_size)
    head = rng.integers(0, 50, rng.integers(1, 40))
    samples: list[Sequence] = []
    for _ in range(rng.integers(1, 5)):
        prompt = tree.insert(np.concatenate([head, rng.integers(0, 50, rng.integers(1, 20))]))
        samples += tree.fork(prompt, int(rng.integers(1, 7)))
    for _ in range(rng.integers(1, 2 * page_size + 2)):
        tree.extend_each(samples, rng.integers(0, 50, len(samples)))
    own = {sample.node for sample in samples}
    nodes = tree.nodes()
    tree.mark_computed(nodes, [node.length - (node in own) for node in nodes])
    samples.sort(key=lambda sample: sample.node.index)
    tree.reserve(samples, [most_steps] * len(samples))
    return tree, samples, decode_tree(tree.snapshot(), np.array([s.node.index for s in samples], np.int32))


def truth(batch: StepTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, slots and visible lengths of the batch's step, from its snapshot."""
    tree, offset = batch.snapshot, batch.snapshot.length[batch.queries.node] - 1
    visible = tree.computed.copy()
    visible[batch.queries.node] = tree.length[batch.queries.node]
    return tree.start[batch.queries.node] + offset, tree.slots(batch.queries.node, offset), visible


@seeds(12)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_every_step_is_that_of_the_grown_tree_and_rows_can_leave(seed: int, page_size: int) -> None:
    print("seed", seed)
    rng, most = np.random.default_rng(seed), 9
    _, samples, batch = make_batch(rng, page_size, most)
    here = DecodeTree(TreeCapacity(64, 128, 2048), page_size, "cpu")
    here.upload(batch)
    for step in range(most):
        batch.check()
        here.sampled = torch.from_numpy(rng.integers(-1, 50, 64))
        here.advance(64)
        assert (
            here.tokens[: batch.queries.num_rows].tolist()
            == here.sampled[: batch.queries.num_rows].clamp(min=0).tolist()
        )
        assert (here.tokens[batch.queries.num_rows :] == 0).all()
        positions, slots, visible = truth(batch)
        assert here.positions[: batch.queries.num_rows].tolist() == positions.tolist()
        assert here.slots[: batch.queries.num_rows].tolist() == slots.tolist()
        assert here.nodes[1][: batch.snapshot.num_nodes].tolist() == visible.tolist()
        assert (here.slots[batch.queries.num_rows :] == -1).all() and (
            here.positions[batch.queries.num_rows :] == 0
        ).all()
        batch = batch.grown(1)
        if step % 3 == 2 and batch.queries.num_rows > 1:
            rows = np.sort(rng.choice(batch.queries.num_rows, batch.queries.num_rows - 1, replace=False))
            path = [(samples[row], int(batch.snapshot.length[batch.queries.node[row]])) for row in rows]
            batch, samples = batch.select_rows(rows), [samples[row] for row in rows]
            assert [int(n) for n in batch.snapshot.length[batch.queries.node]] == [length for _, length in path]
            here.upload(batch)


@pytest.mark.parametrize("seed", range(6))
def test_a_kept_batch_is_the_tree_of_the_rows_that_stay(seed: int) -> None:
    """As if the others had been released, but that nodes above them are not merged."""
    rng = np.random.default_rng(seed)
    _, _, batch = make_batch(rng, 4, 5)
    rows = np.flatnonzero(rng.random(batch.queries.num_rows) < 0.6)
    chosen = batch.select_rows(rows)

    def path(one: StepTree, node: int) -> list[tuple[int, ...]]:
        tree, found = one.snapshot, []
        while node >= 0:
            pages = tree.pages[tree.page_indptr[node] : tree.page_indptr[node + 1]].tolist()
            found.append((int(tree.start[node]), int(tree.length[node]), int(tree.first_slot[node]), *pages))
            node = int(tree.parent[node])
        return found

    assert [path(chosen, int(n)) for n in chosen.queries.node] == [
        path(batch, int(n)) for n in batch.queries.node[rows]
    ]
    tree, nodes = chosen.snapshot, np.arange(chosen.snapshot.num_nodes)
    for node in nodes:
        inside = (nodes > node) & (nodes < tree.subtree_end[node])
        assert all(inside[n] for n in nodes if tree.parent[n] == node), "children lie in the subtree"
        assert all(tree.parent[n] >= node for n in nodes[inside]), "and nothing else does"
    assert len(tree.sequence_node) == 0
    assert chosen.snapshot.tree is not batch.snapshot.tree


def test_a_row_without_a_page_for_its_token_stands_still() -> None:
    _, _, batch = make_batch(np.random.default_rng(3), 4, 0)
    here = DecodeTree(TreeCapacity.of(batch), 4, "cpu")
    here.upload(batch)
    for _ in range(6):
        here.advance(batch.queries.num_rows)
        batch = batch.grown(1)
    assert (here.slots == -1).all()
    capacity = (
        np.diff(batch.snapshot.page_indptr)[batch.queries.node] * 4 - batch.snapshot.first_slot[batch.queries.node]
    )
    assert (
        here.nodes[1][batch.queries.node].tolist()
        == capacity.tolist()
        == batch.snapshot.length[batch.queries.node].tolist()
    )
    assert (here.positions.numpy() == (batch.snapshot.start[batch.queries.node] + capacity - 1)).all()


@pytest.mark.parametrize("ahead", range(1, 7))
def test_a_row_without_a_page_writes_nothing_after_its_tree_is_uploaded_again(ahead: int) -> None:
    """At the slot of its last token, which has KV, it would write the KV of the token after it."""
    _, _, batch = make_batch(np.random.default_rng(3), 4, 3)
    one, other = (DecodeTree(TreeCapacity.of(batch), 4, "cpu") for _ in range(2))
    one.upload(batch)
    for _ in range(ahead):
        one.advance(batch.queries.num_rows)
    other.upload(batch.grown(ahead))
    for here in (one, other):
        here.advance(batch.queries.num_rows)
    assert one.slots.tolist() == other.slots.tolist() and one.positions.tolist() == other.positions.tolist()
    assert one.nodes[1].tolist() == other.nodes[1].tolist()


def test_a_batch_that_does_not_fit_is_refused_by_name() -> None:
    _, _, batch = make_batch(np.random.default_rng(1), 4, 2)
    need = TreeCapacity.of(batch)
    here = DecodeTree(TreeCapacity(need.rows, need.nodes, need.pages - 1), 4, "cpu")
    with pytest.raises(BatchTooLarge, match=f"pages={need.pages}"):
        here.upload(batch)
    assert (here.leaf == -1).all()
