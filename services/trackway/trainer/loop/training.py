"""The parts of a run, and the steps of the fit loop.

Only `update` changes the progress of a run: a step is done when `update` returns, and has no effect before. However a
run ends, its newest checkpoint and the row of that step agree.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from trackway.learner.batch import TokenValues
from trackway.learner.filtering import FilteredBatch, filter_trajectories
from trackway.learner.finite import NotFiniteError
from trackway.learner.learner import EmptyBatchError, UpdateResult
from trackway.learner.measuring import Clock
from trackway.trainer.data.dataset import traced_positions
from trackway.trainer.loop.base import BaseTraining, StopRequested, is_multiple
from trackway.trainer.loop.colocation import Engines, require_room
from trackway.trainer.loop.rollout_client import Rollouts, sampled_of
from trackway.trainer.loop.schedule import OpenValidation, Progress
from trackway.trainer.loop.scheduler import GroupScheduler, SchedulerState
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.trainer.metrics import (
    Metrics,
    derived_metrics,
    incident_metrics,
    rollout_metrics,
    update_metrics,
    validation_metrics,
)
from trackway.trainer.run_state.checkpoint import find_latest
from trackway.trainer.run_state.folder import TOKEN_VALUES
from trackway.trainer.run_state.trajectories import Generations, write_token_values, write_trajectories
from trackway.trainer.traces.run import shown_metrics
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory

T = TypeVar("T")

logger = logging.getLogger("trackway.trainer")


@dataclass
class Validation:
    """Validates the weights of a run."""

    rows: Sequence[Sample]
    """Held-out rows. Without them no validation takes place."""
    rollouts: Rollouts
    samples: Generations | None = None
    """Writer of the samples of each validation."""


@dataclass(kw_only=True)
class Training(BaseTraining):
    """A run of reinforcement learning. The methods are the steps of the fit loop."""

    scheduler: GroupScheduler
    validation: Validation
    publisher: Publisher
    samples: Generations | None = None
    """Writer of each step's samples."""
    _taken: list[int] = field(default_factory=list[int])
    """Bytes of each rank's GPU that the engines gave back when they last went to sleep."""
    _validating: asyncio.Task[Metrics] | None = None
    """The validation `progress.validation`."""

    def groups(self) -> tuple[SchedulerState, Sequence[Trajectory]]:
        """Groups for a checkpoint that were submitted and not trained, and their trajectories that have ended."""
        return self.scheduler.snapshot()

    def has_saved(self, drawn: Sequence[str]) -> None:
        """A checkpoint with the groups `drawn` is complete."""
        self.scheduler.rollouts.saved(drawn)

    def account(self) -> dict[str, int]:
        """The rollouts by state."""
        return self.scheduler.account()

    def release(self) -> None:
        """Give up the lock of the weight store."""
        self.publisher.close()

    @property
    def publish_is_due(self) -> bool:
        """After every `trigger_parameter_sync_step` steps and after the last."""
        return self.complete or is_multiple(self.step, self.scheduler.pacing.sync_every)

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
        self.progress = self.progress.model_copy(update={"rows": [*self.progress.rows, self.row(data)]})
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
            await self.write_row(row)
        self.progress = self.progress.model_copy(update={"rows": [], "validation": None})
        if found:
            await self._show(found)

    async def close(self) -> None:
        """Cancel the rollouts that are still running, including a validation's.

        A checkpoint that is being written is completed, whatever ends the run.
        """
        await self.scheduler.close()
        if self._validating is not None:
            self._validating.cancel()
            await asyncio.gather(self._validating, return_exceptions=True)
        await super().close()

    async def _or_save(self, name: str, work: Awaitable[None], metrics: Metrics | None = None) -> None:
        try:
            with self._part(name):
                await work
        except TrackwayError:
            await self.save(metrics)
            raise

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


async def _ended(task: asyncio.Task[Metrics]) -> None:
    """Returns when the task has ended. Its own cancellation leaves the task running."""
    await asyncio.wait([task])


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
