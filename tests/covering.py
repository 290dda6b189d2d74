"""Few of many cases: each value still occurs, and where pairs matter, each two values that occur together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def pairwise_cover(cases: Iterable[Case], always: Iterable[Case] = ()) -> list[Case]:
    """A subset of ``cases``, in their order, with ``always`` and every pair of values at two places of the whole."""
    return cover(cases, 2, always)


def cover(cases: Iterable[Case], size: int, always: Iterable[Case] = ()) -> list[Case]:
    """The same for every ``size`` values at as many places; 1: every value.

    Greedy: the case with the most new ones, the earliest of them, until none has any.  The same for equal cases.
    """
    pairs = {case: set(combinations(enumerate(case), size)) for case in cases}
    kept = set(always)
    missing = set().union(*pairs.values()).difference(*(pairs[case] for case in kept))
    while missing:
        best = max(pairs, key=lambda case: len(pairs[case] & missing))
        kept.add(best)
        missing -= pairs[best]
    return [case for case in pairs if case in kept]
