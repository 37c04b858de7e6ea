"""Replicas of the rollout service as a deployment hosts them, without Ray between them."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from trackway.clients import RolloutClient
from trackway.deploy import graph
from trackway.deploy.graph import Replica
from trackway.rollout.settings import RolloutSettings


class Group:
    """Replicas of one service, which ask one another as over Ray."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(graph, "to_replicas_of", lambda service: self._broadcast)
        self.replicas: list[Replica] = []
        self.https: list[httpx.AsyncClient] = []

    async def _broadcast(self, method: str, *args: object, within_s: float) -> list[object]:
        calls: list[Awaitable[object]] = [getattr(replica, method)(*args) for replica in self.replicas]
        async with asyncio.timeout(within_s):
            return pickle.loads(pickle.dumps(await asyncio.gather(*calls, return_exceptions=True)))

    @asynccontextmanager
    async def running(self, *settings: RolloutSettings) -> AsyncIterator[RolloutClient]:
        """A client of the first one."""
        async with AsyncExitStack() as stack:
            for replica_settings in settings:
                replica = Replica("rollout", replica_settings)
                await stack.enter_async_context(replica._app.router.lifespan_context(replica._app))
                transport = httpx.ASGITransport(replica._app)
                http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
                self.https.append(await stack.enter_async_context(http))
                self.replicas.append(replica)
            yield RolloutClient("http://localhost", self.https[0])

    async def names(self) -> list[str]:
        """Of the replicas, in order."""
        return [(await replica.describe()).health.replica for replica in self.replicas]
