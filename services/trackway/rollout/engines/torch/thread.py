"""The engine's thread: it steps the core while there is work, and obeys closures between two steps.

Everything that touches the core runs here. Calls arrive as closures in one inbox; results go back to the event loop
once per step. A thread that dies says so on the event loop, where every call is made: so a call is either failed by
that notice or refused after it, and none waits for ever.
"""

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from trackway.rollout.engines.torch.core import Ended, EngineCore
from trackway.wire.errors import ErrorCode, TrackwayError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class EngineThread:
    """Runs one core; all methods are called on one event loop."""

    def __init__(
        self, core: EngineCore, ended: Callable[[list[Ended]], None], died: Callable[[TrackwayError], None]
    ) -> None:
        self._core, self._ended, self._died = core, ended, died
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._calls: set[Future] = set()
        self._frozen = self._stopping = self._idle = False
        self._progress = time.monotonic()
        self._cause: Exception | None = None
        self._thread = threading.Thread(target=self._live, name="torch-engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises UNAVAILABLE when the thread has died."""
        if self._cause is not None:
            raise _death(self._cause)

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` between two steps."""
        if self._idle:
            self._progress = time.monotonic()
        self._inbox.put(work)

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` between two steps and wait for its value."""
        self.check()
        future: Future[T] = Future()

        def obey() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._calls.add(future)
        self.post(obey)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    async def freeze(self, frozen: bool) -> None:
        """Make no step, or go on; returns when it is so."""

        def freeze() -> None:
            self._frozen = frozen

        await self.call(freeze)

    async def stop(self) -> None:
        """End the thread after the step it makes."""

        def stop() -> None:
            self._stopping = True

        self.post(stop)
        await asyncio.to_thread(self._thread.join)

    def stuck_for(self) -> float:
        """Seconds since the last step or closure while there is work; infinite when the thread has died."""
        if self._cause is not None or not self._thread.is_alive():
            return math.inf
        return 0.0 if self._idle and self._inbox.empty() else time.monotonic() - self._progress

    # On the thread

    def _live(self) -> None:
        try:
            with torch.inference_mode():
                self._run(self._core)
        except Exception as error:
            _log.exception("the engine's thread died; this replica cannot generate any more")
            self._loop.call_soon_threadsafe(self._die, error)

    def _run(self, core: EngineCore) -> None:
        while not self._stopping:
            self._obey(wait=self._frozen or not core.scheduler.busy)
            if core.scheduler.busy and not self._frozen:
                ended = self._step(core)
                self._progress = time.monotonic()
                if ended:
                    self._loop.call_soon_threadsafe(self._ended, ended)

    def _obey(self, wait: bool) -> None:
        self._idle = wait
        try:
            work = self._inbox.get(block=wait)
            self._idle = False
            while True:
                work()
                self._progress = time.monotonic()
                work = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _step(self, core: EngineCore) -> list[Ended]:
        try:
            return core.step()
        except Exception as error:
            _log.exception("the engine's step failed; its requests are answered with engine_failed")
            return core.fail(error)

    # On the event loop

    def _die(self, cause: Exception) -> None:
        self._cause = cause
        self._died(_death(cause))
        for future in self._calls:
            if not future.done():
                future.set_exception(_death(cause))


def _death(cause: Exception) -> TrackwayError:
    return TrackwayError(
        ErrorCode.UNAVAILABLE,
        f"expected a living engine, got {type(cause).__name__} on its thread: {cause}; restart this replica",
    )
