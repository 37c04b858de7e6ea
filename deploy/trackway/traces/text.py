"""Escaping and shortening of a model's text for a terminal or a page."""

import re

_ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and bidirectional formatting characters."""


def visible(text: str) -> str:
    """The text with control characters replaced by symbols or escapes."""
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _ACTING.sub(lambda match: _sign(ord(match[0])), encodable)


def _sign(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


def shortened(text: str, lines: int, characters: int) -> str:
    """The beginning of a text, with the number of characters left out."""
    kept = "\n".join(text.split("\n")[:lines])[:characters]
    left_out = len(text) - len(kept)
    return f"{kept} … {left_out} more characters" if left_out > 0 else text


def one_line(text: str) -> str:
    """The text without line breaks, for a table cell."""
    return visible(text).replace("\n", "⏎")


def ending(text: str, characters: int) -> str:
    """The end of a text on one line."""
    line = one_line(text.strip())
    return line if len(line) <= characters else f"…{line[-characters + 1 :]}"
