"""What a request may be: the size and depth of its body, and the headers that services read."""

import json
import random
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request

from trackway.serving import ServiceSettings, service_app
from trackway.serving.bounds import deeper_than

pytestmark = pytest.mark.anyio

STRINGS = ["", "[", "{[", "]}", '"', '\\"', "\\", "\\\\", '[\\"{', "é", '"]["', "a\\", "a"]


def app_of(**settings: object) -> FastAPI:
    router = APIRouter()

    @router.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    @router.post("/value")
    async def value(request: dict[str, Any]) -> int:
        return len(request)

    return service_app("tools", ServiceSettings.model_validate(settings), routers=[router])


def nested(levels: int) -> bytes:
    return (
        b'{"a":' * (levels // 2) + b"[" * (levels - levels // 2) + b"]" * (levels - levels // 2) + b"}" * (levels // 2)
    )


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


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


def test_depth_is_what_a_parser_finds() -> None:
    dice = random.Random(0)
    values = [made_up(dice, 9) for _ in range(500)]
    assert {*map(depth_of, values)} == set(range(10))
    for value in values:
        for text in (json.dumps(value), json.dumps(value, indent=1, ensure_ascii=False)):
            found = [deeper_than(limit, text.encode()) for limit in range(1, 11)]
            assert found == [depth_of(value) > limit for limit in range(1, 11)], text


@pytest.mark.parametrize("keyed", [False, True])
async def test_json_may_nest_to_the_limit_and_no_deeper(running, keyed: bool) -> None:
    bodies = [nested(64), nested(65), b"[" * 1_000_000, b"[" + b",".join([b"[]"] * 10_000) + b"]"]
    async with running(app_of()) as client:
        client.headers["content-type"] = "application/json"
        keys = [{"idempotency-key": f"k{number}"} if keyed else {} for number in range(len(bodies))]
        answers = [
            await client.post("/size", content=body, headers=key) for body, key in zip(bodies, keys, strict=True)
        ]
        parsed = await client.post("/value", content=nested(64))
    refusal = 422, "invalid_request", "expected JSON in UTF-8 of at most 64 levels, got another body; send it flatter"
    assert [error_of(one) for one in answers[1:3]] == [refusal, refusal]
    assert [answers[0].json(), answers[3].json(), parsed.json()] == [len(bodies[0]), len(bodies[3]), 1]


async def test_an_encoding_in_which_depth_could_hide_is_refused(running) -> None:
    async with running(app_of(max_json_depth=8)) as client:
        answer = await client.post("/size", content='{"\u2200": 1}'.encode("utf-16"))
    message = "expected JSON in UTF-8 of at most 8 levels, got another body; send it flatter"
    assert error_of(answer) == (422, "invalid_request", message)


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
            ("x-request-deadline", value, "Unix time in seconds, e.g. 1767225600.5")
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
        "x-request-deadline": "4102444800.123456789",
    }
    async with running(app_of()) as client:
        assert (await client.post("/value", json={}, headers=headers)).json() == 0
