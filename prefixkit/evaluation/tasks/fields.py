"""Fields of a record, each of the type that is expected, or an error that names file, line and field."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from prefixkit.evaluation.tasks.problem import LANGUAGES, Language
from prefixkit.evaluation.tasks.records import Record, decode_json


def string(record: Record, name: str, default: str | None = None) -> str:
    """A field that is a string; ``default``, if given, for a field that is absent or null."""
    value = record.fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise wrong(record, name, "a string", value)
    return value


def has(record: Record, name: str) -> bool:
    """Whether a record has a field: a table has all columns in all rows, null where there is none."""
    return record.fields.get(name) is not None


def strings(record: Record, name: str) -> tuple[str, ...]:
    """A field that is a list of strings; () for one that is absent or null."""
    value = _optional(record, name, (list, tuple), "a list of strings") or ()
    if not all(isinstance(one, str) for one in value):
        raise wrong(record, name, "a list of strings", value)
    return tuple(value)


def items(record: Record, name: str) -> Sequence[Any]:
    """A field that is a list; empty for one that is absent or null."""
    return _optional(record, name, (list, tuple), "a list") or ()


def mapping(record: Record, name: str) -> Mapping[str, Any]:
    """A field that is an object; empty for one that is absent or null."""
    return _optional(record, name, (Mapping,), "an object") or {}


def _optional(record: Record, name: str, kinds: tuple[type, ...], expected: str) -> Any:
    """A field of one of these types, or None."""
    value = record.fields.get(name)
    if value is not None and not isinstance(value, kinds):
        raise wrong(record, name, expected, value)
    return value


def number(record: Record, name: str, default: float = 0.0) -> float:
    """A field that is a number of at least 0."""
    value = record.fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise wrong(record, name, "a number of at least 0", value)
    return float(value)


def decoded(record: Record, name: str, kind: type[Any]) -> Any:
    """A field that is a ``dict`` or a ``list``, or its JSON in a string; empty if the data set has none."""
    value = record.fields.get(name)
    if isinstance(value, str):
        value = inner_json(record, name, value) if value.strip() else None
    if value is not None and not isinstance(value, Mapping if kind is dict else kind):
        raise ValueError(f"{record.where}: {name} must hold a JSON {kind.__name__}, got {type(value).__name__}")
    return kind() if value is None else value


def inner_json(record: Record, name: str, text: str) -> Any:
    """The value of a field that is JSON in a string."""
    return decode_json(text, f"{record.where}: {name}", "JSON")


def identity(record: Record, *names: str) -> str | int:
    """The first of these fields that is present: the problem's id."""
    name = next((name for name in names if name in record.fields), names[0])
    key = record.fields.get(name)
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise wrong(record, name, "a string or an integer", key)
    if isinstance(key, int) and not -(2**63) <= key < 2**64:  # run folders hold no others
        raise wrong(record, name, "a string, or an integer from -2**63 to 2**64 - 1", key)
    return key


def language(record: Record, default: Language) -> Language:
    value = record.fields["language"] if has(record, "language") else default
    if value not in LANGUAGES:
        raise ValueError(f"{record.where}: language must be one of {', '.join(LANGUAGES)}, got {value!r}")
    known: Language = value
    return known


def known_keys(where: str, given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Refuse a key that no code reads: it is misspelt, or meant for another program."""
    for key in given:
        if key not in known:
            raise ValueError(f"{where}: {what} has no field {key!r}; its fields are {', '.join(known)}")


def wrong(record: Record, name: str, expected: str, value: object) -> ValueError:
    """The error of a field that is not what was ``expected``."""
    if value is None and name not in record.fields:
        return ValueError(f"{record.where}: the field {name!r} is missing; it must be {expected}")
    shown = f" {value!r}" if isinstance(value, int | float) and not isinstance(value, bool) else ""
    return ValueError(f"{record.where}: {name} must be {expected}, got {type(value).__name__}{shown}")
