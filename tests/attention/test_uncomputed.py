"""Choosing the tokens of a step."""

import numpy as np

from prefixkit.attention.uncomputed import choose_queries
from prefixkit.tree.radix import PrefixTree


def tree_of_three():
    """Ten shared tokens, then three branches of four."""
    tree = PrefixTree(64, page_size=4)
    for branch in range(3):
        tree.insert([*range(10), 20 + branch, 1, 2, 3])
    return tree


def runs(tree):
    queries = tree.queries
    return list(zip(queries.node.tolist(), queries.begin.tolist(), queries.end.tolist(), strict=True))


def test_all_uncomputed_tokens_run_when_it_fits():
    snapshot = tree_of_three().snapshot()
    step = choose_queries(snapshot, [], [1, 2, 3], prefill_budget=100)
    assert runs(step) == [(0, 0, 10), (1, 0, 4), (2, 0, 4), (3, 0, 4)]
    assert step.last_rows().tolist() == [9, 13, 17, 21]


def test_a_budget_is_spent_depth_first_and_nothing_runs_below_an_incomplete_node():
    tree = tree_of_three()
    assert runs(choose_queries(tree.snapshot(), [], [], prefill_budget=6)) == [(0, 0, 6)]
    tree.mark_computed([tree.nodes()[0]], [6])
    snapshot = tree.snapshot()
    step = choose_queries(snapshot, [], [], prefill_budget=7)
    assert runs(step) == [(0, 6, 10), (1, 0, 3)]
    assert step.last_rows().tolist() == [3, -1, -1, -1]


def test_sampled_tokens_run_beside_the_budget():
    tree = tree_of_three()
    nodes = tree.nodes()
    tree.mark_computed([nodes[0], nodes[1]], [10, 3])
    step = choose_queries(tree.snapshot(), [1], [], prefill_budget=5)
    assert runs(step) == [(1, 3, 4), (2, 0, 4), (3, 0, 1)]


def test_a_known_token_runs_again_only_where_its_logits_are_asked_for():
    tree = tree_of_three()
    nodes = tree.nodes()
    tree.mark_computed(nodes, [node.length for node in nodes])
    assert choose_queries(tree.snapshot(), [], [], prefill_budget=5) is None
    assert runs(choose_queries(tree.snapshot(), [], [2], prefill_budget=5)) == [(2, 3, 4)]


def test_a_thousand_leaves_run_as_a_thousand_rows():
    tree = PrefixTree(4096)
    prompt = tree.insert(np.arange(8))
    leaves = tree.fork(prompt, 1000)
    tree.extend_each(leaves, np.arange(1000))
    tree.mark_computed([prompt.node], [8])
    snapshot = tree.snapshot()
    step = choose_queries(snapshot, range(1, 1001), [], prefill_budget=1)
    assert step.queries.num_rows == 1000
    assert step.last_rows().tolist() == [-1, *range(1000)]


def test_sampled_tokens_run_below_a_prompt_whose_last_token_must_wait_to_run_again():
    """A prompt that ends where a sample's tokens go on has its KV already, and takes its turn behind other prompts."""
    tree = PrefixTree(64, page_size=4)
    for tokens in ([9] * 4, range(10), [*range(10), 20]):
        tree.insert(tokens)
    tree.mark_computed([tree.nodes()[1]], [10])
    snapshot = tree.snapshot()
    step = choose_queries(snapshot, [2], [0, 1], prefill_budget=4)
    assert runs(step) == [(0, 0, 4), (2, 0, 1)]
    assert step.last_rows().tolist() == [3, -1, 4]
