"""Few of many cases: each value still occurs, and each pair of values that occurs together in one of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def pairwise_cover(cases: Iterable[Case], always: Iterable[Case] = ()) -> list[Case]:
    """A subset of ``cases``, in their order, with ``always`` and every pair of values at two places that the whole has.

    Greedy: the case with the most new pairs, the earliest of them, until none has any.  The same for equal cases.
    """
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    kept = set(always)
    missing = set().union(*pairs.values()).difference(*(pairs[case] for case in kept))
    while missing:
        best = max(pairs, key=lambda case: len(pairs[case] & missing))
        kept.add(best)
        missing -= pairs[best]
    return [case for case in pairs if case in kept]
