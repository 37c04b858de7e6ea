"""Feedback that waits for a backend: one file per step in the run's folder, bounded in bytes, oldest first.

    <folder>/<ns since 1970>-<values>.jsonl     one Assessment per line; the number of values stands in the name

The run's process adds files, the sender (under the delivery's lock) replaces and removes them.
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
from trackway.trainer.delivery.jobs import FIRST_PAUSE_S, LONGEST_PAUSE_S, Later

logger = logging.getLogger("trackway.trainer")

MAX_BYTES = 64 * 1024 * 1024
"""On disk, per run and backend: feedback of about 300,000 trajectories."""

_LINE = TypeAdapter(Assessment)


@dataclass
class Sent:
    """What became of some assessments."""

    left: list[Assessment] = field(default_factory=list)
    """To be sent again; without the values that were taken or lost."""
    lost: int = 0
    """Values that the backend will never take."""
    reason: str = ""
    """Why something is left or lost."""
    is_away: bool = False
    """The backend takes nothing now, whatever it is."""


Send = Callable[[list[Assessment]], Sent]


class FeedbackQueue:
    """A queue of assessments in a folder of its own."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._due: dict[Path, tuple[float, float]] = {}
        """Of files that could not be sent whole: when they are tried again (time.monotonic), and the last pause."""
        self._dropped = 0

    def push(self, assessments: Sequence[Assessment]) -> None:
        """Keep them; what finds no room is counted. Never raises."""
        if not assessments:
            return
        text = "".join(_LINE.dump_json(one).decode() + "\n" for one in assessments)
        try:
            if sum(size for _, size in self._files()) + len(text) > self._max_bytes:
                raise OSError(f"more than {self._max_bytes} bytes wait there")
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._folder / f"{time.time_ns():020d}-{_values(assessments)}.jsonl", text)
        except OSError as error:
            if not self._dropped:
                logger.warning("feedback is lost, as it cannot be kept in %s: %s", self._folder, error)
            self._dropped += _values(assessments)

    @property
    def waiting(self) -> int:
        """Values that wait."""
        return sum(_values_in(path) for path, _ in self._files())

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, not even a link without values."""
        return next(self._files(), None) is None

    def take_dropped(self) -> int:
        """Values that found no room since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def send(self, send: Send) -> Sent | None:
        """Send the oldest file that is due; None when there is none at all. Raises Later when none is due yet."""
        paths = sorted(path for path, _ in self._files())
        self._due = {path: due for path, due in self._due.items() if path in paths}
        now = time.monotonic()
        path = next((path for path in paths if self._due.get(path, (0.0, 0.0))[0] <= now), None)
        if path is None:
            if paths:
                raise Later("traces have not arrived that feedback belongs to")
            return None
        assessments, unreadable = _read(path)
        sent = send(assessments) if assessments else Sent()
        if unreadable:
            sent.lost, sent.reason = sent.lost + unreadable, sent.reason or f"{path} was damaged"
        self._settle(path, assessments, sent)
        return sent

    def _settle(self, path: Path, before: list[Assessment], sent: Sent) -> None:
        _, pause = self._due.pop(path, (0.0, 0.0))
        rest = path
        if sent.left and sent.left != before:
            rest = path.with_name(f"{path.name.partition('-')[0]}-{_values(sent.left)}.jsonl")
            atomic_write(rest, "".join(_LINE.dump_json(one).decode() + "\n" for one in sent.left))
        if rest != path or not sent.left:
            path.unlink(missing_ok=True)
        if sent.left and sent.reason and not sent.is_away:
            pause = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, pause * 2))
            self._due[rest] = (time.monotonic() + pause, pause)

    def _files(self) -> Iterator[tuple[Path, int]]:
        try:
            entries = list(os.scandir(self._folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name.endswith(".jsonl"):
                try:
                    yield Path(entry.path), entry.stat().st_size
                except FileNotFoundError:  # sent meanwhile
                    continue


@dataclass(frozen=True)
class QueuedFeedback:
    """Feedback that is put on disk, for a thread that sends it."""

    backend: str
    queue: FeedbackQueue
    wake: Callable[[], None]
    """Says that something new waits."""

    def submit(self, assessments: Sequence[Assessment]) -> None:
        """Keep the values."""
        self.queue.push(assessments)
        self.wake()


def _read(path: Path) -> tuple[list[Assessment], int]:
    """The file's assessments, and how many values stood in lines that cannot be read."""
    lines = path.read_text(errors="replace").splitlines()
    found: list[Assessment] = []
    for line in lines:
        try:
            found.append(_LINE.validate_json(line))
        except ValueError:
            logger.warning("a line of %s cannot be read", path)
    return found, max(0, _values_in(path) - _values(found))


def _values(assessments: Sequence[Assessment]) -> int:
    return sum(len(one.values) for one in assessments)


def _values_in(path: Path) -> int:
    count = path.stem.rpartition("-")[2]
    return int(count) if count.isdecimal() else 0
