"""What each rollout waits for: its own waits are in the context of the task that runs it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from trackway.clients import Deadline
from trackway.system.waits import Waits, noted_in
from trackway.wire.health import Wait
from trackway.wire.trajectory import Tags


class RolloutWaits:
    """The waits of one rollout."""

    def __init__(self, tags: Tags) -> None:
        self._name = f"rollout {tags.step}/{tags.sample_index}/{tags.rollout_n}"
        self._waits = Waits()

    @contextmanager
    def __call__(self, waits_for: str, deadline: Deadline | None = None) -> Iterator[None]:
        """A wait of the rollout, for the duration of the block."""
        timeout_s = None if deadline is None else deadline.remaining
        with self._waits(self._name, waits_for, timeout_s) as waiting, noted_in([waiting]):
            yield

    def current(self) -> list[Wait]:
        """What it waits for at present; its agent loop, if that waits for no service."""
        outer, *inner = self._waits.current() or [None]
        return [wait for wait in inner or [outer] if wait is not None]


current_rollout: ContextVar[RolloutWaits | None] = ContextVar("current_rollout", default=None)


def waits_for(what: str, deadline: Deadline | None = None) -> AbstractContextManager[None]:
    """A wait of the rollout that the current task belongs to, if there is one, for the duration of the block."""
    rollout = current_rollout.get()
    return nullcontext() if rollout is None else rollout(what, deadline)
