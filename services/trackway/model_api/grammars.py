"""The grammar that guides an answer: its JSON format, and beside tools a choice of calls and that format."""

import json
from collections.abc import Iterator

from pydantic import JsonValue, ValidationError

from trackway.chat.tool_format import ToolFormat
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai.requests import ChatRequest, ChatTool, SampledRequest
from trackway.wire.rollout import StructuredOutputs

_IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "dependentSchemas", "dependentRequired"),
        *("uniqueItems", "contains", "minContains", "maxContains"),
        *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
    }
)
"""Keywords of JSON schemas that xgrammar drops, or does not honour everywhere. For a schema alone vLLM uses another
engine of grammars then, which has no structural tags."""
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples")


def grammar_of(request: SampledRequest, tool_format: ToolFormat) -> StructuredOutputs | None:
    """The grammar of a choice. Beside tools it begins with a call, or is JSON of the format.

    Raises INVALID_REQUEST for schemas beyond the bounds, or with keywords that such a grammar would drop.
    """
    try:
        grammar = request.structured_outputs
    except ValidationError as error:
        raise _beyond_bounds("response_format", error) from error
    if grammar is None or not isinstance(request, ChatRequest) or not request.offers_tools:
        return grammar
    answer: dict[str, JsonValue] = {"type": "object"} if grammar.json_schema is None else grammar.json_schema
    if dropped := sorted(_IGNORED.intersection(_keywords(answer))):
        message = (
            f"response_format: expected a JSON schema without {', '.join(dropped)} beside tools, whose grammar cannot "
            "hold them; leave them out of the schema, or send no tools"
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="response_format")
    calls: dict[str, JsonValue] = {
        "type": "tags_with_separator",
        "tags": [_call(tool, tool_format) for tool in request.tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not request.parallel_tool_calls,
    }
    either = {"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": answer}]}
    try:
        return StructuredOutputs(structural_tag=json.dumps({"type": "structural_tag", "format": either}))
    except ValidationError as error:
        raise _beyond_bounds("tools", error, " (beside a JSON format, they guide the calls)") from error


def _beyond_bounds(param: str, error: ValidationError, why: str = "") -> TrackwayError:
    return TrackwayError(ErrorCode.INVALID_REQUEST, f"{param}: {error.errors()[0]['msg']}{why}", param=param)


def _call(tool: ChatTool, tool_format: ToolFormat) -> dict[str, JsonValue]:
    """A call of the tool in the model's format."""
    parameters = tool.function.get("parameters")
    schema = {"type": "object", **(parameters if isinstance(parameters, dict) else {})}
    return tool_format.grammar(tool.name, schema)


def _keywords(schema: JsonValue) -> Iterator[str]:
    """Every keyword of a JSON schema and of those within it; names of properties are none."""
    pending: list[JsonValue] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            yield from part
            for keyword, value in part.items():
                if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
                    pending += value.values()
                elif keyword not in _VALUES:
                    pending.append(value)
