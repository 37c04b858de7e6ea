"""The trainer service: start a run, watch it, stop it, resume it; the training itself is in the run's own process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse

from trackway.serving import needs_admin, service_app
from trackway.trainer.interruptions import resume_for_ever
from trackway.trainer.known_runs import RUN_NAME
from trackway.trainer.run_gauges import RunGauges
from trackway.trainer.runs import Runs
from trackway.trainer.settings import TrainerSettings
from trackway.wire.trainer import RunInfo, RunList, RunRequest


def create_app(settings: TrainerSettings | None = None) -> FastAPI:
    """The service's app; its runs end when it does."""
    settings = settings or TrainerSettings()
    runs = Runs(
        Path(settings.outputs_dir),
        settings.service_urls(),
        settings.stop_deadline_s,
        settings.tracing,
        settings.token,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        resuming = asyncio.create_task(resume_for_ever(runs, settings.token)) if settings.resume_interrupted else None
        try:
            yield
        finally:
            if resuming is not None:
                resuming.cancel()
                await asyncio.wait({resuming})
            await runs.close()

    gauges = RunGauges(runs.newest)
    return service_app("trainer", settings, routers=[_routes(runs)], lifespan=lifespan, collectors=[gauges])


RunName = Annotated[str, InPath(pattern=f"^{RUN_NAME.pattern}$")]


def _routes(runs: Runs) -> APIRouter:
    router = APIRouter(tags=["runs"])
    operator = [Depends(needs_admin)]

    @router.post("/runs", status_code=202, dependencies=operator)
    async def start(request: RunRequest) -> RunInfo:
        """Start a run; its process is being started when this answers."""
        return await runs.start(request)

    @router.get("/runs")
    async def list_runs() -> RunList:
        """Every run."""
        return RunList(runs=runs.list())

    @router.get("/runs/{run}")
    async def one_run(run: RunName) -> RunInfo:
        """Where a run stands."""
        return runs.info(run)

    @router.get("/runs/{run}/metrics")
    async def metrics(run: RunName, follow: bool = False) -> StreamingResponse:
        """One MetricsRow per line; with `follow`, until the run has ended."""
        runs.info(run)  # an unknown run is a 404, which a stream that has begun could not say any more

        async def lines() -> AsyncIterator[str]:
            async for row in runs.rows(run, follow):
                yield row.model_dump_json() + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.post("/runs/{run}/stop", status_code=202, dependencies=operator)
    async def stop(run: RunName) -> RunInfo:
        """Ask a run to save a checkpoint and end."""
        return await runs.stop(run)

    @router.post("/runs/{run}/resume", status_code=202, dependencies=operator)
    async def resume(run: RunName) -> RunInfo:
        """Go on from a run's last checkpoint."""
        return await runs.resume(run)

    return router
