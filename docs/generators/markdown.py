"""Pieces of Markdown."""

import html
import re
from collections.abc import Iterable, Sequence

_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
_CONSTANT = re.compile(r"\b(?:None|True|False)\b")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown, of which line breaks and `|` are made safe."""
    lines = [list(header), ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def code(text: str) -> str:
    """`text` as inline code; the empty string stays empty."""
    if not text:
        return ""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def breakable(text: str) -> str:
    """A name or a path as code that a narrow column may break, but only after a dot, a slash or a double underscore."""
    return f"<code>{re.sub('((?<=.[./])|(?<=.__))(?=.)', '<wbr>', html.escape(text, quote=False))}</code>"


def page(title: str, *parts: str) -> str:
    """A page of paragraphs, tables and headings, one below the other."""
    return "\n\n".join([f"# {title}", *(part.strip("\n") for part in parts)]) + "\n"


def sentence(docstring: str) -> str:
    """A field's docstring for readers of JSON and YAML: null, true and false instead of Python's names; no HTML."""
    parts = docstring.split("`")
    parts[::2] = [
        _CONSTANT.sub(lambda found: f"`{_CONSTANTS[found[0]]}`", html.escape(part, quote=False)) for part in parts[::2]
    ]
    return "`".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
