"""The JSON schemas of GenAI messages and tools, with their facts in our own words.

Source: model/gen-ai/gen-ai-*.json of https://github.com/open-telemetry/semantic-conventions-genai, input messages at
commit c4437e576cb6486fba38739176216c535e1cdb9e, tool definitions at d357ce213b466276774e18fb7f598bef06d003d0.
"""

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
OPTIONAL: Schema = {"type": ["string", "null"]}
ANY: Schema = {}
TYPED: Schema = {"type": "object", "properties": {"type": STRING}, "required": ["type"]}
DRAFT_7: Schema = {"anyOf": [{"$ref": "http://json-schema.org/draft-07/schema#"}, {"type": "null"}]}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": [*required]}


def _part(kind: str, required: Schema | None = None, optional: Schema | None = None) -> Schema:
    return _object({"type": {"const": kind}, **(required or {})}, optional)


TEXT = _part("text", {"content": STRING})
GENERIC = _part("generic", optional={"generic_type": OPTIONAL})
PARTS = [
    TEXT,
    GENERIC,
    _part("reasoning", {"content": STRING}),
    _part("compaction", optional={"id": OPTIONAL, "content": OPTIONAL}),
    _part("tool_call", {"name": STRING}, {"id": OPTIONAL, "arguments": ANY}),
    _part("tool_call_response", {"response": ANY}, {"id": OPTIONAL}),
    _part("server_tool_call", {"name": STRING, "server_tool_call": TYPED}, {"id": OPTIONAL}),
    _part("server_tool_call_response", {"server_tool_call_response": TYPED}, {"id": OPTIONAL}),
    *(
        _part(kind, {"modality": STRING, content: STRING}, {"mime_type": OPTIONAL})
        for kind, content in (("blob", "content"), ("file", "file_id"), ("uri", "uri"))
    ),
]
FUNCTION = _part("function", {"name": STRING}, {"description": OPTIONAL, "parameters": DRAFT_7})


def _list(*items: Schema) -> Schema:
    return {"type": "array", "items": {"anyOf": [*items]}}


_MESSAGE: tuple[Schema, Schema] = ({"role": STRING, "parts": _list(*PARTS)}, {"name": OPTIONAL})
SCHEMAS: dict[str, Schema] = {
    "gen_ai.input.messages": _list(_object(*_MESSAGE)),
    "gen_ai.output.messages": _list(_object(_MESSAGE[0], _MESSAGE[1] | {"finish_reason": OPTIONAL})),
    "gen_ai.system_instructions": _list(TEXT, GENERIC),
    "gen_ai.tool.definitions": _list(FUNCTION, _object({"type": STRING, "name": STRING})),
    "gen_ai.tool.call.arguments": {"type": "object"},
    "gen_ai.tool.call.result": {"type": "object"},
}
"""Schema by attribute. An attribute's value is its JSON text."""

FILES = {
    "gen_ai.input.messages": "gen-ai-input-messages.json",
    "gen_ai.output.messages": "gen-ai-output-messages.json",
    "gen_ai.system_instructions": "gen-ai-system-instructions.json",
    "gen_ai.tool.definitions": "gen-ai-tool-definitions.json",
}
"""The originals' files in their repository, by attribute."""
