"""The services of an outputs folder, and runs on them.

session = RunSession.open(subject, report)     # running services, or those that it starts
session.submit(subject, show)                  # starts the run, or goes on with it
info = session.follow(name, show)              # until it ends. Ctrl-C makes it save a checkpoint and stop
info = session.deliver(info, show_unsent)      # until the backends have what the run recorded
session.close(report)                          # ends what `open` started
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import JsonValue

from trackway.clients import TrainerClient, run
from trackway.deploy.checks.run import Subject
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.processes import Report
from trackway.deploy.deployment.record import Deployment, load_running
from trackway.deploy.local import up
from trackway.deploy.local.up import spans_waiting
from trackway.deploy.runs.losses import Unsent
from trackway.deploy.runs.prepare import goes_on, to_start
from trackway.run_config import RunConfig
from trackway.system.process import UserError
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo, RunRequest, RunState

Show = Callable[[RunInfo], None]

_POLL_S = 0.5
STOP_DEADLINE_S = 180.0
"""Longest wait for a run to save its checkpoint and stop."""
OUTAGE_DEADLINE_S = 600.0
"""Longest wait for attached services that do not answer, or for one of their runs that was interrupted. Both may
recover, for example when Kubernetes moves a pod."""
STALLED_S = 60.0
"""Longest wait for backends without progress."""


class RunSession:
    """Starts, resumes, follows and stops runs on the services of a deployment."""

    def __init__(self, deployment: Deployment, own: bool = False) -> None:
        """own: `close` stops the services."""
        self.deployment = deployment
        self.own = own
        self._trainer = TrainerClient(deployment.url("trainer"))

    @classmethod
    def open(cls, subject: Subject, report: Report) -> "RunSession":
        """Return a session on the subject's services, which are started unless they run.

        Raises UserError when they do not start or cannot be reached.
        """
        if subject.deployment is not None:
            return cls(load_running(subject.settings.outputs))
        settings, config = to_start(subject)
        config = serve_config.with_options(config, "trainer", {"standby": True})
        return cls(up.bring_up(settings, report, config), own=True)

    def close(self, report: Report) -> None:
        """Stop the services that `open` started, once backends have their last spans."""
        if self.own:
            up.take_down(self.deployment, report)

    def start(self, config: RunConfig, name: str | None = None) -> RunInfo:
        """Start a run and return at once. Raises TrackwayError: a run is active, or the name is taken."""
        return run(self._trainer.start(RunRequest(config=config.model_dump(mode="json"), run=name)))

    def submit(self, subject: Subject, show: Show, skip_damaged: bool = False) -> RunInfo:
        """Start the subject's run, or continue the unfinished run of its name.

        Raises TrackwayError as `start` and `resume` do.
        """
        name = subject.config.trainer.experiment_name
        known = next((info for info in run(self._trainer.runs()) if info.run == name), None)
        if known is None or not goes_on(known, subject):
            return self.start(subject.config)
        if known.state not in ENDED and (known.interrupted or known.state is not RunState.STOPPING):
            return known
        return self.resume(name, show, skip_damaged, subject.changes)

    def info(self, name: str) -> RunInfo:
        """The status of a run. Raises TrackwayError for an unknown one."""
        return run(self._trainer.run(name))

    def active(self) -> list[str]:
        """Names of the runs that have not ended."""
        return [info.run for info in run(self._trainer.runs()) if info.state not in ENDED]

    def metrics(self, name: str) -> list[MetricsRow]:
        """The metrics of a run's steps so far."""

        async def rows() -> list[MetricsRow]:
            return [row async for row in self._trainer.metrics(name)]

        return run(rows())

    def resume(
        self,
        name: str,
        show: Show = lambda info: None,
        skip_damaged: bool = False,
        changes: Mapping[str, JsonValue] | None = None,
    ) -> RunInfo:
        """Resume a run from its last checkpoint, or with `skip_damaged` from the last intact one.

        Does nothing for a run that is active, for example because it was resumed automatically. Waits for a run that is
        being stopped. If that run finishes instead, there is nothing to resume. `changes` are new values of CHANGEABLE
        keys. UserError for an active run.
        """

        async def resume() -> RunInfo:
            info = await self._trainer.run(name)
            was_stopping = info.state is RunState.STOPPING and not info.interrupted
            if was_stopping:
                info = await self._until_ended(name, show, STOP_DEADLINE_S)
            if info.state not in ENDED and changes:
                raise UserError(
                    f"{', '.join(changes)}: expected a run that has ended, got run {name}, which is {info.state}; stop "
                    "it first (Ctrl-C in its command), or resume it without new values"
                )
            if info.state not in ENDED or (was_stopping and info.state is RunState.FINISHED):
                return info
            try:
                return await self._trainer.resume(name, skip_damaged, changes)
            except TrackwayError as error:
                info = await self._trainer.run(name)
                if error.code is ErrorCode.CONFLICT and info.state not in ENDED and not changes:
                    return info
                raise

        return run(resume())

    def follow(self, name: str, show: Show) -> RunInfo:
        """Show a run until it ends. Ctrl-C makes the run save a checkpoint and stop, and is then raised again.

        Raises:
            UserError: the run failed, was interrupted and not resumed automatically, or became unreachable with its
                attached services.
        """
        try:
            info = run(self._until_ended(name, show, deadline_s=None))
        except KeyboardInterrupt:
            self.stop(name, show)
            raise
        except TrackwayError as error:
            if not (self.deployment.attached and _may_pass(error)):
                raise
            again = f"trackway train --resume {name}"
            raise UserError(f"{error.message}; the run may still be active; follow it with `{again}`") from error
        log = Path(info.folder) / "worker.log"
        if info.interrupted:
            raise UserError(
                f"run {name} was interrupted and was not resumed automatically ({info.message}); resume it with "
                f"`trackway train --resume {name}`; its log is {log}"
            )
        if info.state is RunState.UNREADABLE:
            raise UserError(f"run {name}: {info.message}: `trackway train --resume {name}`; its log is {log}")
        if info.state is RunState.FAILED:
            raise UserError(f"run {name} failed: {info.message}; its log is {log}")
        return info

    def stop(self, name: str, show: Show) -> RunInfo:
        """Ask a run to save a checkpoint and stop, and wait until it has."""

        async def stop() -> RunInfo:
            await self._trainer.stop(name)
            return await self._until_ended(name, show, STOP_DEADLINE_S)

        return run(stop())

    def deliver(self, info: RunInfo, show: Callable[[Unsent], None]) -> RunInfo:
        """Wait until backends have what a run recorded, or received nothing for STALLED_S. Return it as it is then.

        Everything that waits is on disk. The services send the spans, and the trainer service sends the rest of an
        ended run. Spans of attached services are not counted, since others use them too. Ctrl-C is raised again. A
        trainer that does not answer ends the wait.
        """
        fewest, since = -1, time.monotonic()
        while True:
            try:
                info = self.info(info.run)
            except TrackwayError:
                return info
            spans = 0
            if info.traces is not None and not self.deployment.attached:
                spans = spans_waiting(self.deployment)
                size = info.traces.spool_bytes if spans else 0
                counts = info.traces.model_copy(update={"spans_waiting": spans, "spool_bytes": size})
                info = info.model_copy(update={"traces": counts})
            unsent = replace(Unsent.of(info), spans=spans)
            show(unsent)
            if fewest < 0 or unsent.total < fewest:
                fewest, since = unsent.total, time.monotonic()
            if not unsent.total or time.monotonic() - since > STALLED_S:
                return info
            time.sleep(_POLL_S)

    async def _until_ended(self, name: str, show: Show, deadline_s: float | None) -> RunInfo:
        attached, started = self.deployment.attached, time.monotonic()
        lived = started
        while True:
            now = time.monotonic()
            patient = attached and deadline_s is None and now - lived < OUTAGE_DEADLINE_S
            info = await self._look(name, patient)
            if info is not None:
                show(info)
                if info.state in ENDED and not (info.interrupted and patient):
                    return info
                lived = lived if info.interrupted else now
            if deadline_s is not None and now - started > deadline_s:
                down = "" if attached else "; or stop it together with its services: `trackway down`"
                raise UserError(
                    f"run {name}: expected it to stop within {deadline_s:.0f} s, but it is still running; "
                    f"`trackway train --resume {name}` waits again, then resumes it{down}"
                )
            await asyncio.sleep(_POLL_S)

    async def _look(self, name: str, patient: bool) -> RunInfo | None:
        """Return the state of the run, or None when there was no answer and `patient` allows another attempt."""
        try:
            return await self._trainer.run(name)
        except TrackwayError as error:
            if patient and _may_pass(error):
                return None
            raise


def _may_pass(error: TrackwayError) -> bool:
    return error.retryable or error.code is ErrorCode.DEADLINE_EXCEEDED
