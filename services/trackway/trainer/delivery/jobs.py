"""Delivery of queued data to a backend: by a thread of the run's process, and later by the service.

Data is on disk before it is sent and stays there until the backend has it. A slow or unreachable backend, or a killed
process, delays the data but does not lose it.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from trackway.system import LockTaken, acquire_lock
from trackway.system.waits import Backoff
from trackway.wire.trainer import BackendSummary, MetricsRow

logger = logging.getLogger("trackway.trainer")

BACKOFF = Backoff(first_s=0.5, longest_s=8.0)
CLOSING_PAUSE_S = 2.0
"""Longest pause between retries once the run has ended."""
CLOSING_RETRY_S = 15.0
"""How long a backend that accepts nothing is retried once the run has ended. Longer than a trace takes to arrive."""


class Later(Exception):
    """The request may succeed later: the backend is unreachable, slow or busy, or lacks the trace it refers to."""


class Refused(Exception):
    """The backend will never accept the request."""


class Delivery(Protocol):
    """The queued data of one run for one backend. `advance` and `close` are called by one thread at a time."""

    name: str

    def advance(self) -> bool:
        """Send the next part in a few requests. False when nothing is queued. Raises Later with the reason."""
        ...

    def summary(self) -> BackendSummary:
        """The counts of queued and lost data."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class DeliveryThread:
    """Sends queued data in a thread until `close`."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._changed = threading.Condition()
        self._woken = False
        self._attempts = 0
        self._closing_at: float | None = None
        self._end = 0.0
        self._error = ""
        self._thread = threading.Thread(target=self._work, name=f"deliver-{delivery.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Signal new data. Returns immediately."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def log(self, row: MetricsRow) -> None:
        """Send the row, which is read from its file."""
        self.wake()

    def wait_for_first_attempt(self, deadline_s: float) -> bool:
        """Wait until the first attempt to send has succeeded or failed; False at the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: self._attempts > 0, deadline_s)

    def close(self, deadline_s: float) -> None:
        """Send the queued data until the deadline. The rest stays on disk."""
        with self._changed:
            self._closing_at = time.monotonic()
            self._end = self._closing_at + deadline_s
            self._changed.notify_all()
        self._thread.join(deadline_s)

    def _work(self) -> None:
        failures = 0
        while True:
            more = self._advance()
            failures = failures + 1 if self._error else 0
            if not self._wait(more, BACKOFF.pause_s(failures)):
                break
        self._delivery.close()

    def _advance(self) -> bool:
        try:
            more = self._delivery.advance()
        except Exception as error:
            # Any error: the failure of a tracking backend must not stop training.
            if not self._error:
                logger.warning("%s: its data is kept on disk: %s", self._delivery.name, _reason(error))
            self._error = _reason(error)
            return False
        if self._error:
            logger.warning("%s: available again, sending continues", self._delivery.name)
        self._error = ""
        return more

    def _wait(self, more: bool, pause: float) -> bool:
        """Wait for new data or the next retry. False when the thread should end."""
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
            return now < self._end and not (pause and now - self._closing_at > CLOSING_RETRY_S)


@contextmanager
def only_sender(lock: Path) -> Iterator[None]:
    """Hold a delivery's lock file, creating its folder. Raises Later while another process sends."""
    lock.parent.mkdir(exist_ok=True)
    try:
        held = acquire_lock(lock)
    except LockTaken:
        raise Later("another process is sending the data") from None
    try:
        yield
    finally:
        held.release()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Later) else f"{type(error).__name__}: {error}"
