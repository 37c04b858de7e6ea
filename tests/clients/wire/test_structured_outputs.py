"""Grammars in requests: their names on the wire, and the bounds of schemas that would be costly to compile."""

import json
import re
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


TAG = {"type": "json_schema", "json_schema": {"type": "object"}}


def tag_of(form: object, kind: str = "structural_tag") -> str:
    return json.dumps({"type": kind, "format": form})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"json": {}, "json_object": True},
        {"json": {}, "structural_tag": tag_of(TAG)},
        {"json_object": False},
        {"regex": "a"},
    ],
)
def test_a_grammar_is_one_of_three(given: dict[str, Any]) -> None:
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


def test_a_structural_tag_holds_json_between_texts() -> None:
    call = {"type": "tag", "begin": "<a>", "content": TAG, "end": "</a>"}
    either = {"type": "or", "elements": [TAG, {"type": "tags_with_separator", "tags": [call, call], "separator": ","}]}

    assert StructuredOutputs(structural_tag=tag_of(either)).structural_tag == tag_of(either)


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("{", "a structural tag of JSON"),
        ("[" * 100_000, "a structural tag of JSON"),
        (tag_of(TAG, "grammar"), '{"type": "structural_tag", "format": ...}'),
        (json.dumps({"structures": [], "triggers": []}), '{"type": "structural_tag", "format": ...}'),
        (
            tag_of({"type": "grammar", "grammar": "root ::= root"}),
            "formats or, tags_with_separator, tag and json_schema",
        ),
        (
            tag_of({"type": "or", "elements": [{"type": "regex", "pattern": "a"}]}),
            "formats or, tags_with_separator, tag",
        ),
        (
            tag_of({"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": ""}),
            "formats or, tags_with_sep",
        ),
        (tag_of({"type": "or", "elements": None}), "formats or, tags_with_separator, tag and json_schema"),
        (tag_of([]), "formats or, tags_with_separator, tag and json_schema"),
        (tag_of({"type": "json_schema", "json_schema": True}), "formats or, tags_with_separator, tag and json_schema"),
        (tag_of({"type": "json_schema", "json_schema": {"pattern": "a{2000}"}}), "counts multiply to at most 1000"),
        (tag_of(TAG | {"x": "x" * 262_144}), "a structural tag of at most 262144 bytes"),
    ],
)
def test_a_structural_tag_of_anything_else_is_refused(tag: str, expected: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(expected)):
        StructuredOutputs(structural_tag=tag)


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
