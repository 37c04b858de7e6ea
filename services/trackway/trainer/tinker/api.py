"""Tinker's API of a service: its routes, and what runs beside them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from trackway.clients import RolloutClient
from trackway.clients.weights import WeightStore
from trackway.trainer.settings import TrainerSettings
from trackway.trainer.tinker.routes import tinker_routes
from trackway.trainer.tinker.sampling import CALL_POLICY
from trackway.trainer.tinker.service import TinkerService
from trackway.trainer.tinker.sessions import SessionRuns, TinkerSessions


class TinkerApi:
    """The API over the runs of a service."""

    def __init__(self, settings: TrainerSettings, runs: SessionRuns) -> None:
        outputs = Path(settings.outputs_dir)
        self._sessions = TinkerSessions(
            outputs, runs, WeightStore(settings.weights_url), settings.tinker_max_sessions, settings.tinker_idle_s
        )
        rollout = RolloutClient(
            settings.url("rollout"), policy=CALL_POLICY, token=settings.token, direct=settings.direct
        )
        self._service = TinkerService(self._sessions, rollout)
        self.routes = tinker_routes(self._service)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Restore the sessions, and end idle ones and delete expired weights until the block ends."""
        await asyncio.to_thread(self._sessions.restore)
        idle = asyncio.create_task(self._sessions.end_idle())
        try:
            yield
        finally:
            idle.cancel()
            await asyncio.wait({idle})
            await self._service.draws.close()
