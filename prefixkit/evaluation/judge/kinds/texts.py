"""Compares a program's output with the expected output."""

from __future__ import annotations

import math

from prefixkit.evaluation.tasks.problem import Compare


def accepts(found: bytes, expected: str, compare: Compare, tolerance: float = 0.0) -> bool:
    """Whether an output is the expected one.

    Args:
        found: The program's output.
        expected: The expected output, to be compared as UTF-8.
        compare: ``exact``: byte by byte; ``tokens``: the same words, whatever the white space and the ends of lines;
            ``numbers``: as tokens, but words that are numbers on both sides may differ within ``tolerance``.
        tolerance: Absolute, and relative to the larger of two numbers.  If it is 0, whole numbers written without a
            point must be equal.  nan equals nan.
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
    if b"_" in word or len(word) > 400:  # float() would take 1_000
        return False
    try:
        a, b = float(word), float(wanted)
    except ValueError:
        return False
    if _whole(word) and _whole(wanted) and (not tolerance or max(abs(a), abs(b)) == math.inf):
        return _integer(word) == _integer(wanted)
    return (a != a and b != b) or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def _whole(word: bytes) -> bool:
    return word.lstrip(b"+-").isdigit()


def _integer(word: bytes) -> tuple[bool, bytes]:
    """Sign and digits of a whole number, equal for equal numbers; int() would take no more than 4,300 digits."""
    digits = word.lstrip(b"+-0")
    return bool(digits) and word.startswith(b"-"), digits
