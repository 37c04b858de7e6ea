"""Escaping of control characters in log records, so that input with a newline cannot forge a log line.

The records themselves escape their text, so this covers every logger and handler of the process, including Ray's and
uvicorn's.
"""

import logging
import traceback
from collections.abc import Callable
from functools import lru_cache

from trackway.wire.errors import shortened


def visible(text: str, keep: str = "") -> str:
    """The text with unprintable characters as Python escapes: `\\n`, `\\x1b`, `\\u202e`.

    It stays on its line and cannot colour or reorder its surroundings. Characters in `keep` are left unchanged.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


MAX_CHARS = 16_384
"""Longest message and longest traceback of a record in characters. A longer one loses its middle."""
_INDENT = "  "
"""Indentation of tracebacks, whose last lines are the exception's text and may look like log lines."""


class _Escaping(logging.LogRecord):
    def getMessage(self) -> str:
        return visible(shortened(super().getMessage(), MAX_CHARS))


def escape_log_records() -> None:
    """Escape control characters in every further log record of this process."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, _Factory):
        logging.setLogRecordFactory(_Factory(make))


class _Factory:
    """Ray wraps this factory in its own, and this one wraps the factory that was installed before it."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: object, **kwargs: object) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        record.__class__ = _escaping(type(record))
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            text = shortened("".join(traceback.format_exception(*record.exc_info)), MAX_CHARS)
            lines = text.rstrip("\n").split("\n")
            record.exc_text = "\n".join(_INDENT + visible(line) for line in lines)
        return record


@lru_cache(maxsize=16)
def _escaping(kind: type[logging.LogRecord]) -> type[logging.LogRecord]:
    if issubclass(kind, _Escaping):
        return kind
    return _Escaping if kind is logging.LogRecord else type(kind.__name__, (_Escaping, kind), {})
