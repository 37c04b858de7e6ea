"""The parts of a run, and the steps of the fit loop.

Only `update` changes the progress of a run: a step is done when `update` returns, and has no effect before. However a
run ends, its newest checkpoint and the row of that step agree.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from trackway.system import StorageError
from trackway.system.waits import Waiting, Waits
from trackway.trainer.data.dataset import traced_positions
from trackway.trainer.delivery import Sink
from trackway.trainer.learner.batch import TokenValues
from trackway.trainer.learner.filtering import FilteredBatch, filter_trajectories
from trackway.trainer.learner.finite import NotFiniteError
from trackway.trainer.learner.learner import EmptyBatchError, Learner, UpdateResult
from trackway.trainer.learner.ranks.snapshot import Snapshot
from trackway.trainer.loop.colocation import Engines, require_room
from trackway.trainer.loop.greedy_baseline import sampled_of
from trackway.trainer.loop.profiler import Profiler
from trackway.trainer.loop.resume import Beginning
from trackway.trainer.loop.rollout_client import Rollouts
from trackway.trainer.loop.schedule import OpenValidation, Progress, Schedule
from trackway.trainer.loop.scheduler import GroupScheduler
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.trainer.metrics.clock import Clock
from trackway.trainer.metrics.rollout import (
    Metrics,
    derived_metrics,
    incident_metrics,
    rollout_metrics,
    update_metrics,
)
from trackway.trainer.metrics.validation import validation_metrics
from trackway.trainer.run_state.checkpoint import copy_checkpoint, find_latest, save_checkpoint
from trackway.trainer.run_state.folder import TOKEN_VALUES, RunFolder
from trackway.trainer.run_state.generations import Generations
from trackway.trainer.run_state.token_values import write_token_values
from trackway.trainer.run_state.trajectory_dump import write_trajectories
from trackway.trainer.traces.run import RunTraces, shown_metrics
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow
from trackway.wire.trajectory import Trajectory

T = TypeVar("T")

_WAITS_FOR = {
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
    """A stop was requested while the run waited for rollouts."""


@dataclass
class Validation:
    """Validates the weights of a run."""

    rows: Sequence[Sample]
    """Held-out rows. Without them no validation takes place."""
    rollouts: Rollouts
    samples: Generations | None = None
    """Writer of the samples of each validation."""


class Saving(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    task: asyncio.Task[None]


@dataclass
class Training:
    """A run in progress. The methods are the steps of the fit loop."""

    plan: Schedule
    folder: RunFolder
    scheduler: GroupScheduler
    validation: Validation
    learner: Learner
    publisher: Publisher
    sinks: Sequence[Sink]
    traces: RunTraces
    beginning: InitVar[Beginning]
    """The state that the run continues from."""
    samples: Generations | None = None
    """Writer of each step's samples."""
    profiler: Profiler | None = None
    """Profiles the updates of some steps."""
    engines: Engines | None = None
    """Engines that sleep while the learner uses their GPUs. None when no engine shares a GPU."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    clock: Clock = field(default_factory=Clock)
    waits: Waits = field(default_factory=Waits)
    _taken: list[int] = field(default_factory=list[int])
    """Bytes of each rank's GPU that the engines gave back when they last went to sleep."""
    _saving: Saving | None = None
    """The checkpoint that is being written."""
    _validating: asyncio.Task[Metrics] | None = None
    """The validation `progress.validation`."""

    def __post_init__(self, beginning: Beginning) -> None:
        self.progress = beginning.progress
        self.saved_step = beginning.saved_step
        """Step of the newest checkpoint."""
        self.notice = beginning.notice
        """A message about the checkpoint that the run started from."""

    @property
    def step(self) -> int:
        """Steps whose update is done."""
        return self.progress.step

    @property
    def complete(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.plan.total_steps

    @property
    def finished(self) -> bool:
        """Whether no further step may begin."""
        return self.complete or self.stop.is_set()

    @property
    def validation_is_due(self) -> bool:
        """After every `test_freq` steps and after the last."""
        return self.complete or _is_multiple(self.step, self.plan.test_freq)

    @property
    def checkpoint_is_due(self) -> bool:
        """After every `save_freq` steps. The last is saved in any case."""
        return _is_multiple(self.step, self.plan.save_freq)

    @property
    def publish_is_due(self) -> bool:
        """After every `trigger_parameter_sync_step` steps and after the last."""
        return self.complete or _is_multiple(self.step, self.scheduler.pacing.sync_every)

    @property
    def first_validation_is_due(self) -> bool:
        """Before the first step of a run that starts from a model or from another run's checkpoint.

        Also when a stop interrupted the validation of the step from which the run resumes.
        """
        wanted = self.plan.val_before_train or bool(self.progress.unvalidated)
        return wanted and all(row.step != self.step for row in (*self.folder.rows(), *self.progress.rows))

    @property
    def validated(self) -> bool:
        """Whether no validation was interrupted by a stop."""
        return not self.progress.unvalidated and self.progress.validation is None

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Time and trace the next step."""
        with self.clock("step"), self.traces.step(self.step + 1):
            yield

    async def rollout(self, version: int) -> list[Trajectory]:
        """All rollouts of the next step, failed ones included. New ones are sampled from weights `version` or newer.

        The same ones are returned, or requested, again until `update` has used them. Raises StopRequested when a stop
        is requested meanwhile. When every rollout failed, saves a checkpoint and raises the error of the first; so too
        when the filter leaves out too many groups.
        """
        self.clock.take()
        self.scheduler.rollouts.active.take()
        if self._saving is not None and self._saving.task.done():
            await self.saved()
        step, position = self.step + 1, self.progress.position
        with self._part("rollout", "gen") as waiting:
            waiting.progress, waiting.because = self.scheduler.progress, self.scheduler.rollouts.waits.current
            self.scheduler.submit(self.step, position, version, self._traced, self.plan.total_steps - self.step)
            taking = self.scheduler.take(self.step, position)
            try:
                trajectories = await self._unless_stopped(taking)
            except TrackwayError:
                await self.save()
                raise
            finally:
                self.traces.dropped(self.scheduler.take_dropped())
        self.traces.received(trajectories)
        await self._stored(partial(write_trajectories, self._dump(f"step_{step}"), trajectories))
        if self.samples is not None:
            await self._stored(partial(self.samples.write, step, sampled_of(trajectories)))
        try:
            _require_one_success(trajectories, f"step {step}")
        except TrackwayError:
            await self.save()
            raise
        return trajectories

    async def sleep(self) -> None:
        """Puts the engines on the learner's GPUs to sleep. On failure saves a checkpoint and raises TrackwayError."""
        if self.engines is not None:
            before = await asyncio.to_thread(self.learner.free_memory)
            await self._or_save("sleep", self.engines.sleep())
            free = await asyncio.to_thread(self.learner.free_memory)
            self._taken = [now - then for now, then in zip(free, before, strict=True)]

    async def wake_up(self, version: int, metrics: Metrics | None = None) -> None:
        """Wakes them up with the weights `version`. On failure saves a checkpoint and raises TrackwayError.

        The GPUs must have the memory that the engines gave back as they went to sleep.
        """
        await asyncio.to_thread(self.learner.release_memory)
        if self.engines is not None:
            await self._or_save("wake_up", self._woken(self.engines, version), metrics)

    async def _woken(self, engines: Engines, version: int) -> None:
        require_room(self._taken, await asyncio.to_thread(self.learner.free_memory))
        await engines.wake_up(version)

    async def update(self, trajectories: Sequence[Trajectory], version: int) -> Metrics:
        """One GRPO update of weights `version` on the trajectories that are neither failed nor stale. Ends the step."""
        versions = self.progress.versions
        renumbered = [versions.renumbered(trajectory) for trajectory in trajectories]
        batch = filter_trajectories(renumbered, version, self.plan.max_staleness)
        with self._part("update_actor"):
            metrics, advantages, tokens, seconds = await asyncio.to_thread(self._learn, batch, version)
        self.clock.split("update_actor", seconds)
        if tokens is not None:
            metrics |= await self._save_token_values(batch, tokens)
        self.traces.assess(batch, advantages, self.step + 1)
        self.scheduler.used(batch.counts)
        self.traces.dropped(self.scheduler.take_dropped())
        epoch = self.progress.position.epoch
        _, after = self.scheduler.prompts.take(self.progress.position)
        before = self.progress
        self.progress = Progress(
            step=self.step + 1, position=after, versions=versions, validation=before.validation, rows=before.rows
        )
        self.traces.own.note(weights_before=version, **shown_metrics(metrics))
        self.traces.own.note(**batch.counts)
        metrics |= {"training/global_step": float(self.step), "training/epoch": float(epoch)}
        metrics |= update_metrics(batch.used, version, self.plan.max_prompt_length)
        metrics |= batch.metrics() | self.scheduler.metrics()
        sampled = sampled_of(trajectories)
        return metrics | rollout_metrics(sampled) | incident_metrics(sampled)

    async def publish(self, metrics: Metrics | None = None) -> int:
        """Publish the learner's weights. Returns the version that rollouts must use from now on.

        First completes the validation of the weights before, since a replica holds one version. StopRequested when a
        stop is requested meanwhile, with the newest step's `metrics` kept. Raises TrackwayError(NOT_FINITE), and
        neither publishes nor saves the weights, when they are NaN or infinite.
        """
        try:
            await self.complete_validation()
        except StopRequested:
            await self._keep(metrics or {})
            raise
        resumed = self.publisher.published is None
        with self._part("update_weights") as waiting:
            waiting.progress = self.publisher.progress
            try:
                version = await self._stored(self.publisher.publish)
            except NotFiniteError as error:
                raise self._diverged(error) from error
        versions = self.progress.versions.published(version, resumed)
        self.progress = self.progress.model_copy(update={"versions": versions})
        self.traces.own.note(weights_after=version)
        return version

    async def validate(self, version: int, metrics: Metrics | None = None) -> Metrics:
        """`metrics` of the newest step, with the accuracy on the held-out rows if there are any.

        Raises StopRequested when a stop is requested meanwhile. A resumed run then validates the step first; where
        rollouts run ahead of the learner on engines that never sleep, the validation goes on beside the training: it
        returns at once, and `log` adds the accuracy to the row of this step later.
        """
        metrics = metrics or {}
        self.progress = self.progress.model_copy(update={"unvalidated": {}})
        if not self.validation.rows:
            return metrics
        if self.scheduler.pacing.runs_ahead and self.engines is None:
            self._begin_validation(OpenValidation(step=self.step, version=version))
            return metrics
        collecting = self.validation.rollouts.collect(
            self.validation.rows, self.step, version, self._traced_validation()
        )
        try:
            with self._part("testing") as waiting:
                waiting.because = self.validation.rollouts.waits.current
                trajectories = await self._unless_stopped(collecting)
        except StopRequested:
            self.progress = self.progress.model_copy(update={"unvalidated": metrics | self.clock.take()})
            raise
        self.traces.received(trajectories)
        return metrics | await self._validation_metrics(trajectories, self.step)

    async def resume_validation(self) -> None:
        """Begin again the validation of an earlier step that a stop or a crash cut off. Replicas have its weights."""
        validation = self.progress.validation
        if validation is None:
            return
        newest = await asyncio.to_thread(self.publisher.newest)
        if newest == validation.version:
            await self.wake_up(validation.version)
            self._begin_validation(validation)
            return
        message = (
            "the validation of step %d was cut off, and cannot be repeated: its weights were %s, the newest are %s"
        )
        logger.warning(message, validation.step, validation.version, newest)
        self.progress = self.progress.model_copy(update={"validation": None})
        await self._write_rows()

    async def complete_validation(self) -> None:
        """Wait for the validation that goes on beside the training, if there is one, and write the rows up to now.

        Raises StopRequested when a stop is requested meanwhile. A resumed run then does the validation first.
        """
        if self._validating is None:
            return
        if not self._validating.done():
            with self._part("await_testing") as waiting:
                waiting.because = self.validation.rollouts.waits.current
                await self._unless_stopped(_ended(self._validating))
        await self._write_rows()

    def _begin_validation(self, validation: OpenValidation) -> None:
        self.progress = self.progress.model_copy(update={"validation": validation})
        self._validating = asyncio.create_task(self._validate_beside(validation))

    async def _validate_beside(self, validation: OpenValidation) -> Metrics:
        step, clock = validation.step, Clock()
        with (
            self.traces.validation(step) as trace,
            clock("testing"),
            self.waits(f"the validation at step {step}", "its rollouts") as waiting,
        ):
            waiting.because = self.validation.rollouts.waits.current
            trajectories = await self.validation.rollouts.collect(
                self.validation.rows, step, validation.version, self._traced_validation()
            )
            self.traces.received(trajectories, trace)
        return await self._validation_metrics(trajectories, step) | clock.take()

    def _traced_validation(self) -> frozenset[int]:
        wanted = min(self.plan.traced_validation, len(self.validation.rows))
        return frozenset(range(self.traces.budget.prompts(wanted, self.plan.validation_n)))

    async def _validation_metrics(self, trajectories: Sequence[Trajectory], step: int) -> Metrics:
        await self._stored(partial(write_trajectories, self._dump(f"val_step_{step}"), trajectories))
        if self.validation.samples is not None:
            await self._stored(partial(self.validation.samples.write, step, trajectories))
        _require_one_success(trajectories, f"the validation at step {step}")
        self.traces.assess_validation(trajectories)
        return validation_metrics(trajectories, self.plan.validation_n)

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
            scheduler, finished = self.scheduler.snapshot()
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
        self.scheduler.rollouts.saved(drawn)
        self.saved_step = step

    async def log(self, metrics: Metrics) -> None:
        """Write the row of the newest step, with the timings of the clock. Does nothing without metrics.

        While a validation goes on beside the training, the rows of its step and of later ones wait for it.
        """
        validation = self.progress.validation
        if not metrics and (validation is None or validation.step != self.step):
            return
        data = metrics | self.clock.take() | self.traces.metrics()
        if "timing_s/step" in data:
            data |= self.scheduler.rollouts.active.take()
        data |= derived_metrics(data, self.plan.gpus)
        row = MetricsRow(step=self.step, timestamp=time.time_ns() // 1_000_000, data=data)
        self.progress = self.progress.model_copy(update={"rows": [*self.progress.rows, row]})
        await self._write_rows()
        await self._show(data)

    async def _keep(self, metrics: Metrics) -> None:
        """Keep the metrics of a step that a stop cut off. A resumed run validates it first if that is due."""
        if self.validation_is_due and self.validation.rows and metrics:
            self.progress = self.progress.model_copy(update={"unvalidated": metrics | self.clock.take()})
        else:
            await self.log(metrics)

    async def _write_rows(self) -> None:
        """Write the rows, unless they wait for a validation."""
        rows, validation = self.progress.rows, self.progress.validation
        found: Metrics = {}
        if validation is not None:
            if (
                self._validating is None
                or not self._validating.done()
                or all(row.step != validation.step for row in rows)
            ):
                return
            found = self._validating.result()
            rows = [
                row.model_copy(update={"data": row.data | found}) if row.step == validation.step else row
                for row in rows
            ]
            self._validating = None
        for row in rows:
            for sink in self.sinks:
                await self._stored(partial(sink.log, row))
        self.progress = self.progress.model_copy(update={"rows": [], "validation": None})
        if found:
            await self._show(found)

    async def _show(self, metrics: Metrics) -> None:
        """Set the newest metrics on the run."""
        changes = {
            "metrics": self.folder.info().metrics | metrics,
            "traces": self.traces.summary(),
            "rollout_states": self.scheduler.account(),
        }
        await self._stored(partial(self.folder.update, step=self.step, **changes))

    async def close(self) -> None:
        """Cancel the rollouts that are still running, those of a validation included.

        A checkpoint that is being written is completed, whatever ends the run.
        """
        await self.scheduler.close()
        if self._validating is not None:
            self._validating.cancel()
            await asyncio.gather(self._validating, return_exceptions=True)
        if self._saving is not None:
            await asyncio.wait([self._saving.task], timeout=CHECKPOINT_WAIT_S)

    @contextmanager
    def _part(self, name: str, activity: str = "") -> Iterator[Waiting]:
        """Trace a part of the step as `name`, and time it as `activity`, which defaults to the name."""
        waits_for = _WAITS_FOR[name].format(next=self.step + 1, done=self.step)
        with self.clock(activity or name), self.traces.own.part(name), self.waits("the run", waits_for) as waiting:
            yield waiting

    async def _or_save(self, name: str, work: Awaitable[None], metrics: Metrics | None = None) -> None:
        try:
            with self._part(name):
                await work
        except TrackwayError:
            await self.save(metrics)
            raise

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

    def _diverged(self, error: NotFiniteError) -> TrackwayError:
        """The error for weights that are not finite. Names the newest checkpoint as the remedy."""
        checkpoint = find_latest(self.folder.checkpoints)
        again = "the run has no checkpoint (trainer.save_freq): start again"
        if checkpoint is not None:
            again = (
                f"its last good checkpoint is {checkpoint}: start a new run from there, with "
                f"trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint}"
            )
        message = (
            f"the weights after step {self.step} are neither published nor saved: {error}; {again} and a lower "
            "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.grad_clip"
        )
        return TrackwayError(ErrorCode.NOT_FINITE, message, step=self.step)

    def _learn(self, batch: FilteredBatch, version: int) -> UpdateResult:
        every = self.scheduler.pacing.sync_every
        profiled = contextlib.nullcontext() if self.profiler is None else self.profiler.step(self.step + 1)
        try:
            with profiled:
                return self.learner.update(
                    batch.used, version + self.step % every / every, self.traces.own.optimizer_step
                )
        except EmptyBatchError as error:
            counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in batch.counts.items())
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"step {self.step + 1}: {counts}: {error}") from error

    async def _save_token_values(self, batch: FilteredBatch, tokens: TokenValues) -> Metrics:
        """The bytes written. A disk that refuses them does not end the run, which has learned from them already."""
        step = self.step + 1
        path = self.folder.path / TOKEN_VALUES / f"step_{step}.parquet"
        with self._part("save_token_values"):
            try:
                written = await asyncio.to_thread(write_token_values, path, step, batch, tokens)
            except OSError as error:
                logger.warning("the values of tokens of step %d are not written: %s", step, error)
                written = 0
        return {"training/token_values_bytes": float(written)}

    def _traced(self, number: int, size: int) -> frozenset[int]:
        """The places of a batch whose rollouts are traced."""
        prompts = self.traces.budget.prompts(self.plan.traced_prompts, self.plan.rollouts)
        return traced_positions(self.plan.seed, number, size, prompts)

    def _dump(self, name: str) -> Path:
        return self.folder.path / "trajectories" / f"{name}.parquet"

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


async def _ended(task: asyncio.Task[Metrics]) -> None:
    """Returns when the task has ended. Its own cancellation leaves the task running."""
    await asyncio.wait([task])


def _is_multiple(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


def _require_one_success(trajectories: Sequence[Trajectory], what: str) -> None:
    errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
    if not errors:
        return
    first = errors[0]
    if len(errors) < len(trajectories):
        logger.warning("%d of %d rollouts of %s failed: %s", len(errors), len(trajectories), what, first.message)
        return
    message = f"all {len(errors)} rollouts of {what} failed; the first: {first.message}"
    raise TrackwayError(first.code, message, **first.detail)
