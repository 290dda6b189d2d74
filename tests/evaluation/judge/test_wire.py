"""Values as bytes and back, hostile bytes, and comparisons."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixkit.evaluation.judge.kinds.texts import accepts
from prefixkit.evaluation.judge.kinds.values import equal, shown
from prefixkit.evaluation.judge.wire import DEPTH, Opaque, Reader, WireError, read, write

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.text(st.sampled_from("a\ud800\udfff\0"))
    | st.binary()
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=12) | st.tuples(inner) | st.dictionaries(HASHABLE, inner) | st.sets(HASHABLE)
    ),
    max_leaves=12,
)


# How long an example may take is no matter of these tests.
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(VALUES)
@settings(SETTINGS, max_examples=80)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    again = read(write(value))
    assert again == value
    assert type(again) is type(value)


@given(VALUES)
@settings(SETTINGS, max_examples=50)
def test_a_value_that_was_not_hashed_equals_itself(value: Any) -> None:
    assert equal(read(write(value), hashed=False), value)


@given(st.binary(max_size=60))
@settings(SETTINGS, max_examples=250)
def test_any_bytes_are_a_value_or_malformed(content: bytes) -> None:
    for hashed in (True, False):
        with suppress(WireError):
            value = read(content, hashed)
            assert equal(read(write(value), hashed), value), "a value is what can be written"


@pytest.mark.parametrize("values", [list(range(1000)), [2**63 - 1, -(2**63)] * 9, [2**63] * 9, (1.5, math.inf) * 50])
def test_long_lists_of_numbers_come_back(values: Any) -> None:
    assert read(write(values)) == values


def test_subclasses_become_their_base_whatever_their_methods_do() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

        def __int__(self) -> int:
            return 7

    class Text(str):
        def __str__(self) -> str:
            return "other"

    again = read(write([Liar(3), Text("text"), Counter("aab"), OrderedDict(a=1)]))
    assert [type(item) for item in again] == [int, str, dict, dict]
    assert again == [3, "text", {"a": 2, "b": 1}, {"a": 1}]


def test_other_values_are_opaque_and_equal_nothing() -> None:
    kept: list[Any] = []
    thing = object()
    found = read(write([thing], lambda value: kept.append(value) or 5))[0]
    assert kept == [thing] and isinstance(found, Opaque) and found.handle == 5
    assert found != found
    assert not equal(found, found)
    assert Reader(write(found), find={5: thing}.__getitem__).value() is thing


def test_bounds_hold() -> None:
    deep: list[Any] = []
    for _ in range(DEPTH + 2):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    for value in (deep, loop):
        with pytest.raises(WireError):
            write(value)
    for content in (b"l\xff\xff\xff\xff", b"i\0\0\1\0", b"P\x6c\x71\0\0\0\x05", b"", b"NN", b"S\0\0\0\1l\0\0\0\0"):
        with pytest.raises(WireError):
            read(content)


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "same"),
    [
        ((1, [2]), [1, (2,)], 0, True),
        (1, True, 0, True),
        (1.0, 1, 0, True),
        ("1", 1, 0, False),
        (b"a", "a", 0, False),
        (1.0000001, 1.0, 0, False),
        (1.0000001, 1.0, 1e-6, True),
        (10**400, 1.0, 1e-6, False),
        (1.0, 10**400, 1e-6, False),
        (10**400, 10**400, 1e-6, True),
        (5, 6, 1.0, False),
        (5.0, 6, 1.0, True),
        (math.nan, math.nan, 0, True),
        (math.inf, math.inf, 1e-6, True),
        (math.inf, 1e308, 1e-6, False),
        ([1, 2], [1], 0, False),
        ({"a": [1.1]}, {"a": [1.1]}, 0, True),
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}, 0, False),
        ({1: 2}, {"1": 2}, 0, False),
        ({1, 2}, {2, 1}, 0, True),
        ({1, 2}, [1, 2], 0, False),
        ([], {}, 0, False),
        (None, None, 0, True),
        (None, False, 0, False),
        (range(3), [0, 1, 2], 0, False),
    ],
)
def test_values_are_equal_as_in_python_but_for_tuples_nan_and_tolerance(
    found: Any, expected: Any, tolerance: float, same: bool
) -> None:
    assert equal(read(write(found), hashed=False), expected, tolerance) is same


def test_what_is_shown_is_short() -> None:
    for value in (10**100000, "x" * 10**6, [[["x" * 1000] * 1000] * 1000] * 1000, {1: 2}, 1.5):
        assert len(shown(read(write(value), hashed=False) if isinstance(value, dict) else value)) < 2000


@pytest.mark.parametrize(
    ("found", "expected", "compare", "tolerance", "same"),
    [
        ("1 2\n", "1 2", "exact", 0, False),
        ("1 2", "1 2", "exact", 0, True),
        ("1 2\r\n\r\n", "1\n2", "tokens", 0, True),
        ("1 2 3", "1 2", "tokens", 0, False),
        ("1.0", "1", "tokens", 0, False),
        ("", "\n", "tokens", 0, True),
        ("1.0", "1", "numbers", 0, True),
        ("1.0001 yes", "1 yes", "numbers", 1e-3, True),
        ("1.0001 yes", "1 no", "numbers", 1e-3, False),
        ("1.1", "1", "numbers", 1e-3, False),
        ("nan", "NaN", "numbers", 0, True),
        ("inf", "1e999", "numbers", 0, True),
        ("inf", "1e308", "numbers", 1e-3, False),
        (str(10**30), str(10**30 + 1), "numbers", 0, False),
        (str(10**30), str(10**30 + 1), "numbers", 1e-9, True),
        ("1" * 350, "1" * 349 + "2", "numbers", 1e-9, False),
        ("1" * 10**6, "2", "numbers", 1e-9, False),
        ("1_0", "10", "numbers", 0, False),
        ("nan", "1", "numbers", 1e9, False),
        ("\u0661", "1", "numbers", 0, False),
    ],
)
def test_texts(found: str, expected: str, compare: Any, tolerance: float, same: bool) -> None:
    assert accepts(found.encode(), expected, compare, tolerance) is same
