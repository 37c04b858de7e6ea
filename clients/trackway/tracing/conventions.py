"""Read spans of agent frameworks, recorded by OpenTelemetry's GenAI or by the OpenInference conventions, as our own.

https://github.com/open-telemetry/semantic-conventions-genai
https://github.com/Arize-ai/openinference/tree/main/spec
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from trackway.tracing import attributes as names

_ALIASES = {
    names.OPERATION: (names.OPENINFERENCE_KIND, names.MLFLOW_SPAN_TYPE),
    names.MODEL: (names.RESPONSE_MODEL, "llm.model_name"),
    names.INPUT_TOKENS: ("gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
    names.OUTPUT_TOKENS: ("gen_ai.usage.completion_tokens", "llm.token_count.completion"),
    names.TOOL_NAME: ("tool.name",),
    names.INPUTS: (names.INPUT_MESSAGES, names.TOOL_ARGUMENTS, "tool.parameters", "tool_arguments", "input.value"),
    names.OUTPUTS: (names.OUTPUT_MESSAGES, names.TOOL_RESULT, "tool_response", "output.value"),
}
"""Names of a fact in the conventions, and in their earlier releases, after the name that we read. The first counts."""

_KINDS = {
    "chat": "chat",
    "generate_content": "chat",
    "text_completion": "chat",
    "LLM": "chat",
    "CHAT_MODEL": "chat",
    "execute_tool": "execute_tool",
    "TOOL": "execute_tool",
}
"""The kind of our span for the same work, by GenAI operation, OpenInference kind or MLflow type."""

_MESSAGE = re.compile(r"llm\.(input|output)_messages\.(\d+)\.message\.(.+)")
_CALL = re.compile(r"tool_calls\.(\d+)\.tool_call\.function\.(name|arguments)")


def is_foreign(attributes: Mapping[str, JsonValue]) -> bool:
    """Return whether a framework recorded the span: none of our services is named."""
    return names.SERVICE not in attributes


def work_of(attributes: Mapping[str, JsonValue]) -> str:
    """Return the kind of our span for the same work: `chat`, `execute_tool` or `operation`."""
    return _KINDS.get(str(_first(attributes, names.OPERATION)), "operation")


def as_our_own(attributes: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the attributes with each known fact under our name, and messages with a role and a text."""
    found: dict[str, JsonValue] = {name: _first(attributes, name) for name in _ALIASES}
    for name, side in ((names.INPUTS, "input"), (names.OUTPUTS, "output")):
        value = _loaded(found[name])
        messages = _flattened(attributes, side) or (_messages(value) if isinstance(value, list) else [])
        found[name] = {"messages": messages} if messages else value
    return {**attributes, **{name: value for name, value in found.items() if value is not None}}


def _first(attributes: Mapping[str, JsonValue], name: str) -> JsonValue:
    return next((attributes[key] for key in (name, *_ALIASES[name]) if attributes.get(key) is not None), None)


def _loaded(value: JsonValue) -> JsonValue:
    """The JSON value of a text, or the value itself."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _messages(values: list[JsonValue]) -> list[JsonValue]:
    """GenAI's messages, whose texts, calls and results are parts."""
    return [
        {"role": str(value["role"]), "content": "\n".join(map(_text, objects_in(value.get("parts"))))}
        for value in objects_in(values)
        if "role" in value
    ]


def _text(part: Mapping[str, Any]) -> str:
    if part.get("type") == "tool_call":
        return _call(part.get("name"), part.get("arguments"))
    return _plain(part.get("content", part.get("response", part.get("result"))))


def _call(name: object, arguments: object) -> str:
    return f"{name}({_plain(arguments)})"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def objects_in(value: object) -> list[dict[str, Any]]:
    """Return the objects of a list, and none of any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _flattened(attributes: Mapping[str, JsonValue], side: str) -> list[JsonValue]:
    """OpenInference's messages, each field of which is an attribute."""
    fields: dict[int, dict[str, JsonValue]] = defaultdict(dict)
    for key, value in attributes.items():
        if (match := _MESSAGE.fullmatch(key)) and match[1] == side:
            fields[int(match[2])][match[3]] = value
    return [
        {
            "role": _plain(message.get("role")),
            "content": "\n".join(filter(None, (_plain(message.get("content")), *_texts(message), *_calls(message)))),
        }
        for _, message in sorted(fields.items())
    ]


def _texts(message: Mapping[str, JsonValue]) -> list[str]:
    return [_plain(value) for key, value in message.items() if key.endswith(".message_content.text")]


def _calls(message: Mapping[str, JsonValue]) -> list[str]:
    calls: dict[int, dict[str, JsonValue]] = defaultdict(dict)
    for key, value in message.items():
        if match := _CALL.fullmatch(key):
            calls[int(match[1])][match[2]] = value
    return [_call(call.get("name"), call.get("arguments")) for _, call in sorted(calls.items())]
