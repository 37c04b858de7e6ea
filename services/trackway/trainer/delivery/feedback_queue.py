"""Feedback queued for a backend: one file per step in the run's folder, bounded in bytes, sent oldest first.

    <folder>/<ns since 1970>-<values>.jsonl     one Assessment per line. <values> is the number of values and links

The run's process adds files. The sender, which holds the delivery's lock, replaces and removes them. Each process lists
the folder once and then keeps the files in memory, so that neither a push nor a send depends on the number of files.
"""

import contextlib
import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pydantic.dataclasses
from pydantic import ConfigDict, TypeAdapter

from trackway.system import atomic_write
from trackway.trainer.delivery.jobs import BACKOFF, Later

Value = float | str
GROUND_TRUTH = "ground_truth"
"""Name of the value that MLflow keeps as an expectation."""


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(ser_json_inf_nan="strings"))
class Assessment:
    """Values by name for the trace of a trajectory or a step."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits, of the trace's root span."""
    values: Mapping[str, Value]
    link: bool = False
    """True if the trace is to be linked to the run."""

    @property
    def size(self) -> int:
        """The number of values. A link counts as one."""
        return len(self.values) + self.link


logger = logging.getLogger("trackway.trainer")

MAX_BYTES = 64 * 1024 * 1024
"""Largest queue on disk, per run and backend: feedback on about 300,000 trajectories."""

MISSES = 3
"""Files in a row without an arrived trace before the queue pauses."""

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
    """True if the backend currently accepts nothing at all."""


Send = Callable[[list[Assessment]], Sent]


class _File(NamedTuple):
    """A file of the queue. They sort in the order in which they are sent."""

    due: float
    """Earliest time of the next attempt, on time.monotonic."""
    name: str
    size: int
    """In bytes."""
    failures: int = 0


class FeedbackQueue:
    """A queue of assessments in its own folder."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._guard = threading.Lock()
        self._files: list[_File] | None = None
        """A heap, or None until the folder has been listed."""
        self._bytes = 0
        """The size of these files, and of the one that is being sent."""
        self._misses = 0
        """Files in a row none of whose traces had arrived."""
        self._resume_at = 0.0
        """No file is sent before this time, on time.monotonic."""
        self._dropped = 0

    def push(self, assessments: Sequence[Assessment]) -> None:
        """Queue the assessments. Those that do not fit are counted as dropped. Never raises."""
        if not assessments:
            return
        data = _encoded(assessments)
        try:
            with self._guard:
                files = self._listed()
                if self._bytes + len(data) > self._max_bytes:
                    raise OSError(f"the queue is full, at {self._max_bytes} bytes")
                self._folder.mkdir(parents=True, exist_ok=True)
                name = f"{time.time_ns():020d}-{_values(assessments)}.jsonl"
                atomic_write(self._folder / name, data)
                self._add(files, _File(time.monotonic(), name, len(data)))
        except OSError as error:
            if not self._dropped:
                logger.warning("feedback is lost because it cannot be written to %s: %s", self._folder, error)
            self._dropped += _values(assessments)

    @property
    def waiting(self) -> int:
        """The number of queued values and links, which another process may be sending."""
        return sum(_values_in(name) for name in self._names())

    def take_dropped(self) -> int:
        """The number of values dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def send(self, send: Send) -> Sent | None:
        """Send the file that is due first. None when the queue is empty. Raises Later when no file is due yet."""
        with self._guard:
            file = self._take()
        if file is None:
            return None
        try:
            path = self._folder / file.name
            assessments, unreadable = _read(path)
            sent = send(assessments) if assessments else Sent()
            if unreadable:
                sent.lost, sent.reason = sent.lost + unreadable, sent.reason or f"{path} is damaged"
            self._settle(file, assessments, sent)
        except BaseException:
            with self._guard:
                self._files = None  # list again what is in the folder now
            raise
        return sent

    def _take(self) -> _File | None:
        """Take the next file out of the list. It remains in the folder."""
        files = self._listed()
        if files and not (self._folder / files[0].name).exists():  # another process has sent it, or a part of it
            self._files = None
            files = self._listed()
        if not files:
            return None
        if max(files[0].due, self._resume_at) > time.monotonic():
            raise Later("the traces of some feedback have not arrived")
        return heapq.heappop(files)

    def _settle(self, file: _File, before: list[Assessment], sent: Sent) -> None:
        name, size = file.name, file.size
        if sent.left and sent.left != before:
            name = f"{file.name.partition('-')[0]}-{_values(sent.left)}.jsonl"
            data = _encoded(sent.left)
            size = len(data)
            atomic_write(self._folder / name, data)
        if name != file.name or not sent.left:
            (self._folder / file.name).unlink(missing_ok=True)
        with self._guard:
            self._bytes -= file.size
            if not sent.left:
                self._note(False)
            else:
                is_missing = bool(sent.reason) and not sent.is_away
                self._note(is_missing and sent.left == before)
                failures = file.failures + 1 if is_missing else 0
                due = time.monotonic() + BACKOFF.pause_s(failures) if is_missing else file.due
                self._add(self._listed(), _File(due, name, size, failures))

    def _note(self, is_miss: bool) -> None:
        """Pause after some misses in a row: the traces of later files have probably not arrived either."""
        self._misses = self._misses + 1 if is_miss else 0
        if self._misses >= MISSES:
            self._resume_at = time.monotonic() + BACKOFF.pause_s(self._misses - MISSES + 1)

    def _listed(self) -> list[_File]:
        if self._files is None:
            self._files, self._bytes = [], 0
            for name in self._names():
                with contextlib.suppress(FileNotFoundError):  # sent in the meantime
                    self._add(self._files, _File(0.0, name, (self._folder / name).stat().st_size))
        return self._files

    def _add(self, files: list[_File], file: _File) -> None:
        heapq.heappush(files, file)
        self._bytes += file.size

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name.endswith(".jsonl")]
        except FileNotFoundError:
            return []


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
    lines = path.read_bytes().splitlines()
    assessments: list[Assessment] = []
    for line in lines:
        try:
            assessments.append(_LINE.validate_json(line))
        except ValueError:
            logger.warning("a line of %s cannot be read", path)
    return assessments, max(0, _values_in(path.name) - _values(assessments))


def _encoded(assessments: Sequence[Assessment]) -> bytes:
    return b"".join(_LINE.dump_json(assessment) + b"\n" for assessment in assessments)


def _values(assessments: Sequence[Assessment]) -> int:
    return sum(assessment.size for assessment in assessments)


def _values_in(name: str) -> int:
    count = name.removesuffix(".jsonl").rpartition("-")[2]
    return int(count) if count.isdecimal() else 0
