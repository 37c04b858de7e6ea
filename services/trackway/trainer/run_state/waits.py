"""The waits of a run's process, which it writes to `waits.json` once they last."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from trackway.system import StorageError
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.waits import Wait

REPORT_EVERY_S = 1.0
PATIENCE_S = 2.0
"""Shorter waits are not written."""
MOST = 8
"""Most waits below another one."""

Now = Callable[[], float]
"""Seconds since 1970."""

logger = logging.getLogger("trackway.trainer")


@dataclass(eq=False)
class Waiting:
    """A wait in progress; its fields may change meanwhile."""

    who: str
    waits_for: str
    since_s: float
    timeout_s: float | None = None
    progress: Callable[[], str] = lambda: ""
    because: Callable[[], Sequence[Wait]] = lambda: ()

    def wait(self) -> Wait:
        """The wait as it is now."""
        until = None if self.timeout_s is None else _ms(self.since_s + self.timeout_s)
        because = sorted(self.because(), key=lambda wait: wait.since)[:MOST]
        return Wait(
            who=self.who,
            waits_for=self.waits_for,
            since=_ms(self.since_s),
            until=until,
            progress=self.progress(),
            because=because,
        )


@dataclass
class Waits:
    """The waits in progress, in the order in which they began."""

    now: Now = time.time
    _waiting: list[Waiting] = field(default_factory=list)

    @contextmanager
    def __call__(self, who: str, waits_for: str, timeout_s: float | None = None) -> Iterator[Waiting]:
        """A wait, for the duration of the block."""
        waiting = Waiting(who, waits_for, self.now(), timeout_s)
        self._waiting.append(waiting)
        try:
            yield waiting
        finally:
            self._waiting.remove(waiting)

    def current(self, patience_s: float = 0.0) -> list[Wait]:
        """Those that have lasted so long."""
        before = self.now() - patience_s
        return [waiting.wait() for waiting in self._waiting if waiting.since_s <= before]


@asynccontextmanager
async def reported(folder: RunFolder, waits: Waits) -> AsyncIterator[None]:
    """Keeps the file of the run's waits up to date for the duration of the block; it has none afterwards."""
    reporting = asyncio.create_task(_report(folder, waits))
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        with suppress(StorageError):
            await asyncio.to_thread(folder.write_waits, [])


async def _report(folder: RunFolder, waits: Waits) -> None:
    written: list[Wait] | None = None
    while True:
        current = waits.current(PATIENCE_S)
        if current != written:
            try:
                await asyncio.to_thread(folder.write_waits, current)
                written = current
            except StorageError as error:
                logger.debug("the waits of the run cannot be written: %s", error)
        await asyncio.sleep(REPORT_EVERY_S)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
