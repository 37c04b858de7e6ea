"""What a request may be: the bytes and JSON values of its body, and the headers that services read."""

import json
import random
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from trackway.serving import ServiceRouter, ServiceSettings, limits, service_app
from trackway.serving.limits import JsonSize, json_exceeds

pytestmark = pytest.mark.anyio

STRINGS = ["", "[", "{[", "]}", '"', '\\"', "\\", "\\\\", '[\\"{', "é", '"]["', "a\\", "a", ",", ':,"', "\\,"]


def app_of(**settings: object) -> FastAPI:
    router = ServiceRouter()

    @router.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    @router.post("/value")
    async def value(request: dict[str, Any]) -> int:
        return len(request)

    return service_app("tools", ServiceSettings.model_validate(settings), routers=[router])


def size_of(value: object) -> JsonSize:
    """What a parser finds: the commas, and the lists, objects and members."""
    if not isinstance(value, dict | list):
        return JsonSize(0, 0)
    parts = [size_of(part) for part in (value.values() if isinstance(value, dict) else value)]
    members = len(value) if isinstance(value, dict) else 0
    items = max(0, len(value) - 1) + sum(part.items for part in parts)
    return JsonSize(items, 1 + members + sum(part.nodes for part in parts))


def made_up(dice: random.Random, levels: int) -> object:
    """A value of any JSON kind, with strings that look like structure."""
    kind = dice.randrange(4) if levels else 3
    count = dice.randrange(4)
    if kind == 0:
        return {dice.choice(STRINGS): made_up(dice, levels - 1) for _ in range(count)}
    if kind < 3:
        return [made_up(dice, levels - 1) for _ in range(count)]
    return dice.choice([*STRINGS, 1, None])


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 18])
def test_json_is_counted_as_a_parser_finds_it(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(limits, "_CHUNK", chunk)
    dice = random.Random(0)
    values = [made_up(dice, 5) for _ in range(300)]
    sizes = [size_of(value) for value in values]
    assert max(sizes).items > 20
    for value, (items, nodes) in zip(values, sizes, strict=True):
        for text in (json.dumps(value).encode(), json.dumps(value, indent=1, ensure_ascii=False).encode()):
            assert not json_exceeds(JsonSize(items, nodes), text), text
            assert not items or json_exceeds(JsonSize(items - 1, nodes), text), text
            assert not nodes or json_exceeds(JsonSize(items, nodes - 1), text), text


@pytest.mark.parametrize("keyed", [False, True])
async def test_more_json_than_the_limits_is_refused_before_it_is_parsed(running, keyed: bool) -> None:
    least = {"max_json_items": 1024, "max_json_nodes": 1024}
    text = json.dumps(',"[{:' * 500).encode()
    fitting = [b"[" + b",".join([b"1"] * 1025) + b"]", b"[" * 1024, b"[" + b",".join([text] * 1025) + b"]", text]
    refused = [b"[" + b",".join([b"1"] * 1026) + b"]", b"[" * 1025, b'{"a":1' * 513, text + b"," * 1025]
    async with running(app_of(**least)) as client:
        keys = iter(range(8))
        answers = [
            await client.post("/size", content=body, headers={"idempotency-key": f"k{next(keys)}"} if keyed else {})
            for body in (*fitting, *refused)
        ]
    assert [answer.json() for answer in answers[:4]] == [len(body) for body in fitting]
    message = (
        "expected JSON of at most 1024 items, and 1024 lists, objects and object members, got more; send less at once"
    )
    assert [error_of(answer) for answer in answers[4:]] == [(413, "payload_too_large", message)] * 4


async def test_json_nests_as_deep_as_the_parser_goes(running) -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * levels + b"1" + b"}" * levels

    async with running(app_of()) as client:
        client.headers["content-type"] = "application/json"
        fits = await client.post("/value", content=nested(190))
        deep = [await client.post("/value", content=body) for body in (nested(210), b"[" * 90_000)]
    assert fits.json() == 1
    for answer in deep:
        status, code, message = error_of(answer)
        assert (status, code) == (422, "invalid_request")
        assert "recursion limit exceeded" in message


async def test_an_encoding_in_which_values_could_hide_is_refused(running) -> None:
    async with running(app_of()) as client:
        client.headers["content-type"] = "application/json"
        answer = await client.post("/value", content='{"\u2200": 1}'.encode("utf-16"))
    assert error_of(answer)[:2] == (422, "invalid_request")


@pytest.mark.parametrize("method", ["POST", "PUT", "GET"])
async def test_the_size_limit_is_exact_and_for_every_method(running, method: str) -> None:
    async def chunks(size: int):
        yield b"x" * 1000
        yield b"x" * (size - 1000)

    async with running(app_of(max_body_bytes=1024)) as client:
        too_large = [
            (await client.request(method, "/size", content=content)).status_code
            for content in (b"x" * 1025, chunks(1025))
        ]
        fitting = [(await client.post("/size", content=content)).json() for content in (b"x" * 1024, chunks(1024), b"")]
    assert (too_large, fitting) == ([413, 413], [1024, 1024, 0])


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("x-session-id", "s" * 257, "1 to 256 printable ASCII characters"),
        ("x-session-id", "caf\xe9", "1 to 256 printable ASCII characters"),
        ("idempotency-key", "k" * 257, "1 to 256 printable ASCII characters"),
        ("idempotency-key", "a\tb", "1 to 256 printable ASCII characters"),
        *(
            ("x-request-timeout", value, "seconds, e.g. 59.5")
            for value in ("nan", "inf", "-1", "1e9", "soon", "1" * 13, "1.5 ", "")
        ),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_header_that_is_read_has_its_form(running, header: str, value: str, expected: str, method: str) -> None:
    async with running(app_of()) as client:
        answer = await client.request(method, "/health", headers=[(header.encode(), value.encode("latin-1"))])
    assert error_of(answer) == (
        422,
        "invalid_request",
        f"{header}: expected {expected}, got {value.encode('latin-1')[:64]!r} ({len(value)} bytes)",
    )


async def test_headers_of_the_usual_form_pass(running) -> None:
    headers = {
        "x-session-id": "run/1/2/3 v~",
        "idempotency-key": "k" * 256,
        "x-request-timeout": "86400.123456789",
    }
    async with running(app_of()) as client:
        assert (await client.post("/value", json={}, headers=headers)).json() == 0


@pytest.mark.parametrize("key", [{}, {"idempotency-key": "k"}])
async def test_a_body_whose_connection_breaks_is_an_incomplete_request(key: dict[str, str]) -> None:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"half", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(name.encode(), value.encode()) for name, value in ({"content-length": "8"} | key).items()]
    scope = {"type": "http", "method": "POST", "path": "/size", "query_string": b"", "headers": headers}
    scope["client"] = ("127.0.0.1", 1)
    await app_of()(scope, receive, send)

    error = json.loads(b"".join(message.get("body", b"") for message in sent))["error"]
    assert (sent[0]["status"], error["code"], error["retryable"]) == (408, "request_incomplete", True)
