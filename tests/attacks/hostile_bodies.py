"""JSON values of up to 16 MB that cost much more than they look."""

from collections.abc import Callable

SIZE = 16 * 1024 * 1024

Value = Callable[[int], bytes]
"""The value in as many bytes as there are left."""


def listed(unit: bytes, count: int | None = None) -> Value:
    """A list of so many units, or of as many as fit."""
    return lambda size: b"[" + b",".join([unit] * (count or (size - 2) // (len(unit) + 1))) + b"]"


def text(unit: bytes, behind: bytes = b"") -> Value:
    """A text of units."""
    return lambda size: b'"' + unit * ((size - 2 - len(behind)) // len(unit)) + behind + b'"'


def raw(unit: bytes) -> Value:
    """Units that are no JSON, side by side."""
    return lambda size: unit * (size // len(unit))


def keys(count: int) -> Value:
    """An object of so many different names, of which none is known."""
    return lambda size: b"{" + b",".join(b'"%07d":1' % number for number in range(count)) + b"}"


_CALL = rb"<tool_call>{\"name\":\"calculator\",\"arguments\":{\"expression\":\"1\"}}</tool_call>"
_MESSAGE = b'{"role":"user","content":"' + b"abc " * 240 + b'"}'

HOSTILE: dict[str, Value] = {
    # far more values than any request has
    "lists": listed(b"[]"),
    "objects": listed(b'{"a":1}'),
    "texts": listed(b'"ab"'),
    "numbers": listed(b"12345"),
    "names": keys(1_200_000),
    "deep lists": raw(b"["),
    "deep objects": raw(b'{"a":'),
    # as many as may be parsed
    "many lists": listed(b"[]", 95_000),
    "many texts": listed(b'"ab"', 490_000),
    "many numbers": listed(b"12345", 490_000),
    "many floats": listed(b"1.25", 490_000),
    "many names": keys(95_000),
    "many messages": listed(b'{"role":"user"}', 33_000),
    "long messages": listed(_MESSAGE, 16_000),
    # few values of many bytes
    "words": text(b"abcde fghi "),
    "one word": text(b"x"),
    "spaces": text(b" "),
    "wide": text(b"x", "\N{GRINNING FACE}".encode()),
    "emoji": text("\N{GRINNING FACE}".encode()),
    "escapes": text(rb"\u0001"),
    "structure": text(b",:[{"),
    "digits": text(b"9"),
    "number": raw(b"9"),
    "quotes": raw(b'","'),
    "open calls": text(b"<tool_call>"),
    "open tags": text(b"<search><python>"),
    "calls": text(_CALL),
}
