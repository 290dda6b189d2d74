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
]
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
    {"items": {"type": [{}], "properties": [1]}, "prefixItems": 5},  # xgrammar says what is wrong
    {"properties": {"a": {"allOf": None}, "b": {"type": 5, "properties": 5, "required": ["a"]}}},
]


@pytest.mark.parametrize("schema, name", REFUSED)
def test_what_would_be_left_out_is_named(schema, name):
    with pytest.raises(ValueError, match=f"xgrammar leaves out '{re.escape(name)}' at #, "):
        refuse_left_out(schema)


def test_its_place_is_named():
    inner = {"type": "object", "properties": {"b": {"anyOf": [NULL, {"not": {}}]}}}
    with pytest.raises(ValueError, match=r"'not' at #/items/properties/b/anyOf/1, .*llguidance"):
        refuse_left_out({"type": "array", "items": inner})


@pytest.mark.parametrize("schema", TAKEN)
def test_what_is_followed_is_taken(schema):
    refuse_left_out(schema)
