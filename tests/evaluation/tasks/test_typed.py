"""Dataclasses from JSON: each value is of the type that its field declares, or refused by the field's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from prefixkit.evaluation.tasks.typed import made


@dataclass(frozen=True)
class Inner:
    x: int


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    pairs: tuple[tuple[str, float], ...] = ()
    inner: Inner | None = None
    each: Mapping[str, list[int]] | bool = False
    free: Any = None


def test_lists_stand_for_tuples_and_objects_for_dataclasses():
    record = {"kind": "a", "pairs": [["x", 1], ["y", 2.5]], "inner": {"x": 3}, "each": {"k": [1]}, "free": [[()]]}
    assert made(Outer, record) == Outer("a", (("x", 1), ("y", 2.5)), Inner(3), {"k": [1]}, [[()]])


@pytest.mark.parametrize("number", [1e300, -1e300, 10**30])
def test_a_float_may_be_any_finite_number(number):
    assert made(Outer, {"kind": "a", "pairs": [["x", number]]}).pairs == (("x", number),)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "c"}, "'kind' must be .*'a', 'b'.*, not 'c'"),
        ({"kind": 5}, "'kind' must be .*, not int"),
        ({"pairs": [["x", 1, 2]]}, "'pairs' must be .*, not list"),
        ({"pairs": [["x", float("nan")]]}, "'pairs' must be float, not float"),
        ({"pairs": [["x", float("inf")]]}, "'pairs' must be float, not float"),
        ({"pairs": [["x", 10**400]]}, "'pairs' must be float, not int"),
        ({"pairs": [["x", True]]}, "'pairs' must be float, not bool"),
        ({"inner": {"x": "1"}}, "'inner' must be .*Inner"),
        ({"inner": {"x": 2**64}}, "'inner' must be .*Inner"),
        ({"inner": []}, "'inner' must be .*Inner"),
        ({"each": {"k": [1.5]}}, "'each' must be"),
        ({"each": 1}, "'each' must be"),
        ({"colour": 1}, "Outer has no field 'colour'"),
    ],
)
def test_another_type_is_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        made(Outer, {"kind": "a"} | change)


def test_what_is_no_object_or_lacks_a_field_is_refused():
    with pytest.raises(ValueError, match="an object is expected, not list"):
        made(Outer, [])
    with pytest.raises(TypeError, match="kind"):
        made(Outer, {})
