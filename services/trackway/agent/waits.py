"""Waits of each rollout. Its own are in the context of the task that runs it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

from trackway.clients import Deadline
from trackway.system.waits import BegunWait, Waits, noted_in
from trackway.wire.health import Wait
from trackway.wire.trajectory import Tags


class RolloutWaits:
    """The waits of one rollout."""

    def __init__(self, tags: Tags) -> None:
        self._name = f"rollout {tags.step}/{tags.sample_index}/{tags.rollout_n}"
        self._waits = Waits()

    def __call__(
        self, waits_for: str, deadline: Deadline | None = None, progress: Callable[[], str] = lambda: ""
    ) -> AbstractContextManager[object]:
        """A wait of the rollout, for the duration of the block."""
        timeout_s = None if deadline is None else deadline.remaining
        return _NotedWait(self._waits(self._name, waits_for, timeout_s, progress))

    def current(self) -> list[Wait]:
        """Its present wait. Its agent loop, if that waits for no service."""
        outer, *inner = self._waits.current() or [None]
        return [wait for wait in inner or [outer] if wait is not None]


class _NotedWait(AbstractContextManager[None]):
    """A wait in which service calls note how they fare."""

    def __init__(self, wait: BegunWait) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        self._noted = noted_in([self._wait.__enter__()])
        self._noted.__enter__()

    def __exit__(self, *_: object) -> None:
        self._noted.__exit__(None, None, None)
        self._wait.__exit__(None, None, None)


current_rollout: ContextVar[RolloutWaits | None] = ContextVar("current_rollout", default=None)


def waits_for(what: str, deadline: Deadline | None = None) -> AbstractContextManager[object]:
    """A wait of the rollout that the current task belongs to, if there is one, for the duration of the block."""
    rollout = current_rollout.get()
    return nullcontext() if rollout is None else rollout(what, deadline)
