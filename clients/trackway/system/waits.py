"""Waits of a process: those in progress by name, pauses between attempts, and slots that several runs share."""

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

from trackway.system.process import ContextValue
from trackway.wire.service import Wait

MOST = 8
"""Most waits below another one."""

Now = Callable[[], float]
"""Seconds since 1970."""


@dataclass(eq=False)
class Waiting:
    """A wait in progress. Its fields may change meanwhile."""

    who: str
    waits_for: str
    since_s: float
    timeout_s: float | None = None
    progress: Callable[[], str] = lambda: ""
    because: Callable[[], Sequence[Wait]] = lambda: ()
    replica: str = ""
    """The replica that was asked last. Empty when it is not known."""
    problem: str = ""
    """Why it was asked again."""

    def wait(self) -> Wait:
        """The wait as it is now."""
        until = None if self.timeout_s is None else _ms(self.since_s + self.timeout_s)
        because = sorted(self.because(), key=lambda wait: wait.since)[:MOST]
        return Wait(
            who=self.who,
            waits_for=self.waits_for,
            since=_ms(self.since_s),
            until=until,
            progress="; ".join(filter(None, self._progress())),
            because=because,
        )

    def _progress(self) -> Iterator[str]:
        yield self.progress()
        yield f"replica {self.replica}" if self.replica else ""
        yield f"asked again after: {self.problem}" if self.problem else ""


class BegunWait(AbstractContextManager[Waiting]):
    """A wait, for the duration of the block. Takes less time than a generator."""

    def __init__(self, in_progress: list[Waiting], waiting: Waiting) -> None:
        self._in_progress, self._waiting = in_progress, waiting

    def __enter__(self) -> Waiting:
        self._in_progress.append(self._waiting)
        return self._waiting

    def __exit__(self, *_: object) -> None:
        self._in_progress.remove(self._waiting)


@dataclass
class Waits:
    """The waits in progress, in the order in which they began."""

    now: Now = time.time
    _waiting: list[Waiting] = field(default_factory=list)

    def __call__(
        self, who: str, waits_for: str, timeout_s: float | None = None, progress: Callable[[], str] = lambda: ""
    ) -> BegunWait:
        """A wait, for the duration of the block. `progress` says how far it is whenever it is asked for."""
        return BegunWait(self._waiting, Waiting(who, waits_for, self.now(), timeout_s, progress))

    def current(self, patience_s: float = 0.0) -> list[Wait]:
        """Waits that have lasted so long."""
        before = self.now() - patience_s
        return [waiting.wait() for waiting in self._waiting if waiting.since_s <= before]


def described(wait: Wait, now_s: float) -> str:
    """The wait in a line, with its seconds at `now_s` (since 1970) and those that it may take."""
    limit = "" if wait.until is None else f" of {(wait.until - wait.since) / 1000:.0f} s"
    progress = f": {wait.progress}" if wait.progress else ""
    return f"{wait.who} waits for {wait.waits_for}, {now_s - wait.since / 1000:.0f} s{limit}{progress}"


def longest_chain(waits: Sequence[Wait], now_s: float) -> str:
    """The longest of the waits and, behind it, what it waits for itself. Empty without waits."""
    lines: list[str] = []
    while waits:
        longest = min(waits, key=lambda wait: wait.since)
        lines.append(described(longest, now_s))
        waits = longest.because
    return "; ".join(lines)


_current: ContextVar[tuple[Waiting, ...]] = ContextVar("current_waits", default=())


def noted_in(waits: Sequence[Waiting]) -> AbstractContextManager[object]:
    """Service calls within the block note in these waits which replica they ask, and why they ask again."""
    return ContextValue(_current, tuple(waits))


def waits_of_call() -> tuple[Waiting, ...]:
    """The waits in which a service call notes how it fares."""
    return _current.get()


def note_replica(name: str) -> None:
    """A service call goes to this replica."""
    for waiting in _current.get():
        waiting.replica = name


def note_problem(reason: str) -> None:
    """A service call is repeated for this reason."""
    for waiting in _current.get():
        waiting.problem = reason


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


@dataclass(frozen=True)
class Backoff:
    """The pause doubles with each failure in a row, from `first_s` up to `longest_s` seconds."""

    first_s: float
    longest_s: float
    spread: tuple[float, float] = (0.75, 1.25)
    """Each pause is multiplied by a random number in this range, so that clients do not retry together."""

    def pause_s(self, failures: int) -> float:
        """Seconds to pause after this number of failures in a row; none after no failure."""
        if failures <= 0:
            return 0.0
        doublings = min(failures - 1, 60)  # more would not fit a float in the end
        return min(self.longest_s, self.first_s * 2.0**doublings) * random.uniform(*self.spread)


class FairSlots:
    """A bounded number of slots. A free one goes to the waiting run that holds the fewest, in turn."""

    def __init__(self, number: int) -> None:
        self._number = self._free = number
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, run: str) -> None:
        """Take a slot for the run, once there is one."""
        if self._free > 0:
            self._free -= 1
            self._held[run] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(run, deque())
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(run)
            else:
                self._leave(run, turn)
            raise

    def release(self, run: str) -> None:
        """Give a slot of the run back."""
        self._held[run] -= 1
        if not self._held[run]:
            del self._held[run]
        self._free += 1
        self._give()

    @property
    def held(self) -> int:
        """Slots that are taken."""
        return self._number - self._free

    def resize(self, number: int) -> None:
        """Set the number of slots. Where more are taken, no further one is free until enough are given back."""
        self._free += number - self._number
        self._number = number
        while self._free > 0 and self._waiting:
            self._give()

    def _give(self) -> None:
        """Give a free slot to the run that waits and holds the fewest."""
        if self._free <= 0 or not self._waiting:
            return
        self._free -= 1
        first = min(self._waiting, key=lambda name: self._held[name])
        turn = self._waiting[first][0]
        self._leave(first, turn)
        if first in self._waiting:  # last among runs that hold as many
            self._waiting[first] = self._waiting.pop(first)
        self._held[first] += 1
        turn.set_result(None)

    def _leave(self, run: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting[run]
        waiting.remove(turn)
        if not waiting:
            del self._waiting[run]
