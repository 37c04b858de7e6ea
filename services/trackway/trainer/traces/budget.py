"""The trace budget: a daily limit in bytes that lowers the sampling rate before a backend's quota is exceeded.

The sizes are those reported by the trajectories: all spans of all services, before compression. All runs of an outputs
folder share one count, so the budget applies to the backend's plan rather than to each run.
"""

import logging
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError

from trackway.system import atomic_write, locked
from trackway.trainer.metrics.rollout import Metrics

logger = logging.getLogger("trackway.trainer")

STEP_SHARE = 1 / 20
"""Share of the remaining daily budget that one step may use, so that sampling decreases gradually."""
LOCK_DEADLINE_S = 1.0
"""Longest wait for another process that updates the count, which takes less than a millisecond."""


def affordable(wanted: int, left: int, bytes_each: float) -> int:
    """The number of `wanted` prompts that a step may trace with `left` bytes remaining today.

    `bytes_each` is the size of a prompt's traces with all its rollouts. While it is unknown (0), one prompt is allowed.
    """
    if left <= 0:
        return 0
    return min(wanted, int(left * STEP_SHARE / bytes_each) if bytes_each else 1)


class DailyTraceBytes:
    """Bytes traced today, counted in a file that processes share. A missing or damaged file counts as 0."""

    def __init__(self, path: Path, today: Callable[[], date] = lambda: datetime.now(UTC).date()) -> None:
        self._path = path
        self._today = today

    def add(self, size: int) -> int:
        """Add `size` bytes and return today's total (UTC). Raises OSError when the file cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path.with_suffix(".lock"), wait_s=LOCK_DEADLINE_S, mode=None):
            today = self._today().isoformat()
            count = self._read()
            count = _DayCount(day=today, bytes=(count.bytes if count.day == today else 0) + size)
            atomic_write(self._path, count.model_dump_json())
            return count.bytes

    def _read(self) -> "_DayCount":
        try:
            return _DayCount.model_validate_json(self._path.read_text())
        except (FileNotFoundError, ValidationError):
            return _DayCount()


class _DayCount(BaseModel):
    day: str = ""
    bytes: int = 0


class TraceBudget:
    """Decides before each step how many prompts are traced, and counts the bytes of their traces."""

    def __init__(self, daily_bytes: DailyTraceBytes, bytes_per_day: int | None) -> None:
        self._daily_bytes = daily_bytes
        self._bytes_per_day = bytes_per_day
        self._last_logged: int | None = None
        self._traced = 0
        self._traced_bytes = 0
        self._step: Metrics = {}
        self.trajectories = 0
        """Trajectories traced by this process."""
        self.bytes = 0
        """Size of their spans and of the trainer's own."""

    def prompts(self, wanted: int, rollouts: int) -> int:
        """The number of `wanted` prompts, with `rollouts` trajectories each, to trace in this step."""
        count = wanted
        if self._bytes_per_day is not None and wanted:
            bytes_each = self._traced_bytes / self._traced * rollouts if self._traced else 0.0
            count = affordable(wanted, self._bytes_per_day - self._today(0), bytes_each)
            self._log_reduction(wanted, count)
        self._step["trace/prompts_traced"] = self._step.get("trace/prompts_traced", 0.0) + count
        return count

    def spend(self, size: int, trajectories: int = 0) -> None:
        """Count `size` bytes, of `trajectories` traced trajectories or of spans that belong to none."""
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
        """The trace metrics since the last `take`."""
        metrics, self._step = self._step, {}
        return metrics

    def _today(self, size: int) -> int:
        try:
            return self._daily_bytes.add(size)
        except OSError as error:
            logger.warning("trace bytes are counted for this run only: %s", error)
            return self.bytes

    def _log_reduction(self, wanted: int, count: int) -> None:
        if count < wanted and count != self._last_logged:
            message = "trackway.trace_bytes_per_day=%d: %d of %d prompts are traced, with %d bytes used today"
            logger.info(message, self._bytes_per_day, count, wanted, self._today(0))
        self._last_logged = count
