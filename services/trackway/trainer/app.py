"""The trainer service: starts, reports, stops and resumes runs. Each run trains in a process of its own."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Depends, FastAPI
from fastapi.responses import StreamingResponse

from trackway.serving import ServiceRouter, needs_admin, service_app
from trackway.trainer.delivery import Leftovers
from trackway.trainer.settings import TrainerSettings
from trackway.trainer.supervisor.checkpoint_policies import CheckpointPolicies
from trackway.trainer.supervisor.gauges import RunGauges
from trackway.trainer.supervisor.manager import RunManager, resume_periodically
from trackway.trainer.supervisor.registry import SessionIntake
from trackway.trainer.tinker.routes import TinkerApi
from trackway.wire.base import RunNameInPath
from trackway.wire.rollout import PolicyInfo
from trackway.wire.sessions import FinishedSession, SessionRun, WaitingSessions
from trackway.wire.trainer import PolicyRequest, ResumeRequest, RunInfo, RunList, RunRequest

logger = logging.getLogger("trackway.trainer")

LEFTOVERS_S = 5.0
"""Interval between checks for ended runs with unsent data."""


def create_app(settings: TrainerSettings | None = None) -> FastAPI:
    """The service's app. Shutting it down interrupts its runs."""
    settings = settings or TrainerSettings()
    outputs = Path(settings.outputs_dir)
    runs = RunManager(
        outputs,
        settings.service_urls(),
        settings.stop_deadline_s,
        settings.tracing,
        settings.token,
        max_runs=settings.max_runs,
    )

    tinker = TinkerApi(settings, runs)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if settings.standby:
            await runs.stand_by()
        leftovers = Leftovers(outputs, settings.tracing)
        tasks = {
            asyncio.create_task(_send_leftovers(runs, leftovers)),
            asyncio.create_task(
                resume_periodically(runs, settings.token, sessions_only=not settings.resume_interrupted)
            ),
        }
        try:
            async with tinker.running():
                yield
        finally:
            leftovers.stop()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await runs.close()

    def shown() -> list[RunInfo]:
        return [*map(runs.registry.tracked, runs.registry.active_or_newest())]

    gauges = RunGauges(shown)
    return service_app(
        "trainer",
        settings,
        routers=[
            tinker.routes,  # first, as the most frequent
            _routes(runs),
            _sessions(SessionIntake(runs.registry)),
            _policies(CheckpointPolicies(runs.registry, settings.weights_url)),
        ],
        lifespan=lifespan,
        collectors=[gauges],
    )


async def _send_leftovers(runs: RunManager, leftovers: Leftovers) -> None:
    """Check periodically: a run may end, or a backend recover, at any time."""
    while True:
        try:
            leftovers.offer(runs.registry.list())
        except Exception:
            logger.exception("the check for unsent data of ended runs failed; next check in %s s", LEFTOVERS_S)
        await asyncio.sleep(LEFTOVERS_S)


def _routes(runs: RunManager) -> ServiceRouter:
    router = ServiceRouter(tags=["runs"])
    operator = [Depends(needs_admin)]

    @router.post("/runs", status_code=202, dependencies=operator)
    async def start(request: RunRequest) -> RunInfo:
        """Start a run. Its process may still be starting when this answers.

        Rows that name an agent loop, tool or data source that no service has fail the run, not this request: finding
        them takes reading and filtering all rows, whose number has no bound.
        """
        return await runs.start(request)

    @router.get("/runs")
    async def list_runs() -> RunList:
        """Every run."""
        return RunList(runs=[runs.registry.tracked(info) for info in runs.registry.list()])

    @router.get("/runs/{run}")
    async def one_run(run: RunNameInPath) -> RunInfo:
        """The status of a run."""
        return runs.registry.tracked(runs.registry.info(run))

    @router.get(
        "/runs/{run}/metrics",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/x-ndjson": {}}}},
    )
    async def metrics(run: RunNameInPath, follow: bool = False) -> StreamingResponse:
        """One MetricsRow per line. With `follow`, until the run has ended."""
        runs.registry.info(run)  # raises 404 for an unknown run, before the response's status has been sent

        async def lines() -> AsyncIterator[str]:
            async for row in runs.registry.rows(run, follow):
                yield row.model_dump_json() + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.post("/runs/{run}/stop", status_code=202, dependencies=operator)
    async def stop(run: RunNameInPath) -> RunInfo:
        """Ask a run to save a checkpoint and end."""
        return await runs.stop(run)

    @router.post("/runs/{run}/resume", status_code=202, dependencies=operator)
    async def resume(run: RunNameInPath, skip_damaged: bool = False, request: ResumeRequest | None = None) -> RunInfo:
        """Resume a run from its last checkpoint; with `skip_damaged` from the last intact one."""
        changes = request.changes if request else {}
        return await runs.resume(run, skip_damaged=skip_damaged, changes=changes)

    return router


def _policies(policies: CheckpointPolicies) -> ServiceRouter:
    router = ServiceRouter(prefix="/policies", tags=["policies"], dependencies=[Depends(needs_admin)])

    @router.post("")
    async def load(request: PolicyRequest) -> PolicyInfo:
        """Publish a checkpoint for the rollout service, which then serves it by its name. Returns when it is there."""
        return await policies.load(request.name)

    @router.post("/drop")
    async def drop(request: PolicyRequest) -> PolicyInfo:
        """Remove a policy's weights. Requests that name it are then answered 404."""
        return await policies.drop(request.name)

    return router


def _sessions(intake: SessionIntake) -> ServiceRouter:
    router = ServiceRouter(tags=["sessions"])

    @router.get("/sessions/run")
    async def session_run(run: RunNameInPath | None = None) -> SessionRun:
        """Settings that a run fixes for each session that it trains on. Without a name, the only one in progress."""
        return await asyncio.to_thread(intake.run, run)

    @router.post("/runs/{run}/sessions", status_code=202)
    async def train_session(run: RunNameInPath, session: FinishedSession) -> WaitingSessions:
        """Hand a finished session to a run. The agent service does this. It is on the run's disk when this answers."""
        return await asyncio.to_thread(intake.take, run, session)

    return router
