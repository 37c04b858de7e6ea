"""Clients that open MCP sessions and never end them."""

import asyncio

import httpx
import pytest

from trackway.tools.app import create_app
from trackway.tools.settings import ToolsSettings

pytestmark = pytest.mark.anyio

ACCEPTS = {"accept": "application/json, text/event-stream"}
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "flood", "version": "1"},
    },
}
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}


async def opened(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/mcp", json=INITIALIZE, headers=ACCEPTS)


async def listed(client: httpx.AsyncClient, session: str) -> httpx.Response:
    return await client.post("/mcp", json=LIST, headers={**ACCEPTS, "mcp-session-id": session})


async def test_sessions_beyond_their_number_are_answered_429_and_the_others_work(running) -> None:
    async with running(create_app(ToolsSettings(mcp_max_sessions=3))) as client:
        answers = [await opened(client) for _ in range(5)]
        session = answers[0].headers["mcp-session-id"]
        works = await listed(client, session)
        await client.delete("/mcp", headers={"mcp-session-id": session})
        again = await opened(client)

    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert answers[3].headers["retry-after"] == "1"
    assert answers[3].json()["error"]["code"] == "overloaded"
    assert answers[3].json()["error"]["message"].startswith("expected fewer than 3 MCP sessions on this replica; ")
    assert (len(works.json()["result"]["tools"]), again.status_code) == (2, 200)


async def test_an_idle_session_expires_and_makes_room(running) -> None:
    async with running(create_app(ToolsSettings(mcp_max_sessions=1, mcp_session_idle_s=0.2))) as client:
        first = await opened(client)
        async with asyncio.timeout(30):
            while (second := await opened(client)).status_code == 429:
                await asyncio.sleep(0.05)
        gone = await listed(client, first.headers["mcp-session-id"])

    assert (second.status_code, gone.status_code) == (200, 404)
