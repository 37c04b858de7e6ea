"""How much may be traced: a budget of bytes per day that lowers the sampling instead of bursting a plan.

The bytes are those that the trajectories themselves report: all spans of all services, before compression. Every run of
one outputs folder writes into one ledger, so that the budget is the plan's and not a run's.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ValidationError

from trackway.system import atomic_write
from trackway.trainer.metrics.rollout import Metrics

logger = logging.getLogger("trackway.trainer")

STEP_SHARE = 1 / 20
"""Of what is left of the day, that one step may use: sampling sinks as the budget does, and never stops at once."""
LOCK_DEADLINE_S = 1.0
"""Longest wait for another process that writes the ledger; it needs less than a millisecond."""


def affordable(wanted: int, left: int, bytes_each: float) -> int:
    """How many of `wanted` prompts a step may trace with `left` bytes left of the day.

    `bytes_each` is what a prompt costs with all its rollouts; 0, as long as that is not known, allows one.
    """
    if left <= 0:
        return 0
    return min(wanted, int(left * STEP_SHARE / bytes_each) if bytes_each else 1)


class DailyTraceBytes:
    """Bytes traced today, in a file that several processes may share. A file that is lost begins at 0."""

    def __init__(self, path: Path, today: Callable[[], date] = lambda: datetime.now(UTC).date()) -> None:
        self._path = path
        self._today = today

    def add(self, size: int) -> int:
        """Count `size` bytes; the total of this day (UTC). Raises OSError when the file cannot be written."""
        with self._locked():
            today = self._today().isoformat()
            page = self._read()
            page = _Page(day=today, bytes=(page.bytes if page.day == today else 0) + size)
            atomic_write(self._path, page.model_dump_json())
            return page.bytes

    def _read(self) -> "_Page":
        try:
            return _Page.model_validate_json(self._path.read_text())
        except (FileNotFoundError, ValidationError):
            return _Page()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            end = time.monotonic() + LOCK_DEADLINE_S
            while not _got(lock):
                if time.monotonic() > end:
                    raise TimeoutError(f"{self._path} stayed locked for {LOCK_DEADLINE_S:g} s")
                time.sleep(0.01)
            yield


def _got(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Page(BaseModel):
    day: str = ""
    bytes: int = 0


class TraceBudget:
    """Decides before each step how many prompts are traced, and counts what they cost."""

    def __init__(self, ledger: DailyTraceBytes, bytes_per_day: int | None) -> None:
        self._ledger = ledger
        self._bytes_per_day = bytes_per_day
        self._told: int | None = None
        self._traced = 0
        self._traced_bytes = 0
        self._step: Metrics = {}
        self.trajectories = 0
        """Traced by this process."""
        self.bytes = 0
        """Of all their spans, and of the trainer's own."""

    def prompts(self, wanted: int, rollouts: int) -> int:
        """How many of `wanted` prompts, each with so many rollouts, are traced now."""
        count = wanted
        if self._bytes_per_day is not None and wanted:
            each = self._traced_bytes / self._traced * rollouts if self._traced else 0.0
            count = affordable(wanted, self._bytes_per_day - self._today(0), each)
            self._tell(wanted, count)
        self._step["trace/prompts_traced"] = self._step.get("trace/prompts_traced", 0.0) + count
        return count

    def spend(self, size: int, trajectories: int = 0) -> None:
        """Count the bytes of so many traced trajectories, or of spans that belong to none."""
        if not size and not trajectories:
            return
        if trajectories:
            self._traced += trajectories
            self._traced_bytes += size
        self.trajectories += trajectories
        self.bytes += size
        self._step["trace/bytes"] = self._step.get("trace/bytes", 0.0) + size
        self._step["trace/bytes_today"] = float(self._today(size))

    def take(self) -> Metrics:
        """What was traced since the last `take`."""
        taken, self._step = self._step, {}
        return taken

    def _today(self, size: int) -> int:
        try:
            return self._ledger.add(size)
        except OSError as error:
            logger.warning("trace bytes are not counted beyond this run: %s", error)
            return self.bytes

    def _tell(self, wanted: int, count: int) -> None:
        if count < wanted and count != self._told:
            message = "trackway.trace_bytes_per_day=%d: %d of %d prompts are traced, with %d bytes used today"
            logger.info(message, self._bytes_per_day, count, wanted, self._today(0))
        self._told = count
