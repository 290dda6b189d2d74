"""Compares a program's output with the expected output."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation

from prefixkit.evaluation.tasks.problem import Compare


def accepts(found: bytes, expected: str, compare: Compare, tolerance: float = 0.0) -> bool:
    """Whether an output is the expected one.

    Args:
        found: The program's output.
        expected: The expected output, to be compared as UTF-8.
        compare: ``exact``: byte by byte; ``tokens``: the same words, whatever the white space and the ends of lines;
            ``numbers``: as tokens, but words that are numbers on both sides may differ within ``tolerance``.
        tolerance: Absolute, and relative to the larger of two numbers, which are compared as floats.  Numbers beyond
            floats must be equal as they are written, and so must two numbers of which one is whole and written without
            a point, if the tolerance is 0.  nan equals nan.
    """
    wanted = expected.encode("utf-8", "surrogatepass")
    if compare == "exact":
        return found == wanted
    words, wanted_words = found.split(), wanted.split()
    if compare == "tokens" or len(words) != len(wanted_words):
        return words == wanted_words
    return all(_same(a, b, tolerance) for a, b in zip(words, wanted_words, strict=True))


def _same(word: bytes, wanted: bytes, tolerance: float) -> bool:
    if word == wanted:
        return True
    if b"_" in word:  # float() would take 1_000
        return False
    try:
        a, b = float(word), float(wanted)
    except ValueError:
        return False
    if a != a or b != b:
        return a != a and b != b
    beyond = math.inf in (abs(a), abs(b)) and b"n" not in (word + wanted).lower()  # "inf" is any of them
    if beyond or (not tolerance and (_whole(word) or _whole(wanted))):
        return _equal_exactly(word, wanted)  # floats do not tell such numbers apart
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def _whole(word: bytes) -> bool:
    return word.lstrip(b"+-").isdigit()


def _equal_exactly(word: bytes, wanted: bytes) -> bool:
    """Whether two numbers are equal as they are written; int() would take no more than 4,300 digits."""
    try:
        return Decimal(word.decode()) == Decimal(wanted.decode())
    except InvalidOperation:  # an exponent of 19 digits
        return False
