"""Schemas of which xgrammar leaves out something are refused, and others are not."""

from __future__ import annotations

import re

import pytest

from prefixkit.integrations.xgrammar_schemas import refuse_left_out

INTEGER, NULL = {"type": "integer"}, {"type": "null"}
REFUSED = [
    ({"type": "string", "not": {"const": "a"}}, "not"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": INTEGER}, "contains"),
    ({"if": INTEGER, "then": {"minimum": 10}}, "if"),
    ({"allOf": [INTEGER, {"type": "number", "minimum": 5}]}, "allOf"),
    ({"type": "integer", "enum": [1, "a"]}, "type"),
    ({"type": "object", "anyOf": [{"properties": {"a": NULL}}, {"properties": {"b": NULL}}]}, "type"),
    ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}, "minimum": 10}, "minimum"),
    ({"type": "object", "properties": {"a": NULL}, "required": ["z"]}, "required"),
    ({"type": "object", "propertyNames": {"pattern": "^b$"}, "properties": {"a": NULL}}, "propertyNames"),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, "maxLength"),
    ({"type": "string", "pattern": "^19", "format": "date"}, "pattern"),
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, "multipleOf"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 2.5}, "multipleOf"),
    ({"$ref": "https://json-schema.org/schema"}, "$ref"),
    ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "type": "null"}}}, "$ref"),
    ({"type": "object", "properties": {"ab": NULL}, "patternProperties": {"^a": INTEGER}}, "patternProperties"),
    ({"minimum": 5}, "minimum"),
    ({"maxLength": 2}, "maxLength"),
    ({"required": ["a"]}, "required"),
    ({"format": "date"}, "format"),
    ({"enum": [1, "a"], "format": "date"}, "format"),
    ({"anyOf": [NULL, {"type": "string"}], "format": "date"}, "format"),
    ({"type": "integer", "multipleOf": 1025}, "multipleOf"),
]
MISREAD = [
    ({"const": [{"a": 2**63}]}, "rounds the integer 9223372036854775808 in 'const'"),
    ({"enum": ["a", -(2**70)]}, "rounds the integer -1180591620717411303424 in 'enum'"),
    ({"type": "number", "minimum": 1e-7, "maximum": 1}, "rounds 'minimum', 1e-07, to 6 decimals"),
    ({"type": "number", "exclusiveMaximum": 0.1234567}, "rounds 'exclusiveMaximum', 0.1234567, to 6 decimals"),
    ({"type": "string", "pattern": r"\Ax\z"}, r"reads '\\\\A' as a letter in 'pattern'"),
    ({"type": "string", "pattern": r"^(?=x)."}, r"leaves out '\(\?=' in 'pattern'"),
    (
        {"type": "object", "patternProperties": {'^"': NULL}},
        "does not escape what '\"' matches, .* 'patternProperties'",
    ),
    ({"type": "object", "propertyNames": {"pattern": '^"'}}, "does not escape .* in 'propertyNames/pattern'"),
]
# Patterns, and the part that matches what JSON strings hold only escaped.
UNESCAPED = {
    '^"$': '"',
    r"^\"$": r"\"",
    r"^\\$": r"\\",
    "^\n$": "\n",
    r"^a|\n": r"\n",
    r"\x22": r"\x22",
    r"\u005c": r"\u005c",
    r"\u{1f}": r"\u{1f}",
    r"\cJ": r"\cJ",
    r"\0": r"\0",
    '["]': '["]',
    r"a[\]\\]b[\t\n]": r"[\t\n]",
    r"[\x00-\x1f]": r"[\x00-\x1f]",
    '(?<n>["-"])': '["-"]',
}
ESCAPED_OR_TAKEN_AWAY = (
    '[^"]',
    "[^\\]",
    '["a]',
    r"[\x00-!]",
    r"[\s]\s.",
    r"[\"-\\]",
    r"[\n-]",
    "\x7f",
    r"\/\-",
    "[(?=x]",
    r"[[\\]",
)
TAKEN = [
    {},
    {"$defs": {"x": INTEGER}, "type": "array", "items": {"$ref": "#/$defs/x", "title": "X"}, "uniqueItems": False},
    {"title": "T", "type": "object", "properties": {"a": {"enum": ["b"], "type": "string"}}, "required": ["a"]},
    {"properties": {"a": {"anyOf": [INTEGER, NULL], "default": None}}, "additionalProperties": False},
    {"prefixItems": [{"const": 2.0, "type": "integer"}, {"const": 2, "type": "number"}], "minItems": 1},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": ["integer", "null"], "multipleOf": 7}]},
    {"type": "object", "patternProperties": {"^a": INTEGER}, "minProperties": 1},
    {
        "type": "object",
        "propertyNames": {"pattern": "^b$"},
        "additionalProperties": {"type": "string", "format": "date"},
    },
    {"type": "object", "properties": {"ba": NULL}, "patternProperties": {"^a": INTEGER}},
    {"type": "object", "properties": {"ba": NULL}, "patternProperties": {"(": INTEGER}},  # so it does here
    {"type": "integer", "multipleOf": 2.0},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "number", "minimum": 1.5, "exclusiveMaximum": 2},
    {"anyOf": [{"enum": [1, 2], "format": "int32"}, {"type": "integer", "format": "int64", "multipleOf": 1024}]},
    {"enum": [2**63 - 1, -(2**63), True, 1e300], "default": 2**70},
    {"type": "number", "minimum": -1.5e-05, "maximum": 1e20},
    {"items": {"type": [{}], "properties": [1]}, "prefixItems": 5},  # xgrammar says what is wrong
    {"properties": {"a": {"allOf": None}, "b": {"type": 5, "properties": 5, "required": ["a"]}}},
]


@pytest.mark.parametrize("schema, name", REFUSED)
def test_what_would_be_left_out_is_named(schema, name):
    with pytest.raises(ValueError, match=f"xgrammar leaves out '{re.escape(name)}' at #, "):
        refuse_left_out(schema)


@pytest.mark.parametrize("schema, said", MISREAD)
def test_what_would_be_read_otherwise_is_named(schema, said):
    with pytest.raises(ValueError, match=f"xgrammar {said} at #, "):
        refuse_left_out(schema)


@pytest.mark.parametrize("pattern", UNESCAPED)
def test_a_pattern_of_what_json_escapes_is_refused(pattern):
    said = re.escape(f"does not escape what {UNESCAPED[pattern]!r} matches")
    with pytest.raises(ValueError, match=f"xgrammar {said}, as JSON demands, in 'pattern' at #, "):
        refuse_left_out({"type": "string", "pattern": pattern})


def test_its_place_is_named():
    inner = {"type": "object", "properties": {"b": {"anyOf": [NULL, {"not": {}}]}}}
    with pytest.raises(ValueError, match=r"'not' at #/items/properties/b/anyOf/1, .*llguidance"):
        refuse_left_out({"type": "array", "items": inner})


@pytest.mark.parametrize("schema", TAKEN)
def test_what_is_followed_is_taken(schema):
    refuse_left_out(schema)


@pytest.mark.parametrize("pattern", ESCAPED_OR_TAKEN_AWAY)
def test_a_class_may_have_what_json_escapes_beside_other_characters(pattern):
    refuse_left_out({"type": "string", "pattern": pattern})
