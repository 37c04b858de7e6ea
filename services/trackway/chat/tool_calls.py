"""Tool calls in the model's text, as Hermes, Qwen2.5 and Qwen3 write them.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; a malformed call carries the reason.
"""

import json
import re
from dataclasses import dataclass, field

from pydantic import JsonValue
from pydantic_core import from_json

BEGIN, END = "<tool_call>", "</tool_call>"
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,256})"')


@dataclass(frozen=True)
class ParsedCall:
    """A call as the model wrote it; a call with `error` cannot run, and `error` is its observation."""

    name: str
    arguments: dict[str, JsonValue] = field(default_factory=dict)
    raw: str = ""
    """The arguments as JSON, or the text of a malformed call."""
    error: str | None = None


def blocks_in(text: str, begin: str, end: str) -> tuple[list[str], str, str | None]:
    """The text between each `begin` and the next `end`, the text outside, and the text after an unclosed `begin`.

    A regular expression would scan for `end` from every unclosed `begin`.
    """
    blocks: list[str] = []
    outside: list[str] = []
    start = 0
    while (opened := text.find(begin, start)) >= 0:
        closed = text.find(end, opened + len(begin))
        if closed < 0:
            break
        outside.append(text[start:opened])
        blocks.append(text[opened + len(begin) : closed])
        start = closed + len(end)
    rest, is_open, behind = text[start:].partition(begin)
    return blocks, "".join([*outside, rest]), behind if is_open else None


def read_call(block: str) -> ParsedCall:
    """Parse the call between the tags."""
    try:
        call = _json(block)
    except (ValueError, RecursionError) as error:
        return _malformed(_name_in(block), block, str(error))
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str):
        return _malformed("", block, "no name")
    return _with_arguments(name, call.get("arguments", {}), block)


def unclosed_call(text: str) -> ParsedCall:
    """The error for a call without a closing tag."""
    error = f"Invalid tool call: expected {END} after {BEGIN}, got the end of the turn."
    return ParsedCall(name=_name_in(text), raw=text, error=error)


def _with_arguments(name: str, arguments: JsonValue, block: str) -> ParsedCall:
    try:
        read = _json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return _malformed(name, block, str(error))
    if not isinstance(read, dict):
        return _malformed(name, block, f"expected an object, got {type(read).__name__}")
    return ParsedCall(name, read, _ENCODER.encode(read))


def _malformed(name: str, block: str, reason: str) -> ParsedCall:
    if name:
        error = f"Invalid JSON in arguments for '{name}': {reason}"
    else:
        wanted = '{"name": "<function>", "arguments": {...}}'
        error = f"Invalid tool call: expected {wanted} in {BEGIN}...{END}, got {block.strip()!r}"
    return ParsedCall(name=name, raw=block, error=error)


def _name_in(block: str) -> str:
    match = _NAME.search(block)
    return match.group(1) if match else ""


def _json(text: str) -> JsonValue:
    """Strict JSON that a service accepts: rejects NaN, infinite numbers, lone surrogates, and nesting above 201.

    Raises ValueError, RecursionError.
    """
    value: JsonValue = _DECODER.decode(text)
    from_json(_ENCODER.encode(value).encode(), allow_inf_nan=False)
    return value


def _no_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


_DECODER, _ENCODER = json.JSONDecoder(parse_constant=_no_constant), json.JSONEncoder(ensure_ascii=False)
