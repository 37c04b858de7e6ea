"""With tokens: who has none learns nothing; agents and operators get what is theirs; nobody's token shows anywhere."""

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import Receive, Scope, Send

from tests.services.serving.service_with_tokens import (
    AGENT,
    NEEDS_TOKEN,
    OPERATOR,
    TOKENS,
    app_with,
    bearer,
    client_from,
)
from trackway.serving import from_inside
from trackway.serving.auth import AuthScope, Caller
from trackway.tracing import Tracing, TracingSettings
from trackway.tracing.span_handle import activated

pytestmark = pytest.mark.anyio

PATHS = ["/work", "/pause", "/nowhere", "/", "/docs", "/openapi.json", "/metrics", "/replicas", "/health", "/ready"]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "INVENTED"]
REFUSED_HEADERS = [
    (b"content-length", str(len(NEEDS_TOKEN)).encode()),
    (b"content-type", b"application/json"),
    (b"www-authenticate", b"Bearer"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", METHODS)
async def test_without_a_token_every_path_and_method_has_the_same_answer(method: str, path: str) -> None:
    async with client_from("10.1.2.3", app_with({"tokens": TOKENS})) as client:
        answer = await client.request(method, path, headers={"idempotency-key": "k" * 999, "x-request-timeout": "?"})
    assert (answer.status_code, answer.content) == (401, b"" if method == "HEAD" else NEEDS_TOKEN)
    assert sorted(answer.headers.raw) == REFUSED_HEADERS


@pytest.mark.parametrize(
    "authorization",
    [
        [f"Bearer {AGENT}x"],
        [f"Bearer {AGENT[:-1]}"],
        ["Bearer"],
        ["Bearer "],
        [f"Basic {AGENT}"],
        [AGENT],
        ["Bearer \xe9\xff"],
        [f"Bearer {AGENT}", f"Bearer {AGENT}"],
    ],
)
@pytest.mark.parametrize("address", ["10.1.2.3", "127.0.0.1"])
async def test_no_other_word_opens(authorization: list[str], address: str) -> None:
    headers = [(b"authorization", value.encode("latin-1")) for value in authorization]
    async with client_from(address, app_with({"tokens": TOKENS})) as client:
        answer = await client.post("/work", headers=headers)
    assert (answer.status_code, answer.content) == (401, NEEDS_TOKEN)
    assert sorted(answer.headers.raw) == REFUSED_HEADERS


async def test_a_token_may_come_as_an_api_key_of_anthropic_or_tinker_but_not_twice() -> None:
    async with client_from("10.1.2.3", app_with({"tokens": TOKENS})) as client:
        for headers, status in (
            ({"x-api-key": AGENT}, 200),
            ({"x-api-key": f"tml-{AGENT}"}, 200),
            ({"x-api-key": f"tml-tml-{AGENT}"}, 401),
            ({"x-api-key": f"{AGENT}x"}, 401),
            ({"x-api-key": f"Bearer {AGENT}"}, 401),
            ({"x-api-key": AGENT, **bearer(AGENT)}, 401),
        ):
            assert (await client.post("/work", headers=headers)).status_code == status


async def test_a_body_is_refused_unread() -> None:
    async def body():
        raise AssertionError("read")
        yield b""

    async with client_from("10.1.2.3", app_with({"tokens": TOKENS})) as client:
        assert (await client.post("/work", content=body())).status_code == 401
        assert (await client.post("/work", content=b"x" * 5000)).content == NEEDS_TOKEN


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer wrong")]])
async def test_a_websocket_is_closed_before_it_opens(headers: list[tuple[bytes, bytes]]) -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/work", "headers": headers, "client": ("127.0.0.1", 1)}
    await app_with({"tokens": TOKENS})(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008, "reason": ""}]


@pytest.mark.parametrize(
    ("token", "path", "status"),
    [(AGENT, "/work", 200), (AGENT, "/pause", 403), (OPERATOR, "/work", 200), (OPERATOR, "/pause", 200)],
)
async def test_a_scope_opens_its_routes_and_admin_all(token: str, path: str, status: int) -> None:
    async with client_from("10.1.2.3", app_with({"tokens": TOKENS})) as client:
        answer = await client.post(path, headers={"authorization": f"bearer  {token}"})
    assert (answer.status_code, answer.headers["x-trackway-replica"]) == (status, "abcd")
    if status == 403:
        assert answer.json()["error"] == {
            "code": "forbidden",
            "message": "expected a token with the scope 'admin', got 'agents' with 'execute'; use an operator's token",
            "retryable": False,
            "detail": {},
        }


async def test_probes_of_this_machine_need_no_token_and_get_no_further() -> None:
    async with client_from("127.0.0.1", app_with({"tokens": TOKENS})) as client:
        found = {path: (await client.get(path)).status_code for path in PATHS}
        posted = await client.post("/health")
        forwarded = await client.get("/health", headers={"x-forwarded-for": "127.0.0.1"})
    assert {path for path, status in found.items() if status == 200} == {"/health", "/ready"}
    assert {*found.values(), posted.status_code, forwarded.status_code} == {200, 401}


async def test_probes_are_found_under_a_prefix_as_ray_serve_has_it() -> None:
    app = app_with({"tokens": TOKENS})
    transport = httpx.ASGITransport(app=app, root_path="/tools")
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        assert [(await client.get(path)).status_code for path in ("/tools/health", "/tools/health/x")] == [200, 401]


async def test_only_this_process_can_call_from_inside() -> None:
    app = app_with({"tokens": TOKENS})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(from_inside(app)), base_url="http://replica") as client:
        assert (await client.post("/pause")).json() == "paused"

    async def alike(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "trackway.caller": Caller("process", frozenset(AuthScope))}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(alike), base_url="http://replica") as client:
        assert (await client.post("/pause", headers={"trackway.caller": "process"})).status_code == 401


