"""The engine's thread: steps the core while there is work, and runs calls between two steps.

Only this thread touches the core. Calls arrive as closures in the input queue. Results return to the event loop once
per step. If the thread dies, a callback on the event loop fails the pending calls, and later calls are rejected, so no
call waits forever.
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

from trackway.rollout.engines.torch.core import EngineCore, FinishedSequence
from trackway.wire.errors import ErrorCode, TrackwayError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class EngineThread:
    """Runs one core. All methods are called on the same event loop."""

    def __init__(
        self,
        core: EngineCore,
        on_finished: Callable[[list[FinishedSequence]], None],
        on_death: Callable[[TrackwayError], None],
    ) -> None:
        self._core, self._on_finished, self._on_death = core, on_finished, on_death
        self._loop = asyncio.get_running_loop()
        self._input_queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._calls: set[Future] = set()
        self._frozen = self._stopping = self._idle = False
        self._progress = time.monotonic()
        self._cause: Exception | None = None
        self._thread = threading.Thread(target=self._main, name="torch-engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises UNAVAILABLE when the thread is dead."""
        if self._cause is not None:
            raise _death(self._cause)

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` between two steps."""
        if self._idle:
            self._progress = time.monotonic()
        self._input_queue.put(work)

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` between two steps and return its result."""
        self.check()
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._calls.add(future)
        self.post(run)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    async def freeze(self, frozen: bool) -> None:
        """Stop or resume stepping. Returns when done."""

        def freeze() -> None:
            self._frozen = frozen

        await self.call(freeze)

    async def stop(self) -> None:
        """Stop the thread after the current step."""

        def stop() -> None:
            self._stopping = True

        self.post(stop)
        await asyncio.to_thread(self._thread.join)

    def stuck_for(self) -> float:
        """Seconds since the last step or call while there is work. Infinite when the thread is dead."""
        if self._cause is not None or not self._thread.is_alive():
            return math.inf
        return 0.0 if self._idle and self._input_queue.empty() else time.monotonic() - self._progress

    # On the thread

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                self._run_busy_loop(self._core)
        except Exception as error:
            _log.exception("the engine's thread died; restart this replica")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _run_busy_loop(self, core: EngineCore) -> None:
        while not self._stopping:
            self._process_input_queue(wait=self._frozen or not core.scheduler.busy)
            if core.scheduler.busy and not self._frozen:
                finished = self._step(core)
                self._progress = time.monotonic()
                if finished:
                    self._loop.call_soon_threadsafe(self._on_finished, finished)

    def _process_input_queue(self, wait: bool) -> None:
        self._idle = wait
        try:
            work = self._input_queue.get(block=wait)
            self._idle = False
            while True:
                work()
                self._progress = time.monotonic()
                work = self._input_queue.get_nowait()
        except queue.Empty:
            return

    def _step(self, core: EngineCore) -> list[FinishedSequence]:
        try:
            return core.step()
        except Exception as error:
            _log.exception("the engine's step failed; its requests are answered with engine_failed")
            return core.fail(error)

    # On the event loop

    def _fail(self, cause: Exception) -> None:
        self._cause = cause
        self._on_death(_death(cause))
        for future in self._calls:
            if not future.done():
                future.set_exception(_death(cause))


def _death(cause: Exception) -> TrackwayError:
    return TrackwayError(
        ErrorCode.UNAVAILABLE,
        f"expected a running engine, got {type(cause).__name__} on its thread: {cause}; restart this replica",
    )
