"""The quick yes never says yes where jsonschema says no."""

import itertools

import pytest
from jsonschema import Draft202012Validator
from pydantic import JsonValue

from trackway.tools.flat_schema import FlatSchema

KINDS = ("string", "integer", "number", "boolean")
VALUES: list[JsonValue] = ["", "7", 7, -1, 7.5, 7.0, True, False, None, [], ["a"], {}, {"a": 1}]


def closed(**properties: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return {"type": "object", "properties": {**properties}, "additionalProperties": False, "required": ["a"]}


@pytest.mark.parametrize("kind", KINDS)
def test_it_accepts_no_more_than_jsonschema(kind: str) -> None:
    schema = closed(a={"type": kind, "description": "d"}, b={"type": "string", "default": ""})
    flat, validator = FlatSchema.of(schema), Draft202012Validator(schema)
    assert flat is not None
    for value, other in itertools.product(VALUES, [{}, {"b": "x"}, {"b": 1}, {"c": "x"}]):
        arguments = {"a": value, **other}
        if flat.accepts(arguments):
            assert validator.is_valid(arguments)
    assert not flat.accepts({"b": "x"})


@pytest.mark.parametrize(
    ("kind", "value"), [("string", "x"), ("integer", 7), ("number", 7), ("number", 7.5), ("boolean", True)]
)
def test_it_accepts_what_is_plain(kind: str, value: JsonValue) -> None:
    flat = FlatSchema.of(closed(a={"type": kind}))
    assert flat is not None and flat.accepts({"a": value})


@pytest.mark.parametrize(
    "schema",
    [
        closed(a={"type": "string", "enum": ["x"]}),
        closed(a={"type": "array"}),
        closed(a={"type": ["string", "null"]}),
        closed(a={}),
        closed(a={"$ref": "#/$defs/a"}),
        {**closed(a={"type": "string"}), "additionalProperties": True},
        {**closed(a={"type": "string"}), "minProperties": 1},
        {"type": "object", "properties": {}},
    ],
)
def test_a_schema_that_says_more_is_left_to_jsonschema(schema: dict[str, JsonValue]) -> None:
    assert FlatSchema.of(schema) is None
