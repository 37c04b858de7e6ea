"""The tool formats of the field, by vLLM's and SGLang's names."""

import ast
import json
import re
from collections.abc import Callable, Iterator

from pydantic import JsonValue

from trackway.chat.tool_calls import (
    BEGIN,
    END,
    JsonPrefix,
    Parameters,
    Parsed,
    ParsedCall,
    ToolFormat,
    blocks_in,
    json_prefix,
    malformed,
    malformed_arguments,
    malformed_json,
    read_call,
    read_json,
    register_tool_format,
    registered,
    unclosed_call,
    with_arguments,
)
from trackway.wire.errors import ErrorCode, TrackwayError

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


@register_tool_format("hermes", "qwen25")
class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen2.5 and Qwen3 write it."""

    begins, end = (BEGIN,), END

    def parse(self, text: str, parameters: Parameters | None = None) -> Parsed:
        """The calls of the turn."""
        return _tagged(text, read_call)

    def opening(self, tool: str | None) -> str:
        """The tag, and the name of the tool."""
        return BEGIN if tool is None else f'{BEGIN}\n{{"name": {json.dumps(tool)}, "arguments":'

    def grammar(self, tool: str, schema: JsonValue) -> dict[str, JsonValue]:
        """The tags around JSON."""
        return _json_tag(f'{BEGIN}\n{{"name": {json.dumps(tool)}, "arguments": ', schema, f"}}\n{END}")


@register_tool_format("qwen3_coder")
class Qwen3Coder(ToolFormat):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` of Qwen3-Coder."""

    begins, end = (BEGIN,), END

    def parse(self, text: str, parameters: Parameters | None = None) -> Parsed:
        """The calls of the turn. Values are strings unless the tool's schema says otherwise."""
        return _tagged(text, lambda block: _read_xml(block, parameters or {}))

    def opening(self, tool: str | None) -> str:
        """The tags, and the name of the tool."""
        return f"{BEGIN}\n<function=" + ("" if tool is None else f"{tool}>\n")

    def grammar(self, tool: str, schema: JsonValue) -> dict[str, JsonValue]:
        """The tags around xgrammar's content for this format."""
        content: dict[str, JsonValue] = {"type": "qwen_xml_parameter", "json_schema": schema}
        begin, end = f"{BEGIN}\n<function={tool}>\n", f"\n</function>\n{END}"
        return {"type": "tag", "begin": begin, "content": content, "end": end}


@register_tool_format("llama3_json", "llama3")
class Llama3Json(ToolFormat):
    """A message that is `{"name": ..., "parameters": {...}}`, or several between semicolons: Llama 3.1 to 3.3."""

    begins, at_start = ("{", "<|python_tag|>"), True

    def parse(self, text: str, parameters: Parameters | None = None) -> Parsed:
        """The calls, if the message is nothing else. JSON without a name and parameters is content."""
        body = text.strip().removeprefix("<|python_tag|>").removesuffix("<|eom_id|>").strip()
        if not body.startswith("{"):
            return Parsed(text.strip(), [])
        calls: list[ParsedCall] = []
        rest = body
        while rest.startswith("{"):
            read = json_prefix(rest)
            if read.error:
                return _broken("", rest, calls, read)
            call = _named(read.value, "parameters", rest)
            if call is None:
                break
            calls.append(call)
            rest = read.behind.lstrip().removeprefix(";").lstrip()
        return Parsed(rest if calls else text.strip(), calls)

    def opening(self, tool: str | None) -> str:
        """The beginning of the object."""
        return '{"name": "' if tool is None else f'{{"name": {json.dumps(tool)}, "parameters":'

    def grammar(self, tool: str, schema: JsonValue) -> dict[str, JsonValue]:
        """The object."""
        return _json_tag(f'{{"name": {json.dumps(tool)}, "parameters": ', schema, "}")


