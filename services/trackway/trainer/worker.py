"""The process of a run: `python -m trackway.trainer.worker outputs/<run>`.

SIGTERM and SIGINT abort the rollouts in flight, save a checkpoint and exit with 0. SIGUSR1 does the same and marks the
run as interrupted: the service is shutting down, but the run was not stopped by a user. The outcome is in state.json.
The exit status adds what a file cannot record:

    0  the state is final
    3  the run failed, and a restart would fail again
    4  another process owns the run
    5  the disk is full: neither the run's files nor its failure could be written
    other values: the process died and may be restarted from the last checkpoint
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trackway.clients import run
from trackway.run_config import RunConfig
from trackway.system import StorageError, escape_log_records, refuse_inspection, remove_drafts
from trackway.system.files import FULL, error_number, storage_error
from trackway.system.waits import Waits
from trackway.trainer.run_state.folder import Activity, RunFolder
from trackway.trainer.run_state.heartbeat import EXIT_FAILED, EXIT_STORAGE, Heartbeat, exit_if_lost
from trackway.trainer.settings import check_installation
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunState

if TYPE_CHECKING:
    from trackway.trainer.delivery import Tracking
    from trackway.trainer.loop.supervised import SupervisedTraining
    from trackway.trainer.loop.training import Training


REPORT_EVERY_S = 1.0
PATIENCE_S = 2.0
"""Shorter waits are not written."""


@dataclass
class ActivityReport:
    """The sources of the file."""

    waits: Waits = field(default_factory=Waits)
    account: Callable[[], dict[str, int]] = dict
    """The rollouts by state. Nothing until the run is built."""

    def activity(self) -> Activity:
        """Waits that last, and the rollouts as they are now."""
        return Activity(waits=self.waits.current(PATIENCE_S), rollouts=self.account())


@asynccontextmanager
async def reported(folder: RunFolder) -> AsyncIterator[ActivityReport]:
    """Keeps the run's file up to date for the duration of the block. Afterwards it has the rollouts and no wait."""
    report = ActivityReport()
    reporting = asyncio.create_task(_report(folder, report))
    try:
        yield report
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        with suppress(OSError):
            await asyncio.to_thread(folder.write_activity, Activity(rollouts=report.account()))


async def _report(folder: RunFolder, report: ActivityReport) -> None:
    written: Activity | None = None
    while True:
        current = report.activity()
        if current != written:
            try:
                await asyncio.to_thread(folder.write_activity, current)
                written = current
            except OSError as error:
                logger.debug("the activity of the run cannot be written: %s", error)
        await asyncio.sleep(REPORT_EVERY_S)


AnyTraining: TypeAlias = "Training | SupervisedTraining"
Build: TypeAlias = Callable[[RunFolder, asyncio.Event, bool, Waits], Awaitable[tuple[AnyTraining, "Tracking"]]]
ServeCalls: TypeAlias = Callable[[RunFolder, asyncio.Event, asyncio.Event, Waits], Awaitable[tuple[RunState, int]]]
Fit: TypeAlias = Callable[[AnyTraining], Awaitable[RunState]]
Advise: TypeAlias = Callable[[Exception, RunConfig], None]

ORPHAN_GRACE_S = 30.0
"""Seconds to save a checkpoint after the service that started this process has exited."""
SECRETS_S = 120.0
"""Longest wait for the secrets of a run."""
TRACKING_DEADLINE_S = 60.0
"""Longest wait at the end for metrics and feedback that MLflow has not received."""
TRACES_DEADLINE_S = 10.0
"""Longest wait at the end for the trainer's own spans, and again for spans queued in the services."""

logger = logging.getLogger("trackway.trainer")


def main(arguments: list[str] | None = None) -> int:
    """Train the folder's run. Return the process's exit status."""
    parser = argparse.ArgumentParser(prog="trackway.trainer.worker", description="Train one run.")
    parser.add_argument("folder", type=Path, nargs="?", help="the run's folder, with config.json and services.json")
    parser.add_argument("--lifeline", action="store_true", help="read secrets from standard input, stop when it closes")
    parser.add_argument("--skip-damaged", action="store_true", help="resume from the newest intact checkpoint")
    parser.add_argument("--standby", action="store_true", help="load PyTorch, then read from standard input what to do")
    options = parser.parse_args(arguments)
    if options.standby:
        _heavy_imports()
        options = parser.parse_args(_taken_by_run())
    elif options.lifeline:
        os.environ.update(receive(SECRETS_S))
    if options.folder is None:
        parser.error("expected the folder of a run, got none")
    escape_log_records()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = RunFolder(options.folder, exit_if_lost)
    try:
        run(_work(folder, options.lifeline, options.skip_damaged))
    except TrackwayError as error:
        return _failed(folder, error)
    except Exception as error:
        number = error_number(error)
        if number not in FULL:
            raise
        return _failed(folder, storage_error(number, folder.path, f"the files of run {folder.name!r}"))
    return 0


