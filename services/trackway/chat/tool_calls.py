"""Tool calls in the model's text: JSON, between tags or alone. A malformed call carries the reason."""

import json
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import JsonValue
from pydantic_core import from_json

BEGIN, END = "<tool_call>", "</tool_call>"
_WANTED = '{"name": "<function>", "arguments": {...}}'
_CUT = re.compile(r"[\w.+\\-]*\s*")
"""Text between the place of a JSON error and the end of a text that was cut there."""
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,256})"')


@dataclass(frozen=True)
class ParsedCall:
    """A call as the model wrote it. A call with `error` cannot run, and `error` is its observation."""

    name: str
    arguments: dict[str, JsonValue] = field(default_factory=dict)
    raw: str = ""
    """The arguments as JSON, or the text of a malformed call."""
    error: str | None = None


class JsonPrefix(NamedTuple):
    """The JSON value with which a text begins, and the text behind it."""

    value: JsonValue
    behind: str
    error: str = ""
    """Why it is no JSON."""
    is_cut: bool = False
    """True if the text ended within it."""


def json_prefix(text: str) -> JsonPrefix:
    """Read the value at the start of a text."""
    try:
        value, end = _DECODER.raw_decode(text)
        return JsonPrefix(_strict(value), text[end:])
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string") or _CUT.fullmatch(text, error.pos) is not None
        return JsonPrefix(None, "", str(error), is_cut)
    except (ValueError, RecursionError) as error:
        return JsonPrefix(None, "", str(error))


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
        call = read_json(block)
    except (ValueError, RecursionError) as error:
        return malformed_json(block, str(error), f"{_WANTED} in {BEGIN}...{END}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str):
        return malformed(block, f"{_WANTED} in {BEGIN}...{END}")
    return with_arguments(name, call.get("arguments", {}), block)


def unclosed_call(text: str) -> ParsedCall:
    """The error for a call without a closing tag."""
    error = f"Invalid tool call: expected {END} after {BEGIN}, got the end of the turn."
    return ParsedCall(name=_name_in(text), raw=text, error=error)


def with_arguments(name: str, arguments: JsonValue, block: str) -> ParsedCall:
    """The call with these arguments, which may be JSON in a string."""
    try:
        read = read_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return malformed_arguments(name, block, str(error))
    if not isinstance(read, dict):
        return malformed_arguments(name, block, f"expected an object, got {type(read).__name__}")
    return ParsedCall(name, read, _ENCODER.encode(read))


def malformed_arguments(name: str, block: str, reason: str) -> ParsedCall:
    """The error for a call whose function is known."""
    return ParsedCall(name=name, raw=block, error=f"Invalid JSON in arguments for '{name}': {reason}")


def malformed(block: str, wanted: str = _WANTED) -> ParsedCall:
    """The error for a call without a function."""
    return ParsedCall(name="", raw=block, error=f"Invalid tool call: expected {wanted}, got {block.strip()!r}")


def malformed_json(block: str, reason: str, wanted: str = _WANTED) -> ParsedCall:
    """The error for a call that is no JSON."""
    name = _name_in(block)
    return malformed_arguments(name, block, reason) if name else malformed(block, wanted)


def _name_in(block: str) -> str:
    match = _NAME.search(block)
    return match.group(1) if match else ""


def read_json(text: str) -> JsonValue:
    """Strict JSON that a service accepts: rejects NaN, infinite numbers, lone surrogates, and nesting above 201.

    Raises ValueError, RecursionError.
    """
    return _strict(_DECODER.decode(text))


def _strict(value: JsonValue) -> JsonValue:
    from_json(_ENCODER.encode(value).encode(), allow_inf_nan=False)
    return value


def _no_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


_DECODER, _ENCODER = json.JSONDecoder(parse_constant=_no_constant), json.JSONEncoder(ensure_ascii=False)
