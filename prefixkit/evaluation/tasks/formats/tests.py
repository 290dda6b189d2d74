"""Tests and limits in a problem's line: the fields of the classes in tasks/problem.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefixkit.evaluation.tasks.fields import known_keys, mapping, number, string, strings
from prefixkit.evaluation.tasks.problem import COMPARISONS, KINDS, Calls, Checks, Limits, Oracle, Streams, Tests
from prefixkit.evaluation.tasks.records import Record

_KEYS = {kind: ("kind", *cls.__dataclass_fields__) for kind, cls in KINDS.items()}


def read_tests(record: Record) -> Tests | None:
    """The field ``tests``, an object whose ``kind`` names the class; None if it is absent."""
    given = mapping(record, "tests")
    if not given:
        return None
    kind, where = given.get("kind"), f"{record.where}: tests"
    if kind not in KINDS:
        raise ValueError(f"{where}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    known_keys(where, given, _KEYS[kind], f"tests of kind {kind!r}")
    inner = Record(where, record.place, given)
    return _MAKE[kind](inner)


def read_limits(record: Record) -> Limits:
    """The field ``limits``: seconds, memory in MiB, output in KiB; defaults for those that it leaves out."""
    given = mapping(record, "limits")
    known_keys(f"{record.where}: limits", given, tuple(Limits.__dataclass_fields__), "limits")
    return limits(record, **given)


def limits(record: Record, **given: Any) -> Limits:
    """The default limits, except for those that a record gives."""
    try:
        return Limits(**given)
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error


def _checks(record: Record) -> Checks:
    names = strings(record, "names")
    if not names:
        raise ValueError(f"{record.where}: names must list the functions that the code uses")
    for name in names:
        _check_name(record, name)
    return Checks(_filled(record, "code"), names, string(record, "setup", ""))


def _calls(record: Record) -> Calls:
    pairs = _pairs(record, "[[argument, ...], expected]")
    cases = tuple((_arguments(record, given, "the arguments of a case"), expected) for given, expected in pairs)
    return Calls(_name(record), cases, number(record, "tolerance"))


def _streams(record: Record) -> Streams:
    cases = _pairs(record, "[input, output]")
    if not all(isinstance(text, str) for case in cases for text in case):
        raise ValueError(f"{record.where}: cases must hold pairs of strings, [input, output]")
    compare = record.fields.get("compare", "tokens")
    if compare not in COMPARISONS:
        raise ValueError(f"{record.where}: compare must be one of {', '.join(COMPARISONS)}, got {compare!r}")
    pairs = tuple((given, written) for given, written in cases)
    return Streams(pairs, compare, number(record, "tolerance"), string(record, "checker", ""))


def _oracle(record: Record) -> Oracle:
    inputs = _several(record, "inputs", "argument lists")
    return Oracle(
        _name(record),
        _filled(record, "solution"),
        tuple(_arguments(record, one, "each of inputs") for one in inputs),
        number(record, "tolerance"),
        string(record, "adapt", ""),
        string(record, "accept", ""),
    )


def _pairs(record: Record, form: str) -> Sequence[Sequence[Any]]:
    cases = _several(record, "cases", f"pairs {form}")
    for position, case in enumerate(cases, start=1):
        if not isinstance(case, list) or len(case) != 2:
            raise ValueError(f"{record.where}: case {position} must be a pair {form}")
    return cases


def _several(record: Record, name: str, what: str) -> list[Any]:
    found = record.fields.get(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{record.where}: {name} must be a list of {what}, with at least one")
    return found


def _arguments(record: Record, given: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(given, list):
        raise ValueError(f"{record.where}: {what} must be a list, got {type(given).__name__}")
    return tuple(given)


def _name(record: Record) -> str:
    value = _filled(record, "name")
    _check_name(record, value)
    return value


def _check_name(record: Record, name: str) -> None:
    """Refuse a name that no program can define."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{record.where}: {name!r} is no name of a Python function, or of a class and its method")


def _filled(record: Record, name: str) -> str:
    value = string(record, name)
    if not value.strip():
        raise ValueError(f"{record.where}: {name} is empty")
    return value


_MAKE: Mapping[str, Callable[[Record], Tests]] = {
    "checks": _checks,
    "calls": _calls,
    "streams": _streams,
    "oracle": _oracle,
}