def _taken_by_run() -> list[str]:
    """Wait for a run, as long as the service lives. Return its arguments, with its secrets set and its log open."""
    given = receive(None)
    os.environ.update(given["secrets"])
    log = os.open(given["log"], os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    return given["arguments"]


def receive(deadline_s: float | None) -> dict[str, Any]:
    """Return the line of JSON on standard input, which only this process can read.

    Ends the process when standard input closes first, or after `deadline_s`.
    """
    line, end = b"", None if deadline_s is None else time.monotonic() + deadline_s
    while not line.endswith(b"\n"):  # only line ends follow, which wake the process
        left = None if end is None else max(0.0, end - time.monotonic())
        readable, _, _ = select.select([0], [], [], left)
        received = os.read(0, 65536) if readable else b""
        if not received:
            raise SystemExit(1)
        line += received
    return json.loads(line)


def _failed(folder: RunFolder, error: TrackwayError) -> int:
    """Mark the run FAILED. Return the exit status."""
    logger.error("the run failed", exc_info=error)
    message = f"{error.code}: {error.message}"
    if isinstance(error, StorageError):
        message += f"; then `trackway train --resume {folder.name}` continues from its last checkpoint"
    try:
        folder.move(RunState.FAILED, message)
    except StorageError:
        logger.exception("the state FAILED of the run cannot be written")
        return EXIT_STORAGE
    return EXIT_FAILED


async def _work(folder: RunFolder, lifeline: bool, skip_damaged: bool) -> None:
    stop = asyncio.Event()
    with Heartbeat(folder):
        check_installation()
        woken = asyncio.Event()
        _stop_on_request(folder, stop, woken if lifeline else None)
        remove_drafts(folder.path)
        state, step = await _train(folder, stop, woken, skip_damaged)
    how = "interrupted" if folder.info().interrupted else "stopped"
    if state is RunState.FINISHED:
        folder.move(state, interrupted=False)
    else:
        folder.move(state, f"{how} after step {step}; it can be resumed")


async def _train(
    folder: RunFolder, stop: asyncio.Event, woken: asyncio.Event, skip_damaged: bool
) -> tuple[RunState, int]:
    # Importing torch and transformers takes seconds, so the signal handlers are installed before.
    builds, fit, serve_calls, advise = await asyncio.to_thread(_heavy_imports)
    async with reported(folder) as report:
        config = folder.config()
        build = builds[config.is_supervised]
        if config.placement.ranks == 1 and config.trackway.weights_transport == "store":  # else it shares GPU memory
            refuse_inspection()
        try:
            if folder.is_called:
                return await serve_calls(folder, stop, woken, report.waits)
            training, tracking = await build(folder, stop, skip_damaged, report.waits)
            report.account = training.account
            gc.freeze()  # the learner collects garbage after every step, and imports leave a million objects
            return await _trained(folder, stop, training, tracking, fit)
        except Exception as error:
            advise(error, config)
            raise


async def _trained(
    folder: RunFolder, stop: asyncio.Event, training: AnyTraining, tracking: "Tracking", fit: Fit
) -> tuple[RunState, int]:
    if not stop.is_set():
        folder.move(RunState.RUNNING, training.notice)
    status = "FAILED"
    try:
        state = await fit(training)
        status = "FINISHED" if state is RunState.FINISHED else "KILLED"
    finally:
        try:
            await asyncio.to_thread(training.learner.close)
        finally:
            if training.engines is not None:
                await training.engines.close()
        training.release()
        with training.waits("the run", "its last metrics and feedback to be delivered", TRACKING_DEADLINE_S):
            summaries = await asyncio.to_thread(tracking.close, status, TRACKING_DEADLINE_S)
        with training.waits("the run", "its last spans to be delivered", TRACES_DEADLINE_S):
            traces = await training.traces.close(TRACES_DEADLINE_S)
        try:
            account = training.account()
            folder.update(traces=traces, tracking=summaries, rollout_states=account, **tracking.ids)
        except StorageError as error:
            logger.warning("the final counts of spans and metrics cannot be written: %s", error)
    return state, training.step


def _heavy_imports() -> tuple[Mapping[bool, Build], Fit, ServeCalls, Advise]:
    from trackway.trainer.calls.drive import serve_calls
    from trackway.trainer.loop.build import build, build_supervised
    from trackway.trainer.loop.fit import fit
    from trackway.trainer.loop.from_config import advise

    return {False: build, True: build_supervised}, fit, serve_calls, advise


def _stop_on_request(folder: RunFolder, stop: asyncio.Event, woken: asyncio.Event | None) -> None:
    """Set `stop` on a signal. With `woken`, also once standard input closes, and `woken` at each of its bytes."""

    def request(is_interrupted: bool) -> None:
        if not stop.is_set() and not folder.ended():
            stop.set()
            try:
                folder.move(RunState.STOPPING, interrupted=is_interrupted)
            except StorageError as error:  # the run still stops
                logger.warning("the state STOPPING of the run cannot be written: %s", error)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, request, number is signal.SIGUSR1)
    if woken is not None:
        interrupt = partial(loop.call_soon_threadsafe, request, True)
        wake = partial(loop.call_soon_threadsafe, woken.set)
        threading.Thread(target=_watch_lifeline, args=(wake, interrupt), daemon=True).start()


def _watch_lifeline(wake: Callable[[], object], interrupt: Callable[[], object]) -> None:
    # Not sys.stdin: a thread blocked in it crashes the interpreter's shutdown.
    while os.read(0, 4096):
        wake()
    timer = threading.Timer(ORPHAN_GRACE_S, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
    interrupt()


def flush_or_drop() -> None:
    """Flush standard output and error. Discard what a full disk refuses, which would set the exit status to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    status = main()
    flush_or_drop()
    raise SystemExit(status)
