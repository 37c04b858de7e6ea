"""Texts of a conversation as MLflow's page needs them, which draws messages as Markdown, and back again.

There `#### 16` is a heading, and a line break is a space. `drawn` puts a zero-width space before a heading's sign and
two spaces before a line break, but not in fenced code. A search for the text of a line still finds it.
"""

import re
from collections.abc import Callable

SIGN = "\u200b"
_HEADING = re.compile(r" {0,3}#{1,6}(\s|$)")
_BREAK = "  "


def drawn(text: str) -> str:
    """The text whose lines Markdown shows as they are."""

    def changed(line: str, ending: str) -> str:
        return f"{SIGN if _HEADING.match(line) else ''}{line}{ending}"

    return _each_line(text, changed)


def recorded(text: str) -> str:
    """The text that `drawn` has changed."""
    return _each_line(text, lambda line, ending: line.removesuffix(ending).removeprefix(SIGN))


def _each_line(text: str, changed: Callable[[str, str], str]) -> str:
    """`changed(line, end before a line break)` for each line that is neither empty nor code."""
    lines, is_code = text.split("\n"), False
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif line.strip() and not is_code:
            lines[number - 1] = changed(line, _BREAK if number < len(lines) else "")
    return "\n".join(lines)
