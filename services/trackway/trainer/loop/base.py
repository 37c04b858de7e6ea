"""The base of a run in progress: its steps, waits, disk, checkpoints and rows."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from trackway.learner.learner import Learner
from trackway.learner.measuring import Clock
from trackway.learner.ranks.snapshot import Snapshot
from trackway.system import StorageError
from trackway.system.waits import Waiting, Waits
from trackway.trainer.delivery import Sink
from trackway.trainer.loop.colocation import Engines
from trackway.trainer.loop.resume import Beginning
from trackway.trainer.loop.schedule import Schedule
from trackway.trainer.loop.scheduler import SchedulerState
from trackway.trainer.metrics import Metrics, derived_metrics
from trackway.trainer.run_state.checkpoint import copy_checkpoint, save_checkpoint
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.traces.run import RunTraces
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow
from trackway.wire.trajectory import Trajectory


@dataclass(frozen=True)
class Profiler:
    """Writes `step_<n>.json.gz` for Perfetto or chrome://tracing."""

    folder: Path
    steps: frozenset[int]

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block if it is one of the steps. A trace that cannot be written is logged, and fails nothing."""
        if number not in self.steps:
            yield
            return
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiled:
            yield
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(self.folder / f"step_{number}.json.gz"))
        except OSError as error:
            logger.warning("the profile of step %d cannot be written to %s: %s", number, self.folder, error)


T = TypeVar("T")

WAITS_FOR = {
    "rollout": "the rollouts of step {next}",
    "sleep": "the engines to go to sleep",
    "update_actor": "the update of step {next}",
    "save_token_values": "the values of tokens of step {next} to be written",
    "update_weights": "the publication of the weights after step {done}",
    "wake_up": "the engines to wake up",
    "testing": "the validation at step {done}",
    "await_testing": "the validation of the newest published weights, which new ones would replace",
    "save_checkpoint": "the checkpoint of step {done}",
}
"""Thing that a run waits for in each part of a step."""
CHECKPOINT_WAIT_S = 3600.0
"""Longest wait for a checkpoint to be written, besides that for a disk that refuses it."""
STORAGE_RETRY_S = 2.0
"""Pause before a write that the disk refused is tried again."""

logger = logging.getLogger("trackway.trainer")


class StopRequested(Exception):
    """A stop was requested while the run waited for rollouts, or validated."""


class Saving(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    task: asyncio.Task[None]


@dataclass(kw_only=True)
class BaseTraining:
    """A run in progress: what reinforcement learning and supervised training share."""

    plan: Schedule
    folder: RunFolder
    learner: Learner
    sinks: Sequence[Sink]
    traces: RunTraces
    beginning: InitVar[Beginning]
    """The state that the run continues from."""
    profiler: Profiler | None = None
    """Profiles the updates of some steps."""
    engines: Engines | None = None
    """Engines that sleep while the learner uses their GPUs. None when no engine shares a GPU."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    clock: Clock = field(default_factory=Clock)
    waits: Waits = field(default_factory=Waits)
    _saving: Saving | None = None
    """The checkpoint that is being written."""

    def __post_init__(self, beginning: Beginning) -> None:
        self.progress = beginning.progress
        self.saved_step = beginning.saved_step
        """Step of the newest checkpoint."""
        self.notice = beginning.notice
        """A message about the checkpoint that the run started from."""

    def groups(self) -> tuple[SchedulerState, Sequence[Trajectory]]:
        """Groups for a checkpoint that were submitted and not trained, and their trajectories that have ended."""
        return SchedulerState(), ()

    def has_saved(self, drawn: Sequence[str]) -> None:
        """A checkpoint with the groups `drawn` is complete."""
        del drawn

    def account(self) -> dict[str, int]:
        """The rollouts by state. Empty without rollouts."""
        return {}

    def release(self) -> None:
        """Give up what only this process may hold, such as the lock of the weight store."""

    @property
    def step(self) -> int:
        """Steps whose update is done."""
        return self.progress.step

    @property
    def complete(self) -> bool:
        """Return whether the last step is done."""
        return self.step >= self.plan.total_steps

    @property
    def finished(self) -> bool:
        """Return whether no further step may begin."""
        return self.complete or self.stop.is_set()

    @property
    def validation_is_due(self) -> bool:
        """After every `test_freq` steps and after the last."""
        return self.complete or is_multiple(self.step, self.plan.test_freq)

    @property
    def checkpoint_is_due(self) -> bool:
        """After every `save_freq` steps. The last is saved in any case."""
        return is_multiple(self.step, self.plan.save_freq)

    @property
    def first_validation_is_due(self) -> bool:
        """Before the first step of a run that starts from a model or from another run's checkpoint.

        Also when a stop interrupted the validation of the step from which the run resumes.
        """
        wanted = self.plan.val_before_train or bool(self.progress.unvalidated)
        return wanted and all(row.step != self.step for row in (*self.folder.rows(), *self.progress.rows))

    @property
    def validated(self) -> bool:
        """Return whether no validation was interrupted by a stop."""
        return not self.progress.unvalidated and self.progress.validation is None

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Time and trace the next step."""
        with self.clock("step"), self.traces.step(self.step + 1):
            yield

    async def save(self, metrics: Metrics | None = None) -> None:
        """Save a checkpoint of the newest step, unless it exists or the run only validates.

        First waits for the checkpoint before, and raises its error. With `plan.async_save` the learner's state is
        copied, and written while the training goes on. `saved` waits for it.
        """
        await self.saved()
        is_saved = self.saved_step == self.step and not self.progress.rows
        if is_saved or not self.plan.total_steps:
            return
        if metrics is not None:
            self.progress = self.progress.model_copy(update={"metrics": metrics | derived_metrics(metrics)})
        with self._part("save_checkpoint"):
            scheduler, finished = self.groups()
            state = self.progress.model_copy(update={"scheduler": scheduler}).model_dump(mode="json")
            snapshot = await asyncio.to_thread(self.learner.snapshot) if self.plan.async_save else None
            write = self.learner.save if snapshot is None else snapshot.write
            keep = self.plan.keep_checkpoints
            save = partial(save_checkpoint, self.folder.checkpoints, self.step, write, state, keep, finished)
            self._saving = Saving(
                self.step, asyncio.create_task(self._save(save, self.step, scheduler.drawn, snapshot))
            )
            if snapshot is None:
                await self.saved()

    async def saved(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises its error, and TrackwayError when it
        takes too long.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        timeout_s = CHECKPOINT_WAIT_S + self.plan.storage_wait_s
        with self.waits("the learner", f"the checkpoint of step {saving.step}", timeout_s):
            await asyncio.wait([saving.task], timeout=timeout_s)
        if not saving.task.done():
            message = (
                f"the checkpoint of step {saving.step} was not written in {timeout_s:.0f} s; look at the disk of "
                f"{self.folder.checkpoints}, then resume the run"
            )
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message, step=saving.step)
        saving.task.result()

    async def _save(self, save: Callable[[], Path], step: int, drawn: Sequence[str], snapshot: Snapshot | None) -> None:
        try:
            folder = await self._stored(save)
        finally:
            if snapshot is not None:
                await asyncio.to_thread(snapshot.close)
        if self.plan.copies_url is not None:
            url = f"{self.plan.copies_url}/{self.folder.name}"
            await self._stored(partial(copy_checkpoint, folder, url, self.plan.keep_checkpoints))
        self.has_saved(drawn)
        self.saved_step = step

    def row(self, data: Metrics) -> MetricsRow:
        """The row of the newest step."""
        return MetricsRow(step=self.step, timestamp=time.time_ns() // 1_000_000, data=data)

    async def write_row(self, row: MetricsRow) -> None:
        """Write a row to every sink."""
        for sink in self.sinks:
            await self._stored(partial(sink.log, row))

    async def _show(self, metrics: Metrics) -> None:
        """Set the newest metrics on the run."""
        changes = {
            "metrics": self.folder.info().metrics | metrics,
            "traces": self.traces.summary(),
            "rollout_states": self.account(),
        }
        await self._stored(partial(self.folder.update, step=self.step, **changes))

    async def close(self) -> None:
        """Complete a checkpoint that is being written, whatever ends the run."""
        if self._saving is not None:
            await asyncio.wait([self._saving.task], timeout=CHECKPOINT_WAIT_S)

    @contextmanager
    def _part(self, name: str, activity: str = "") -> Iterator[Waiting]:
        """Trace a part of the step as `name`, and time it as `activity`, which defaults to the name."""
        waits_for = WAITS_FOR[name].format(next=self.step + 1, done=self.step)
        with self.clock(activity or name), self.traces.own.part(name), self.waits("the run", waits_for) as waiting:
            yield waiting

    async def _stored(self, write: Callable[[], T]) -> T:
        """Runs a write in a thread, retries it while the disk refuses it, and returns its result.

        Raises StorageError after `plan.storage_wait_s`, or as soon as a stop is requested. A failed write leaves
        nothing behind, so it can be repeated.
        """
        end: float | None = None
        is_said = False
        with contextlib.ExitStack() as waiting:
            while True:
                try:
                    result = await asyncio.to_thread(write)
                except StorageError as error:
                    if end is None:
                        end = time.monotonic() + self.plan.storage_wait_s
                        waits_for = f"its disk: {error.message}"
                        waiting.enter_context(self.waits("the run", waits_for, self.plan.storage_wait_s))
                    left = end - time.monotonic()
                    if self.stop.is_set() or left <= 0:
                        raise
                    is_said = is_said or self._say(f"waits up to {left:.0f} s for its disk: {error.message}")
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.stop.wait(), min(left, STORAGE_RETRY_S))
                else:
                    if end is not None:
                        self._say(self.notice)
                    return result

    def _say(self, message: str) -> bool:
        """Logs the message and sets it on the run. Returns whether the disk had room for it."""
        logger.warning("%s", message or "the disk takes files again")
        try:
            self.folder.update(message=message)
        except StorageError:
            return False
        return True

    async def _unless_stopped(self, work: Coroutine[None, None, T]) -> T:
        """The work's result, or StopRequested as soon as a stop is requested. The work is then cancelled."""
        working = asyncio.create_task(work)
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise StopRequested
            return working.result()
        finally:
            for task in (working, stopped):
                task.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)


def is_multiple(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0
