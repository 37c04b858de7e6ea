"""Serialization of any value as bounded JSON at a bounded cost.

Traced functions have arbitrary arguments: lists of a million ids, cyclic objects, a repr that raises. None of them may
slow down or fail a rollout.
"""

import dataclasses
from collections import deque
from collections.abc import Collection, Mapping
from enum import Enum
from itertools import islice

from pydantic import BaseModel

from trackway.tracing.active import active_tracing
from trackway.tracing.redaction import redacted
from trackway.wire.base import named_number

MAX_ITEMS = 512
"""Most items of one list or mapping. The rest is only counted."""
MAX_VALUES = 4096
"""Most values of the whole payload."""
MAX_DEPTH = 12
MAX_BITS = 1024
HUGE_TEXT = 1 << 20
"""Characters. A longer text is cut here already, a shorter one only with all others, by a limit in bytes."""
KEPT_OF_HUGE = 4096


def bounded(value: object) -> object:
    """A bounded copy of `value` of plain dicts, lists, strings and numbers. Never raises."""
    return _Copy().of(value, 0)


def plain_number(value: object) -> object:
    """A scalar of numpy or torch as a Python number; any other value unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def fields(value: object) -> dict[str, object] | None:
    """The named parts of a pydantic model or a dataclass, not copied, or None for anything else."""
    if isinstance(value, BaseModel):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


class _Copy:
    """One payload being copied."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def of(self, value: object, depth: int) -> object:
        """The copy of one part."""
        self._left -= 1
        try:
            return self._of(value, depth)
        except Exception as error:
            # The value's own code ran: iteration, repr, properties.
            return f"[not shown: {type(error).__name__}]"

    def _of(self, value: object, depth: int) -> object:
        if value is None or isinstance(value, str | bool | int | float | bytes | bytearray):
            return _leaf(value)
        if depth >= MAX_DEPTH:
            return "[too deep]"
        parts = value if isinstance(value, Mapping) else fields(value)
        if parts is not None:
            return self._dict(parts, depth + 1)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return self._list(value, depth + 1)
        if isinstance(value, Enum):
            return self.of(value.value, depth + 1)
        number = plain_number(value)
        return _leaf(repr(value) if number is value else number)

    def _dict(self, parts: Mapping[object, object] | Mapping[str, object], depth: int) -> dict[str, object]:
        kept = min(MAX_ITEMS, max(0, self._left))
        copy = {str(key): self.of(item, depth) for key, item in islice(parts.items(), kept)}
        return copy if len(parts) <= kept else {**copy, "...": f"[{len(parts) - kept} more]"}

    def _list(self, parts: Collection[object], depth: int) -> list[object]:
        kept = min(MAX_ITEMS, max(0, self._left))
        copy = [self.of(item, depth) for item in islice(parts, kept)]
        return copy if len(parts) <= kept else [*copy, f"[{len(parts) - kept} more]"]


def _leaf(value: object) -> object:
    if isinstance(value, bytes | bytearray):
        return f"[{len(value)} bytes]"
    if isinstance(value, float):
        return named_number(float(value))
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"[a number of {value.bit_length()} bits]"
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    if len(value) > HUGE_TEXT:
        tracing = active_tracing()
        value = redacted(value, tracing.redact if tracing else None)  # before a secret is cut in two
        if len(value) > KEPT_OF_HUGE:
            value = f"{value[:KEPT_OF_HUGE]}[truncated {len(value) - KEPT_OF_HUGE} characters]"
    return value if value.isascii() else value.encode(errors="replace").decode()
