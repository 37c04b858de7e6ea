"""The waits of a process that are in progress, by name."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

from trackway.system.context_value import ContextValue
from trackway.wire.health import Wait

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
