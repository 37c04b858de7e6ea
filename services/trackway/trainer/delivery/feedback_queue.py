"""Feedback queued for a backend: one file per step in the run's folder, bounded in bytes, sent oldest first.

    <folder>/<ns since 1970>-<values>.jsonl     one Assessment per line; <values> is the number of values and links

The run's process adds files. The sender, which holds the delivery's lock, replaces and removes them.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from trackway.system import atomic_write
from trackway.trainer.delivery.assessment import Assessment
from trackway.trainer.delivery.jobs import BACKOFF, Later

logger = logging.getLogger("trackway.trainer")

MAX_BYTES = 64 * 1024 * 1024
"""Largest queue on disk, per run and backend: feedback on about 300,000 trajectories."""

_LINE = TypeAdapter(Assessment)


@dataclass
class Sent:
    """The result of an attempt to send assessments."""

    left: list[Assessment] = field(default_factory=list)
    """Assessments to send again, without the values that were accepted or lost."""
    lost: int = 0
    """The number of values that the backend will never accept."""
    reason: str = ""
    """Why values are left or lost."""
    is_away: bool = False
    """Whether the backend currently accepts nothing at all."""


Send = Callable[[list[Assessment]], Sent]


class FeedbackQueue:
    """A queue of assessments in its own folder."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._due: dict[Path, tuple[float, int]] = {}
        """For each file that was not sent completely: the time of the next attempt (time.monotonic), its failures."""
        self._dropped = 0

    def push(self, assessments: Sequence[Assessment]) -> None:
        """Queue the assessments; those that do not fit are counted as dropped. Never raises."""
        if not assessments:
            return
        text = "".join(_LINE.dump_json(assessment).decode() + "\n" for assessment in assessments)
        try:
            if sum(size for _, size in self._files()) + len(text) > self._max_bytes:
                raise OSError(f"the queue is full, at {self._max_bytes} bytes")
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._folder / f"{time.time_ns():020d}-{_values(assessments)}.jsonl", text)
        except OSError as error:
            if not self._dropped:
                logger.warning("feedback is lost because it cannot be written to %s: %s", self._folder, error)
            self._dropped += _values(assessments)

    @property
    def waiting(self) -> int:
        """The number of queued values and links."""
        return sum(_values_in(path) for path, _ in self._files())

    def take_dropped(self) -> int:
        """The number of values dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def send(self, send: Send) -> Sent | None:
        """Send the oldest file that is due; None when the queue is empty. Raises Later when no file is due yet."""
        paths = sorted(path for path, _ in self._files())
        self._due = {path: due for path, due in self._due.items() if path in paths}
        now = time.monotonic()
        path = next((path for path in paths if self._due.get(path, (0.0, 0))[0] <= now), None)
        if path is None:
            if paths:
                raise Later("the traces of some feedback have not arrived")
            return None
        assessments, unreadable = _read(path)
        sent = send(assessments) if assessments else Sent()
        if unreadable:
            sent.lost, sent.reason = sent.lost + unreadable, sent.reason or f"{path} is damaged"
        self._settle(path, assessments, sent)
        return sent

    def _settle(self, path: Path, before: list[Assessment], sent: Sent) -> None:
        _, failures = self._due.pop(path, (0.0, 0))
        rest = path
        if sent.left and sent.left != before:
            rest = path.with_name(f"{path.name.partition('-')[0]}-{_values(sent.left)}.jsonl")
            atomic_write(rest, "".join(_LINE.dump_json(assessment).decode() + "\n" for assessment in sent.left))
        if rest != path or not sent.left:
            path.unlink(missing_ok=True)
        if sent.left and sent.reason and not sent.is_away:
            self._due[rest] = (time.monotonic() + BACKOFF.pause_s(failures + 1), failures + 1)

    def _files(self) -> Iterator[tuple[Path, int]]:
        try:
            entries = list(os.scandir(self._folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name.endswith(".jsonl"):
                try:
                    yield Path(entry.path), entry.stat().st_size
                except FileNotFoundError:  # sent in the meantime
                    continue


@dataclass(frozen=True)
class QueuedFeedback:
    """Queues feedback on disk and wakes the thread that sends it."""

    backend: str
    queue: FeedbackQueue
    wake: Callable[[], None]
    """Wakes the sending thread."""

    def submit(self, assessments: Sequence[Assessment]) -> None:
        """Queue the values."""
        self.queue.push(assessments)
        self.wake()


def _read(path: Path) -> tuple[list[Assessment], int]:
    """The file's assessments, and the number of values in unreadable lines."""
    lines = path.read_text(errors="replace").splitlines()
    assessments: list[Assessment] = []
    for line in lines:
        try:
            assessments.append(_LINE.validate_json(line))
        except ValueError:
            logger.warning("a line of %s cannot be read", path)
    return assessments, max(0, _values_in(path) - _values(assessments))


def _values(assessments: Sequence[Assessment]) -> int:
    return sum(assessment.size for assessment in assessments)


def _values_in(path: Path) -> int:
    count = path.stem.rpartition("-")[2]
    return int(count) if count.isdecimal() else 0
