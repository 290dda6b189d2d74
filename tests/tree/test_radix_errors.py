"""PrefixTree: what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import OutOfPages, PrefixTree, Sequence
from tests.tree.model import fingerprint


class TestErrors:
    @pytest.mark.parametrize("page_size", [0, 129, -1, 1.0, True, None])
    def test_page_sizes_are_1_to_128(self, page_size: object) -> None:
        with pytest.raises(ValueError, match="page_size must be an integer from 1 to 128"):
            PrefixTree(8, page_size)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("mistake", "error"),
        [
            (lambda tree, a, b, other: tree.insert([]), ValueError),
            (lambda tree, a, b, other: tree.insert([1, -2]), ValueError),
            (lambda tree, a, b, other: tree.insert([0.5]), TypeError),
            (lambda tree, a, b, other: tree.extend(a, []), ValueError),
            (lambda tree, a, b, other: tree.extend(other, [1]), ValueError),
            (lambda tree, a, b, other: tree.extend_each([a, b], [1]), ValueError),
            (lambda tree, a, b, other: tree.extend_each([a, a], [1, 2]), ValueError),
            (lambda tree, a, b, other: tree.extend_each([a, b], [1, -1]), ValueError),
            (lambda tree, a, b, other: tree.extend_each([a, other], [1, 2]), ValueError),
            (lambda tree, a, b, other: tree.fork(a, 0), ValueError),
            (lambda tree, a, b, other: tree.fork(a, 2**40), ValueError),
            (lambda tree, a, b, other: tree.fork(other), ValueError),
            (lambda tree, a, b, other: tree.trim(other, 0), ValueError),
            (lambda tree, a, b, other: tree.trim(a, 1.5), TypeError),
            (lambda tree, a, b, other: tree.extend_leaves([a], [[1], [2]]), ValueError),
            (lambda tree, a, b, other: tree.extend_leaves([a], [[1.5]]), (TypeError, ValueError)),
            (lambda tree, a, b, other: tree.extend_leaves([a, a], [[1], [2]]), ValueError),
            (lambda tree, a, b, other: tree.extend_leaves([a], [[1] * 40]), ValueError),
            (lambda tree, a, b, other: tree.release(other), ValueError),
            (lambda tree, a, b, other: tree.insert([1, 2, 3, 5, *range(40)]), OutOfPages),
            (lambda tree, a, b, other: tree.extend(a, range(40)), OutOfPages),
            (lambda tree, a, b, other: tree.extend(b, range(40)), OutOfPages),
            (lambda tree, a, b, other: tree.extend_each([a, b, *tree.fork(b, 4)][:6], [1] * 6), OutOfPages),
        ],
    )
    def test_a_call_that_raises_has_changed_nothing(
        self, mistake: Callable[..., object], error: type[Exception]
    ) -> None:
        tree = PrefixTree(6, page_size=4)
        a, b, other = tree.insert([1, 2, 3, 4, 5, 6, 7, 8]), tree.insert([1, 2, 6]), PrefixTree(4).insert([1])
        forks = tree.fork(b, 4)  # what the last mistake forks for itself is no part of the comparison
        before = fingerprint(tree)
        with pytest.raises(error):
            mistake(_Without(tree, forks), a, b, other)
        assert fingerprint(tree) == before
        check_tree(tree)


class _Without:
    """A tree whose ``fork(b, 4)`` was made beforehand."""

    def __init__(self, tree: PrefixTree, forks: list[Sequence]) -> None:
        self._tree, self._forks = tree, forks

    def __getattr__(self, name: str) -> object:
        return getattr(self._tree, name)

    def fork(self, sequence: Sequence, count: int = 1) -> list[Sequence]:
        return self._forks if count == 4 else self._tree.fork(sequence, count)
