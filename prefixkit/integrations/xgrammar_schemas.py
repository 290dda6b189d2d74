"""Finds the parts of a JSON schema that xgrammar (0.2.8) ignores or misreads, some without a line in its log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from prefixkit.integrations.grammar_text import beyond
from prefixkit.integrations.xgrammar_patterns import ignored, misread, unescaped

_NEVER = {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"}
_NEVER |= {"dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"}
# xgrammar follows only the first of these keywords that a schema has.
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_LENGTH = {"minLength", "maxLength"}
_OBJECT = {"required", "minProperties", "maxProperties", "patternProperties", "propertyNames"}
_MOST_MULTIPLE = 1024
_DECIMALS = 6  # that xgrammar keeps of the bounds of numbers
_ARRAY = {"minItems", "maxItems"}
_OF_TYPE = {
    "object": _OBJECT | {"properties", "additionalProperties", "unevaluatedProperties"},
    "array": _ARRAY | {"items", "prefixItems", "additionalItems", "unevaluatedItems"},
    "string": _LENGTH | {"pattern", "format"},
    "number": _RANGE | {"multipleOf"},
}
_FOLLOWED = set(_WHOLE).union(*_OF_TYPE.values())
# Keywords whose value is a schema, a list of schemas, or a mapping of names to schemas.
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


def refuse_left_out(schema: dict[str, Any]) -> None:
    """Raise ValueError if xgrammar would ignore or misread a part of a schema, so that samples might not match it.

    xgrammar itself reports malformed schemas.
    ``oneOf`` is not refused, although xgrammar treats it as ``anyOf`` where alternatives may overlap.
    """
    left = [("#", schema)]
    while left:
        path, one = left.pop()
        leaves_out = (f"leaves out {name!r}" for name in _left_out(one))
        if (what := next(chain(leaves_out, _misread(one)), None)) is not None:
            raise ValueError(
                f"json_schema: xgrammar {what} at {path}, so samples might not match the schema; take it out and check "
                "samples, or use prefixkit.integrations.llguidance, which refuses what it cannot follow"
            )
        left += [(f"{path}/{name}", below) for name, below in _below(one) if isinstance(below, dict)]


def _left_out(schema: dict[str, Any]) -> Iterator[str]:
    """Keywords of one schema that xgrammar ignores, without those of the schemas in it."""
    given = {name for name, value in schema.items() if (name, value) != ("uniqueItems", False)}
    yield from sorted(given & _NEVER)
    whole = next((name for name in _WHOLE if name in given), None)
    if whole is not None:
        values = [schema["const"]] if whole == "const" else schema[whole] if whole == "enum" else []
        if "type" in given and not (values and all(map(_fits(schema["type"]), values))):
            yield "type"
        only_other_types = values and not any(isinstance(value, str) for value in values)  # formats are of strings
        yield from sorted(given & _FOLLOWED - {whole} - ({"format"} if only_other_types else set()))
        reference = schema[whole] if whole == "$ref" else "#"
        if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
            yield "$ref"  # xgrammar then allows any JSON
        if whole == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
            yield whole
        return
    types = _types(schema)
    for kind, names in _OF_TYPE.items():
        if kind not in types:
            # In a schema without a type, some keywords imply their type.
            inferred = "type" not in given and kind in ("object", "array") and given & (names - _OBJECT - _ARRAY)
            yield from () if inferred or "type" in given else sorted(given & names)
    yield from _left_out_of_type(schema, given, types)


def _left_out_of_type(schema: dict[str, Any], given: set[str], types: set[str]) -> Iterator[str]:
    """Keywords that xgrammar ignores if other keywords of the same type are given."""
    if "propertyNames" in given and given & {"properties", "patternProperties"}:
        yield "propertyNames"
    names, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(names, list) and isinstance(properties, dict) and any(name not in properties for name in names):
        yield "required"
    if "string" in types:
        if given & {"pattern", "format"}:
            yield from sorted(given & _LENGTH)
        if given >= {"pattern", "format"}:
            yield "pattern"
    if isinstance(properties, dict) and _named_twice(properties, schema.get("patternProperties")):
        yield "patternProperties"
    multiple = schema.get("multipleOf", 1)
    if "float" in types or given & _RANGE or (isinstance(multiple, float) and not multiple.is_integer()):
        yield from given & {"multipleOf"}
    elif isinstance(multiple, int | float) and multiple > _MOST_MULTIPLE:
        yield "multipleOf"


def _misread(schema: dict[str, Any]) -> Iterator[str]:
    """What xgrammar does with the values of keywords that it follows otherwise than they say."""
    names = schema.get("propertyNames")
    patterns = [("pattern", schema.get("pattern")), *(("patternProperties", one) for one in _keys(schema))]
    patterns.append(("propertyNames/pattern", names.get("pattern") if isinstance(names, dict) else None))
    for name, pattern in patterns:
        if isinstance(pattern, str):
            if (part := unescaped(pattern)) is not None:
                yield f"does not escape what {part!r} matches, as JSON demands, in {name!r}"
            if (part := misread(pattern)) is not None:
                yield f"reads {part!r} as a letter in {name!r}"
            if (part := ignored(pattern)) is not None:
                yield f"leaves out {part!r} in {name!r}"
    for name in sorted(_RANGE & schema.keys()):
        if isinstance(bound := schema[name], float) and round(bound, _DECIMALS) != bound:
            yield f"rounds {name!r}, {bound!r}, to {_DECIMALS} decimals"
    for name in ("const", "enum"):
        if (value := beyond(schema.get(name), -(2**63), 2**63 - 1)) is not None:
            yield f"rounds the integer {value} in {name!r}"


def _keys(schema: dict[str, Any]) -> Iterator[str]:
    patterns = schema.get("patternProperties")
    yield from patterns if isinstance(patterns, dict) else ()


def _named_twice(properties: dict[str, Any], patterns: Any) -> bool:
    """Whether a pattern matches a property's name: xgrammar then follows the schema of each without the other."""
    try:
        found = [re.compile(pattern) for pattern in patterns or ()]
    except (TypeError, re.error):
        return False  # xgrammar reports the error
    return any(one.search(name) for one in found for name in properties)


def _types(schema: dict[str, Any]) -> set[str]:
    """A schema's types; "number" adds "float", for numbers that may be fractions, and "integer" adds "number"."""
    given = schema.get("type", [])
    found = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    if "number" in found:
        found.add("float")
    return found | {"number"} if "integer" in found else found


def _fits(given: Any) -> Callable[[Any], bool]:
    """A function that says whether a value is of one of the types that a schema gives."""
    types = given if isinstance(given, list) else [given]
    return lambda value: _type_of(value) in types or (_type_of(value) == "integer" and "number" in types)


def _type_of(value: Any) -> str:
    """The name of a value's type in JSON schema."""
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _below(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, by their paths in it; xgrammar follows those of ``propertyNames`` without a type."""
    yield from ((name, schema[name]) for name in _SCHEMAS if name in schema)
    for name in _LISTS:
        if isinstance(own := schema.get(name), list):
            yield from ((f"{name}/{number}", one) for number, one in enumerate(own))
    for name in _BY_NAME:
        if isinstance(own := schema.get(name), dict):
            yield from ((f"{name}/{key}", one) for key, one in own.items())
