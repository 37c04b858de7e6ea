"""Clients that open MCP sessions and never end them."""

import asyncio

import httpx
import pytest
from pydantic import SecretStr

from trackway.serving import AuthSettings
from trackway.serving.auth import Token
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


async def opened(client: httpx.AsyncClient, token: str | None = None) -> httpx.Response:
    own = {} if token is None else {"authorization": f"Bearer {token}-0123456789abcdef"}
    return await client.post("/mcp", json=INITIALIZE, headers={**ACCEPTS, **own})


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
    assert answers[3].json()["error"]["message"].startswith("expected fewer than 3 open sessions on this replica")
    assert (len(works.json()["result"]["tools"]), again.status_code) == (2, 200)


async def test_an_idle_session_expires_and_makes_room(running) -> None:
    async with running(create_app(ToolsSettings(mcp_max_sessions=1, mcp_session_idle_s=0.2))) as client:
        first = await opened(client)
        async with asyncio.timeout(30):
            while (second := await opened(client)).status_code == 429:
                await asyncio.sleep(0.05)
        gone = await listed(client, first.headers["mcp-session-id"])

    assert (second.status_code, gone.status_code) == (200, 404)


async def test_a_caller_with_1024_sessions_shuts_no_other_caller_out(running) -> None:
    auth = AuthSettings(tokens={name: Token(secret=SecretStr(f"{name}-0123456789abcdef")) for name in ("one", "other")})
    async with running(create_app(ToolsSettings(auth=auth))) as client:
        flood = [await opened(client, "one") for _ in range(1024)]
        other = await opened(client, "other")

    statuses = [answer.status_code for answer in flood]
    assert (statuses[:512], statuses[512:]) == ([200] * 512, [429] * 512)
    assert "of 'one' on this replica (mcp_max_sessions_per_token)" in flood[-1].json()["error"]["message"]
    assert other.status_code == 200


async def test_the_session_idle_for_longest_makes_room(running) -> None:
    async with running(create_app(ToolsSettings(mcp_max_sessions=2, mcp_session_room_s=0))) as client:
        sessions = [(await opened(client)).headers["mcp-session-id"] for _ in range(2)]
        await listed(client, sessions[0])
        sessions.append((await opened(client)).headers["mcp-session-id"])
        answers = [await listed(client, session) for session in sessions]

    assert [answer.status_code for answer in answers] == [200, 404, 200]


async def test_the_tools_state_of_a_session_that_made_room_is_released(running) -> None:
    app = create_app(ToolsSettings(tools=["calc_gsm8k_reward"], mcp_max_sessions=1, mcp_session_room_s=0))
    meta = {"trackway/create_kwargs": {"ground_truth": "1"}}
    params = {"name": "calc_gsm8k_reward", "arguments": {"answer": "1"}, "_meta": meta}
    call = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params}
    async with running(app) as client:
        session = (await opened(client)).headers["mcp-session-id"]
        await client.post("/mcp", json=call, headers={**ACCEPTS, "mcp-session-id": session})
        before = len(app.state.instances)
        await opened(client)

        assert (before, len(app.state.instances)) == (1, 0)