@register_tool_format("mistral")
class Mistral(ToolFormat):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` of tokenizers from v11."""

    begins, special = ("[TOOL_CALLS]",), True

    def parse(self, text: str, parameters: Parameters | None = None) -> Parsed:
        """The calls behind the mark. Nothing follows them."""
        content, *blocks = text.split("[TOOL_CALLS]")
        calls: list[ParsedCall] = []
        for block in blocks:
            named = _MISTRAL_NAME.match(block)
            body = block[named.end() :] if named else block.lstrip()
            read = json_prefix(body)
            if read.error:
                return _broken(content.strip(), self.begins[0] + block, calls, read, named[1] if named else "")
            if named:
                calls.append(with_arguments(named[1], read.value, body))
                continue
            items = read.value if isinstance(read.value, list) else [read.value]
            calls += [_named(item, "arguments", body) or malformed(body) for item in items]
        return Parsed(content.strip(), calls)

    def opening(self, tool: str | None) -> str:
        """The mark, and the beginning of the list."""
        return "[TOOL_CALLS]" if tool is None else f'[TOOL_CALLS] [{{"name": {json.dumps(tool)}, "arguments":'


@register_tool_format("pythonic")
class Pythonic(ToolFormat):
    """A message that is a list of Python calls, `[name(key="value"), ...]`, as Llama 4 and ToolACE write it."""

    begins, at_start = ("[", "<|python_start|>", "<|python_tag|>"), True

    def parse(self, text: str, parameters: Parameters | None = None) -> Parsed:
        """The calls, if the message is such a list. Their arguments are literals, by keyword."""
        body = text.strip().removeprefix("<|python_start|>").removeprefix("<|python_tag|>")
        body = body.removesuffix("<|eom_id|>").removesuffix("<|python_end|>").strip()
        if not _PYTHONIC.match(body):
            return Parsed(text.strip(), [])
        try:
            listed = ast.parse(body, mode="eval").body
            if not isinstance(listed, ast.List):
                return Parsed(text.strip(), [])
            return Parsed("", [_python_call(item, body) for item in listed.elts])
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            return _broken("", body, [], JsonPrefix(None, "", str(error), is_cut=not body.endswith("]")))

    def opening(self, tool: str | None) -> str:
        """The beginning of the list."""
        return "[" if tool is None else f"[{tool}("


BUILT_IN = frozenset(registered())
"""Names of the formats of this module."""


def tool_format(name: str) -> ToolFormat:
    """The format registered under that name.

    Raises:
        TrackwayError: `invalid_request` when there is none.
    """
    formats = registered()
    if name not in formats:
        message = f"tool_parser: expected one of {sorted(formats)}, got {name!r}; add yours with @register_tool_format"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return formats[name]()


def _tagged(text: str, read: Callable[[str], ParsedCall]) -> Parsed:
    blocks, content, behind = blocks_in(text, BEGIN, END)
    unclosed = None if behind is None else unclosed_call(BEGIN + behind)
    return Parsed(content.strip(), [read(block) for block in blocks], unclosed)


def _json_tag(begin: str, schema: JsonValue, end: str) -> dict[str, JsonValue]:
    return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


def _broken(content: str, block: str, calls: list[ParsedCall], read: JsonPrefix, name: str = "") -> Parsed:
    """The turn whose last block cannot be read: cut, or malformed."""
    call = malformed_arguments(name, block, read.error) if name else malformed_json(block, read.error)
    return Parsed(content, calls, call) if read.is_cut else Parsed(content, [*calls, call])


def _named(value: JsonValue, key: str, block: str) -> ParsedCall | None:
    """The call that an object names, or None for another value."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        return None
    keys = [known for known in (key, "arguments", "parameters") if known in value]
    return with_arguments(name, value[keys[0]] if keys else {}, block) if keys or len(value) == 1 else None


def _read_xml(block: str, parameters: Parameters) -> ParsedCall:
    function = _FUNCTION.fullmatch(block)
    if function is None:
        return malformed(block, f"<function=name>...</function> in {BEGIN}...{END}")
    name, body = function[1], function[2]
    schema = parameters.get(name)
    types = schema.get("properties") if isinstance(schema, dict) else None
    arguments = {key: _typed(value, types.get(key) if isinstance(types, dict) else None) for key, value in _pairs(body)}
    return with_arguments(name, arguments, block)


def _pairs(body: str) -> Iterator[tuple[str, str]]:
    for part in body.split("<parameter=")[1:]:
        key, _, value = part.partition(">")
        yield key, value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")


def _typed(value: str, schema: JsonValue) -> JsonValue:
    """The value by its schema. A string where it has no other type, or is no JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind and value != "null"):
        return value
    try:
        return read_json(value if kind != "boolean" else value.lower())
    except (ValueError, RecursionError):
        return value


def _python_call(item: ast.expr, block: str) -> ParsedCall:
    if not isinstance(item, ast.Call):
        return malformed(block, "[name(key=value), ...]")
    name = ast.unparse(item.func)
    if item.args or any(keyword.arg is None for keyword in item.keywords):
        return malformed_arguments(name, block, "expected arguments by keyword, got others")
    values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in item.keywords}
    try:
        return with_arguments(name, read_json(json.dumps(values)), block)
    except TypeError as error:
        return malformed_arguments(name, block, str(error))
