"""Lines of the log that say how far something is that takes long."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

EVERY_S = 5.0
"""Between two lines; what is done earlier is silent."""

logger = logging.getLogger("trackway.trainer")


def counted(items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
    """The items as they come; from time to time the log says how many have."""
    told, of = time.monotonic(), "" if total is None else f" of {total}"
    for count, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - told > EVERY_S:
            told = time.monotonic()
            logger.info("%s: %d%s", doing, count, of)
