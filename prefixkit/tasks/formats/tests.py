"""Tests and limits as a problem's line says them: the fields of the classes in tasks/problem.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefixkit.tasks.fields import known_keys, mapping, number, string, strings
from prefixkit.tasks.problem import COMPARISONS, KINDS, Calls, Checks, Limits, Oracle, Streams, Tests
from prefixkit.tasks.records import Record

_KEYS = {kind: ("kind", *cls.__dataclass_fields__) for kind, cls in KINDS.items()}


def read_tests(record: Record) -> Tests | None:
    """The field ``tests``, an object whose ``kind`` says which; None where there is none."""
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
    """The field ``limits``: seconds, memory in MiB, output in KiB; the usual ones for those that it leaves out."""
    given = mapping(record, "limits")
    where = f"{record.where}: limits"
    known_keys(where, given, tuple(Limits.__dataclass_fields__), "limits")
    for name, value in given.items():
        kinds = int | float if name == "seconds" else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            what = "a number" if name == "seconds" else "an integer"
            raise ValueError(f"{where}: {name} must be {what} above 0, got {value!r}")
    return limits(record, **given)


def limits(record: Record, **given: Any) -> Limits:
    """The usual limits, but for those that a record gives."""
    try:
        return Limits(**given)
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error


def _checks(record: Record) -> Checks:
    names = strings(record, "names")
    if not names:
        raise ValueError(f"{record.where}: names must list the functions that the code uses")
    return Checks(_filled(record, "code"), names, string(record, "setup", ""))


def _calls(record: Record) -> Calls:
    cases = tuple(
        (tuple(arguments), expected)
        for arguments, expected in _pairs(record, "[[argument, ...], expected]")
        if _listed(record, arguments, "the arguments of a case")
    )
    return Calls(_filled(record, "name"), cases, number(record, "tolerance"))


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
    inputs = record.fields.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise ValueError(f"{record.where}: inputs must be a list of argument lists, with at least one")
    for arguments in inputs:
        _listed(record, arguments, "each of inputs")
    return Oracle(
        _filled(record, "name"),
        _filled(record, "solution"),
        tuple(map(tuple, inputs)),
        number(record, "tolerance"),
        string(record, "adapt", ""),
        string(record, "accept", ""),
    )


def _pairs(record: Record, form: str) -> Sequence[Sequence[Any]]:
    cases = record.fields.get("cases")
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"{record.where}: cases must be a list of pairs {form}, with at least one")
    for position, case in enumerate(cases, start=1):
        if not isinstance(case, list) or len(case) != 2:
            raise ValueError(f"{record.where}: case {position} must be a pair {form}")
    return cases


def _listed(record: Record, value: Any, what: str) -> bool:
    if not isinstance(value, list):
        raise ValueError(f"{record.where}: {what} must be a list, got {type(value).__name__}")
    return True


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
