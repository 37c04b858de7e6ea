"""The grammar of an answer beside tools: calls in the model's format, or JSON of the answer's format."""

import json
from typing import Any

import pytest

from trackway.chat.tool_formats import Hermes
from trackway.model_api.choices import grammar_of
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatRequest, CompletionRequest

PLAN = {"type": "object", "properties": {"not": {"enum": [{"if": 1}]}}, "required": ["not"]}
ADD: dict[str, Any] = {"properties": {"a": {"type": "integer", "not": {"const": 3}}}}


def chat(**fields: Any) -> ChatRequest:
    asked: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": "9+9?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN}},
        "tools": [
            {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
            {"type": "function", "function": {"name": 'say "x"'}},
        ],
        **fields,
    }
    return ChatRequest.model_validate(asked)


def tag_of(request: ChatRequest) -> dict[str, Any]:
    grammar = grammar_of(request, Hermes())
    assert grammar is not None and grammar.structural_tag is not None
    return json.loads(grammar.structural_tag)


@pytest.mark.parametrize("parallel", [True, False])
def test_beside_tools_it_is_one_or_several_calls_or_the_answer(parallel: bool) -> None:
    def call(name: str, schema: dict[str, Any]) -> dict[str, Any]:
        begin = f'<tool_call>\n{{"name": {name}, "arguments": '
        content = {"type": "json_schema", "json_schema": schema}
        return {"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}

    calls = {
        "type": "tags_with_separator",
        "tags": [call('"add"', {"type": "object", **ADD}), call('"say \\"x\\""', {"type": "object"})],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    assert tag_of(chat(parallel_tool_calls=parallel)) == {
        "type": "structural_tag",
        "format": {"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": PLAN}]},
    }


def test_any_object_may_be_the_answer() -> None:
    [_, answer] = tag_of(chat(response_format={"type": "json_object"}))["format"]["elements"]
    assert answer == {"type": "json_schema", "json_schema": {"type": "object"}}


def test_without_tools_it_is_the_answers_alone_and_a_forced_call_has_none() -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        grammar = grammar_of(chat(**fields), Hermes())
        assert grammar is not None and (grammar.json_schema, grammar.structural_tag) == (PLAN, None)
    named = {"type": "function", "function": {"name": "add"}}
    assert [grammar_of(chat(tool_choice=choice), Hermes()) for choice in ("required", named)] == [None, None]
    assert grammar_of(chat(response_format=None), Hermes()) is None
    assert grammar_of(CompletionRequest(model="any", prompt="a"), Hermes()) is None


@pytest.mark.parametrize(
    ("schema", "dropped"),
    [
        ({"not": {}}, "not"),
        ({"anyOf": [{"type": "array", "uniqueItems": True, "contains": {}}]}, "contains, uniqueItems"),
        ({"properties": {"a": {"if": {}, "then": {}}}}, "if, then"),
        ({"$defs": {"a": {"propertyNames": {}}}}, "propertyNames"),
        ({"items": {"dependentRequired": {}}}, "dependentRequired"),
    ],
)
def test_an_answers_schema_that_it_would_not_hold_is_refused_by_name(schema: dict[str, Any], dropped: str) -> None:
    asked = chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    with pytest.raises(TrackwayError, match=f"expected a JSON schema without {dropped} beside tools") as raised:
        grammar_of(asked, Hermes())
    assert (raised.value.code, raised.value.detail["param"]) == (ErrorCode.INVALID_REQUEST, "response_format")
