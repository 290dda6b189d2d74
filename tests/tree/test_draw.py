"""The rows of a drawing."""

from __future__ import annotations

from prefixkit.tree import PrefixTree
from prefixkit.tree.draw import rows


def test_rows_of_a_small_forest() -> None:
    tree = PrefixTree(16, page_size=4)
    for tokens in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 5], [9]):
        tree.insert(tokens)
    drawn = [(row.depth, row.tokens.tolist(), row.shared_by, row.ends, row.last) for row in rows(tree)]
    assert drawn == [
        (0, [1, 2], 3, 0, False),
        (1, [3], 2, 1, False),
        (2, [4], 1, 1, True),
        (1, [5], 1, 1, True),
        (0, [9], 1, 1, True),
    ]
    assert [row.node for row in rows(tree)] == tree.nodes()


def test_an_empty_tree_has_no_rows() -> None:
    assert list(rows(PrefixTree(1))) == []
