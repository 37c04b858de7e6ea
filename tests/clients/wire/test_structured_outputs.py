"""Grammars in requests: their names on the wire, and the bounds of schemas that would be costly to compile."""

from typing import Any

import pytest
from pydantic import ValidationError

from trackway.wire.rollout import SamplingParams, StructuredOutputs


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"properties": {"x": schema}}
    return schema


def test_the_names_are_vllms_and_no_grammar_leaves_no_trace() -> None:
    guided = SamplingParams.model_validate({"structured_outputs": {"json": {"type": "object"}}})

    assert guided.model_dump(include={"structured_outputs"}, exclude_none=True) == {
        "structured_outputs": {"json": {"type": "object"}}
    }
    assert "structured_outputs" not in SamplingParams().model_dump()


@pytest.mark.parametrize("given", [{}, {"json": {}, "json_object": True}, {"json_object": False}, {"regex": "a"}])
def test_a_grammar_is_one_of_two(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        StructuredOutputs.model_validate(given)


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"description": "x" * 65_536}, "at most 65536 bytes of JSON, got 65555"),
        (nested(16), "at most 32 objects and lists within each other"),
        ({"items": {"enum": [*range(1001)]}}, "at most 1000 values of an enum, got 1001"),
        ({"anyOf": [{"pattern": "a" * 513}]}, "a pattern of at most 512 characters, got 513"),
        ({"pattern": "(a{50}){1,50}"}, "a pattern whose counts multiply to at most 1000"),
        ({"pattern": "a{999999}"}, "a pattern whose counts multiply to at most 1000"),
        ({"patternProperties": {"a{2000}": {}}}, "a pattern whose counts multiply to at most 1000"),
    ],
)
def test_a_schema_that_may_be_costly_to_compile_is_refused(schema: dict[str, Any], bound: str) -> None:
    with pytest.raises(ValidationError, match=f"expected a JSON schema with {bound}"):
        StructuredOutputs.model_validate({"json": schema})


def test_a_number_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValidationError, match="expected a JSON schema of finite numbers, got nan"):
        StructuredOutputs.model_validate_json('{"json": {"properties": {"x": {"maximum": NaN}}}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "x" * 65_517},
        nested(15),
        {"enum": [*range(1000)]},
        {"pattern": "a" * 512},
        {"pattern": "(a{20}){1,50}"},
        {"properties": {"pattern": {"type": "string"}, "enum": {"type": "integer"}}},
    ],
)
def test_a_schema_at_a_bound_is_taken(schema: dict[str, Any]) -> None:
    assert StructuredOutputs.model_validate({"json": schema}).json_schema == schema
