"""Sending to a backend what waits for it on disk: in a thread of the run's process, and by the service afterwards.

What waits is on disk before it is sent and until the backend has it. So a backend that is slow or away, and a process
that is killed, cost time and no data.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from trackway.wire.trainer import BackendSummary

logger = logging.getLogger("trackway.trainer")

FIRST_PAUSE_S = 0.5
"""Before a backend that could not take something is asked again; doubled each time."""
LONGEST_PAUSE_S = 8.0
CLOSING_PAUSE_S = 2.0
"""Longest pause when the run has ended."""
CLOSING_PATIENCE_S = 15.0
"""For a backend that takes nothing when the run ends; longer than a trace takes to arrive."""


class Later(Exception):
    """The backend may take it later: it is away, slow or busy, or lacks what this belongs to."""


class Refused(Exception):
    """The backend will never take it."""


class Delivery(Protocol):
    """What waits for one backend of one run; `advance` and `close` are called by one thread at a time."""

    name: str

    def advance(self) -> bool:
        """Send the next part, a few requests at most; False when nothing waits. Raises Later, with the reason."""
        ...

    def summary(self) -> BackendSummary:
        """What waits, and what was lost."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class DeliveryThread:
    """Advances a delivery whenever something waits, until `close`."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._changed = threading.Condition()
        self._woken = False
        self._attempts = 0
        self._closing_at: float | None = None
        self._end = 0.0
        self._trouble = ""
        self._thread = threading.Thread(target=self._work, name=f"deliver-{delivery.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something new waits; returns at once."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def wait_for_first_attempt(self, deadline_s: float) -> bool:
        """Wait until something was sent, or could not be; False at the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: self._attempts > 0, deadline_s)

    def close(self, deadline_s: float) -> None:
        """Send what waits, at most until the deadline; the rest stays on disk."""
        with self._changed:
            self._closing_at = time.monotonic()
            self._end = self._closing_at + deadline_s
            self._changed.notify_all()
        self._thread.join(deadline_s)

    def _work(self) -> None:
        pause = 0.0
        while True:
            more = self._advance()
            pause = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, pause * 2)) if self._trouble else 0.0
            if not self._wait(more, pause):
                break
        self._delivery.close()

    def _advance(self) -> bool:
        try:
            more = self._delivery.advance()
        except Exception as error:
            # Whatever it is: a tracking backend's trouble must not become the training's.
            if not self._trouble:
                logger.warning("%s: what is meant for it waits on disk: %s", self._delivery.name, _reason(error))
            self._trouble = _reason(error)
            return False
        if self._trouble:
            logger.warning("%s: goes on", self._delivery.name)
        self._trouble = ""
        return more

    def _wait(self, more: bool, pause: float) -> bool:
        """Wait until there is something to do; False when the thread ends."""
        with self._changed:
            self._attempts += 1
            self._changed.notify_all()
            if not more and not self._woken:
                if self._closing_at is None:
                    self._changed.wait_for(lambda: self._woken or self._closing_at is not None, pause or None)
                elif not pause:
                    return False
                else:
                    self._changed.wait_for(lambda: self._woken, min(pause, CLOSING_PAUSE_S))
            self._woken = False
            if self._closing_at is None:
                return True
            now = time.monotonic()
            return now < self._end and not (pause and now - self._closing_at > CLOSING_PATIENCE_S)


@contextmanager
def only_sender(lock: Path) -> Iterator[None]:
    """Hold a delivery's lock, whose folder is made; raises Later while another process sends."""
    lock.parent.mkdir(exist_ok=True)
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Later("another process sends it at this moment") from None
        yield
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Later) else f"{type(error).__name__}: {error}"
