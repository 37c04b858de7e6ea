"""Replicas' own ports when the service has tokens: a pass opens them, and the token never goes there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from trackway.clients import CallPolicy, ToolsClient, close_shared_http
from trackway.deploy.serve.direct_port import DirectPort
from trackway.serving.auth import digest_of
from trackway.tools.app import create_app
from trackway.tools.settings import ToolsSettings
from trackway.wire.service import Health, Ready, ReplicaInfo, ReplicaList
from trackway.wire.tools import OneShotRequest

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.usefixtures("collector")]

TOKEN = "agent-0123456789abcdef"
SUM = OneShotRequest(arguments={"expression": "1+1"})


class Service:
    """One replica with a port of its own, behind a proxy that lists it."""

    def __init__(self) -> None:
        auth = {"tokens": {"agents": {"secret": TOKEN}}}
        self.app = create_app(ToolsSettings.model_validate({"tools": ["calculator"], "auth": auth, "replica": "aaaa"}))
        self.direct = DirectPort(self.app, "127.0.0.1", int, 0.0)
        self.by_proxy = 0
        self.url = ""
        proxy = self.proxy = FastAPI()
        proxy.add_api_route("/replicas", self._listed)
        proxy.mount("/", self._forward)
        self.front = DirectPort(proxy, "127.0.0.1", int, 0.0)

    async def _listed(self) -> ReplicaList:
        health = Health(service="tools", replica="aaaa", pid=1, python="3", executable="python")
        listed = ReplicaInfo(health=health, ready=Ready(ready=True), url=self.url)
        return ReplicaList(
            replicas=[listed], passes={"aaaa": self.app.state.tokens.pass_for(digest_of(TOKEN.encode()))}
        )

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.by_proxy += 1
        await self.app(scope, receive, send)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ToolsClient]:
        """The replica and the proxy; a client of both."""
        policy = CallPolicy(backoff_s=0.01, max_backoff_s=0.02)
        async with self.proxy.router.lifespan_context(self.proxy), self.replica():
            yield ToolsClient(self.front.url, policy=policy, token=SecretStr(TOKEN), direct=True)
            await close_shared_http()

    @asynccontextmanager
    async def replica(self) -> AsyncIterator[None]:
        async with self.app.router.lifespan_context(self.app):
            self.url = self.direct.url
            yield


@asynccontextmanager
async def somebody_else(port: int = 0) -> AsyncIterator[tuple[str, list[str]]]:
    """Who listens there now: the URL, and all that was sent to it."""
    heard: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


async def test_a_caller_with_a_token_goes_past_the_proxy_and_one_without_learns_nothing() -> None:
    service = Service()
    async with service.running() as client, httpx.AsyncClient(trust_env=False) as http:
        assert (await client.one_shot("calculator", SUM)).text == "2"
        refused = [await http.get(service.direct.url + path) for path in ("/tools", "/replicas", "/nothing", "/docs")]
        assert (service.by_proxy, len({reply.content for reply in refused})) == (0, 1)
        assert [(reply.status_code, "x-trackway-replica" in reply.headers) for reply in refused] == [(401, False)] * 4


async def test_whoever_has_a_replicas_address_hears_no_token_and_is_not_believed() -> None:
    service = Service()
    async with service.running() as client, somebody_else() as (url, heard):
        service.url = url
        assert (await client.one_shot("calculator", SUM)).text == "2"
    assert (service.by_proxy, len(heard) >= 1) == (1, True)
    assert [said for said in heard if TOKEN in said] == []


async def test_whoever_takes_a_replicas_port_over_hears_a_pass_that_opens_nothing_else() -> None:
    ours, another = Service(), Service()
    async with another.running(), ours.proxy.router.lifespan_context(ours.proxy), httpx.AsyncClient() as http:
        client = ToolsClient(ours.front.url, token=SecretStr(TOKEN), direct=True)
        async with ours.replica():
            await client.one_shot("calculator", SUM)
        await close_shared_http()
        async with somebody_else(int(ours.url.rpartition(":")[2])) as (_, heard):
            assert (await client.one_shot("calculator", SUM)).text == "2"
            assert client._routes is not None and client._routes._refreshing is not None
            await client._routes._refreshing  # it would connect while the server closes
        [sent] = {line for said in heard for line in said.splitlines() if line.lower().startswith("authorization")}
        stolen = {"authorization": sent.partition(": ")[2]}
        assert (TOKEN in sent, ours.by_proxy) == (False, 1)
        assert (await http.get(f"{another.direct.url}/tools", headers=stolen)).status_code == 401
        await close_shared_http()
