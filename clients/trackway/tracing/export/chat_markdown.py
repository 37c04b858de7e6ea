"""Escape a conversation's texts for MLflow's page, which renders messages as Markdown, and unescape them.

There `#### 16` is a heading, and a line break is a space. `escaped` puts a zero-width space before a heading's sign and
two spaces before a line break, except in fenced code. A search for the text of a line still finds it.
"""

import re
from collections.abc import Callable

SIGN = "\u200b"
_HEADING = re.compile(r" {0,3}#{1,6}(\s|$)")
_BREAK = "  "


def escaped(text: str) -> str:
    """Return a text whose lines Markdown renders as they are."""

    def changed(line: str, ending: str) -> str:
        return f"{SIGN if _HEADING.match(line) else ''}{line}{ending}"

    return _each_line(text, changed)


def unescaped(text: str) -> str:
    """Return the text that was given to `escaped`."""
    return _each_line(text, lambda line, ending: line.removesuffix(ending).removeprefix(SIGN))


def _each_line(text: str, changed: Callable[[str, str], str]) -> str:
    """Return the text with `changed(line, ending before a line break)` for each line that is neither empty nor code."""
    lines, is_code = text.split("\n"), False
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif line.strip() and not is_code:
            lines[number - 1] = changed(line, _BREAK if number < len(lines) else "")
    return "\n".join(lines)
