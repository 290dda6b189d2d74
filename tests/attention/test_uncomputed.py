"""Choosing the tokens of a step."""

import numpy as np

from prefixkit.attention.uncomputed import choose_queries
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.spelling import Spelling


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


def tree_with_spans():
    """Tokens 2 to 6 and 7 to 9 of a text of twelve see one another, and are of two spans."""
    tree = PrefixTree(64, page_size=4)
    tree.spelling = Spelling(lambda length: np.array([[2, 7], [7, 10]]))
    return tree, tree.insert(range(12))


def test_a_budget_ends_where_spans_do():
    tree, sequence = tree_with_spans()
    for budget, ends in ((12, [12]), (9, [7, 12]), (5, [2, 7, 12]), (3, [2, 7, 10, 12]), (1, [1, 2, 7, 10, 11, 12])):
        found = []
        tree.mark_computed([sequence.node], [0])
        while (
            step := choose_queries(tree.snapshot(), [], [], budget, texts=(tree.spelling, tree.nodes()))
        ) is not None:
            ((_, begin, end),) = runs(step)
            assert begin == (found[-1] if found else 0)
            found.append(end)
            tree.mark_computed([sequence.node], [end])
        assert found == ends, "spans that are longer than the budget run alone"


def test_a_span_that_does_not_fit_beside_others_waits():
    tree, _ = tree_with_spans()
    tree.insert([99, *range(11)])
    step = choose_queries(tree.snapshot(), [], [], 16, texts=(tree.spelling, tree.nodes()))
    assert runs(step) == [(0, 0, 12), (1, 0, 2)]


def test_rows_may_see_to_the_end_of_their_span():
    tree, sequence = tree_with_spans()
    texts = tree.spelling, tree.nodes()
    step = choose_queries(tree.snapshot(), [], [], 100, texts=texts)
    assert step.reach.tolist() == [0, 1, 6, 6, 6, 6, 6, 9, 9, 9, 10, 11]
    tree.mark_computed([sequence.node], [12])
    step = choose_queries(tree.snapshot(), [], [0], 3, [4], texts=texts)
    assert runs(step) == [(0, 4, 7)], "what is computed may run in part"
    assert step.reach.tolist() == [6, 6, 6]