async def test_a_kept_answer_is_given_to_its_own_caller_only() -> None:
    async with client_from("10.1.2.3", app_with({"tokens": TOKENS})) as client:
        key = {"idempotency-key": "once"}
        first = await client.post("/pause", headers={**key, **bearer(OPERATOR)})
        other_reply = await client.post("/pause", headers={**key, **bearer(AGENT)})
        again = await client.post("/pause", headers={**key, **bearer(OPERATOR)})
    assert [first.status_code, other_reply.status_code, again.status_code] == [200, 403, 200]


async def test_the_documentation_says_that_tokens_are_wanted_exactly_when_they_are() -> None:
    async with client_from("127.0.0.1", app_with({"tokens": TOKENS})) as client:
        document = (await client.get("/openapi.json", headers=bearer(AGENT))).json()
    async with client_from("127.0.0.1", app_with({})) as client:
        open_document = (await client.get("/openapi.json")).json()
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"token": []}]
    assert "security" not in open_document and "securitySchemes" not in open_document["components"]


async def test_refusals_are_counted_without_what_the_caller_chose() -> None:
    app = app_with({"tokens": TOKENS})
    async with client_from("10.1.2.3", app) as client:
        for number in range(3):
            await client.request(f"INVENTED{number}", f"/{number}")
        text = (await client.get("/metrics", headers=bearer(AGENT))).text
    [line] = [line for line in text.splitlines() if line.startswith("trackway_requests_total{")]
    assert all(label in line for label in ('method="other"', 'route="unmatched"', 'status="401"'))
    assert line.endswith(" 3.0")


async def test_no_token_is_in_an_answer_a_log_or_a_span(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    exporter = InMemorySpanExporter()
    tracing = Tracing("tools", TracingSettings(schedule_delay_s=0.01), exporter)
    app = app_with({"tokens": TOKENS}, tracing)
    recorded = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    async with client_from("10.1.2.3", app) as client:
        with activated(tracing):
            answers = [
                await client.request(method, path, headers={**bearer(token), **recorded})
                for token in (AGENT, OPERATOR, "unknown-0123456789abcdef")
                for method, path in [*(("GET", path) for path in PATHS), ("POST", "/work"), ("POST", "/pause")]
            ]
    await asyncio.to_thread(tracing.flush, 5)
    spans = "".join(span.to_json() for span in exporter.get_finished_spans())
    said = "".join([caplog.text, spans, *(f"{answer.text}{answer.headers}" for answer in answers)])
    assert "tokens: agents (execute), ops (" in caplog.text
    assert [word for word in (AGENT, OPERATOR, "unknown-0123456789abcdef") if word in said] == []
