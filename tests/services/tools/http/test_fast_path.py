"""The fast lane of the execute routes answers as FastAPI does, and is left when a request is not ordinary."""

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from trackway.serving.limits import JsonSize, RequestBounds
from trackway.tools.app import create_app
from trackway.tools.routes import FastPathMiddleware, FastPathRoute
from trackway.tools.settings import ToolsSettings
from trackway.wire.tools import OneShotRequest, ToolResult

pytestmark = pytest.mark.anyio

FAST, ORDINARY = "application/json", "application/json; charset=utf-8"
LOST = "0123456789ab-01234567-" + "0" * 32


@pytest.fixture
def client() -> httpx.AsyncClient:
    app = create_app(ToolsSettings(tools=["calculator"], extra_tools=["tests.services.tools.faulty_tool:FaultyTool"]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


async def answer(client: httpx.AsyncClient, path: str, body: str, kind: str, **headers: str) -> tuple[int, str, str]:
    got = await client.post(path, content=body.encode(), headers={"content-type": kind, **headers})
    return got.status_code, got.text, got.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tools/calculator/execute", '{"arguments": {"expression": "12-5"}}', 200),
        (
            "/tools/calculator/execute",
            '{"arguments": {"expression": "12-5"}, "tool_call_id": "c", "create_kwargs": {}}',
            200,
        ),
        ("/tools/calculator/execute", '{"arguments": {"expression": "12-"}}', 422),
        ("/tools/calculator/execute", '{"arguments": {"expression": 7}}', 422),
        ("/tools/calculator/execute", '{"arguments": {"expression": "\\ud800"}}', 422),
        ("/tools/calculator/execute", '{"arguments": 7}', 422),
        ("/tools/calculator/execute", '{"arguments": {}, "more": 1}', 422),
        ("/tools/calculator/execute", "{", 422),
        ("/tools/calculator/execute", "", 422),
        ("/tools/nothing/execute", '{"arguments": {}}', 404),
        ("/tools/not%20a%20name/execute", '{"arguments": {}}', 422),
        (f"/instances/{LOST}/execute", '{"arguments": {}}', 410),
        ("/instances/x/execute", '{"arguments": {}}', 404),
        ("/instances/x/y/execute", '{"arguments": {}}', 404),
        ("/tools/faulty/execute", '{"arguments": {"mode": "raise"}}', 500),
    ],
)
async def test_both_ways_give_the_same_answer(client: httpx.AsyncClient, path: str, body: str, status: int) -> None:
    fast = await answer(client, path, body, FAST)
    assert fast == await answer(client, path, body, ORDINARY)
    assert (fast[0], fast[2]) == (status, "application/json")


async def test_its_calls_are_counted_under_the_documented_route(client: httpx.AsyncClient) -> None:
    for kind in (FAST, ORDINARY, FAST):
        await answer(client, "/tools/calculator/execute", '{"arguments": {"expression": "1"}}', kind)
    text = (await client.get("/metrics")).text
    assert 'trackway_requests_total{method="POST",route="/tools/{name}/execute",status="200"} 3.0' in sorted_labels(
        text
    )


def sorted_labels(text: str) -> str:
    """Prometheus' lines with their labels in alphabetical order."""
    lines = []
    for line in text.splitlines():
        name, opened, rest = line.partition("{")
        labels, closed, value = rest.rpartition("}")
        ordered = ",".join(sorted(labels.split(","))) if opened else ""
        lines.append(f"{name}{opened}{ordered}{closed}{value}" if opened and not name.startswith("#") else line)
    return "\n".join(lines)


async def test_a_repeated_key_runs_once_there_too(client: httpx.AsyncClient) -> None:
    made = await client.post("/instances", json={"tool": "faulty"})
    path, body = f"/instances/{made.json()['instance_id']}/execute", '{"arguments": {"mode": "ok"}}'
    first = await answer(client, path, body, FAST, **{"idempotency-key": "k"})
    assert await answer(client, path, body, FAST, **{"idempotency-key": "k"}) == first
    assert await answer(client, path, body, FAST, **{"idempotency-key": "l"}) != first


async def test_an_ordinary_call_does_not_reach_fastapi_and_any_other_does() -> None:
    reached: list[str] = []

    async def fastapi(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append((await receive())["body"].decode())
        await PlainTextResponse("there")(scope, receive, send)

    async def echo(name: str, request: OneShotRequest) -> ToolResult:
        return ToolResult(text=f"{name} {request.arguments}")

    lane = FastPathMiddleware(fastapi, [FastPathRoute("/tools/{name}/execute", OneShotRequest, echo)])
    whole = RequestBounds(lane, max_bytes=1024, max_json=JsonSize(1024, 1024))  # hands bodies on in one piece
    client = httpx.AsyncClient(transport=httpx.ASGITransport(whole), base_url="http://127.0.0.1")
    fits, path = '{"arguments": {"a": 1}}', "/tools/x/execute"
    assert (await answer(client, path, fits, FAST))[1] == ToolResult(text="x {'a': 1}").model_dump_json()
    assert reached == []
    for route, body, kind in [(path, fits, ORDINARY), (path, "", FAST), ("/tools/x", fits, FAST)]:
        assert (await answer(client, route, body, kind))[1] == "there"
    assert reached == [fits, "", fits]
