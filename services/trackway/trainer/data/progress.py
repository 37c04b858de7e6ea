"""Progress of long operations, in the log."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

EVERY_S = 5.0
"""Interval between two lines; a shorter operation logs none."""

logger = logging.getLogger("trackway.trainer")


def counted(items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
    """The items unchanged. Their count so far is logged every EVERY_S seconds."""
    last_logged, of_total = time.monotonic(), "" if total is None else f" of {total}"
    for count, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last_logged > EVERY_S:
            last_logged = time.monotonic()
            logger.info("%s: %d%s", doing, count, of_total)
