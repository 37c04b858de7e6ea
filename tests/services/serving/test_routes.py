"""What is wrong with a body is said in a few words, whatever came; the routes of all services validate in one way."""

import json
from collections.abc import Iterator

import httpx
import pytest
from benchmarks.sim_engine import SIM
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, TypeAdapter

from trackway.agent.app import create_app as agent_app
from trackway.agent.settings import AgentSettings
from trackway.deploy.bundled import TINY_MODEL
from trackway.reward.app import create_app as reward_app
from trackway.rollout.app import create_app as rollout_app
from trackway.rollout.settings import RolloutSettings
from trackway.serving import ServiceRouter, ServiceSettings, service_app
from trackway.serving.routes import JsonRoute
from trackway.tools.app import create_app as tools_app
from trackway.trainer.app import create_app as trainer_app
from trackway.wire.base import WireRequest

pytestmark = pytest.mark.anyio

TINY = str(TINY_MODEL)
APPS = {
    "rollout": lambda: rollout_app(RolloutSettings.model_validate({"model_path": TINY, "engine": SIM})),
    "agent": lambda: agent_app(AgentSettings(model_path=TINY)),
    "tools": tools_app,
    "reward": reward_app,
    "trainer": trainer_app,
}


class Item(WireRequest):
    number: int


class Order(WireRequest):
    items: list[Item] = Field(default_factory=list, fail_fast=True)
    note: str = ""


def app_of() -> FastAPI:
    router = ServiceRouter()

    @router.post("/order")
    async def order(request: Order) -> int:
        return len(request.items)

    @router.post("/maybe")
    async def maybe(request: Order | None = None) -> str:
        return "none" if request is None else request.note

    return service_app("tools", ServiceSettings(), routers=[router])


def message_of(answer: httpx.Response) -> str:
    assert answer.status_code == 422
    return answer.json()["error"]["message"].removeprefix("the request does not fit the schema at /docs: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"items": [{"number": 1}, {"number": "x"}, {}]}', "body.items.1.number: Input should be a valid integer"),
        ('{"items": [}', "body: Invalid JSON: expected value at line 1 column 12"),
        ('{"note": "\\ud800"}', "body: Invalid JSON: unexpected end of hex escape at line 1 column 17"),
        ("[]", "body: Input should be an object"),
        ("", "body: Field required"),
    ],
)
async def test_a_wrong_body_is_named(running, body: str, message: str) -> None:
    async with running(app_of()) as client:
        answer = await client.post("/order", content=body, headers={"content-type": "application/json"})
    assert message_of(answer).startswith(message)


async def test_the_first_ten_problems_are_named_and_the_others_counted(running) -> None:
    wrong = {f"key{number:02}": number for number in range(15)}
    async with running(app_of()) as client:
        answer = await client.post("/order", json=wrong)
    named = "; ".join(f"body.key{number:02}: Extra inputs are not permitted" for number in range(10))
    assert message_of(answer) == f"{named}; and 5 more"


async def test_very_many_problems_are_only_counted(running) -> None:
    wrong = {f"key{number}": number for number in range(1001)}
    async with running(app_of()) as client:
        answer = await client.post("/order", json=wrong)
    assert message_of(answer) == "body: 1001 problems, too many to list"


async def test_a_problem_quotes_little_of_a_long_name(running) -> None:
    async with running(app_of()) as client:
        message = message_of(await client.post("/order", json={"x" * 100_000: 1}))
    assert message.startswith("body.xxxx")
    assert message.endswith("xxxx: Extra inputs are not permitted")
    assert len(message) < 300


@pytest.mark.parametrize(("body", "answer"), [(None, "none"), ("null", "none"), ('{"note": "n"}', "n")])
async def test_a_body_may_be_left_out_where_none_is_needed(running, body: str | None, answer: str) -> None:
    async with running(app_of()) as client:
        got = await client.post("/maybe", content=body, headers={"content-type": "application/json"})
    assert got.json() == answer


@pytest.mark.parametrize("service", APPS)
def test_every_route_with_a_body_validates_its_bytes(service: str) -> None:
    plain = [route.path for route in bodies(APPS[service]()) if not isinstance(route, JsonRoute)]
    assert plain == []


@pytest.mark.parametrize("service", APPS)
def test_every_list_of_a_request_stops_at_its_first_wrong_item(service: str) -> None:
    """pydantic collects an error for each item otherwise, 10 us and 1.5 kB each."""
    routes = list(bodies(APPS[service]()))
    assert routes
    collecting = [f"{route.path}: {place}" for route in routes for place in collecting_lists(route)]
    assert collecting == []


def bodies(app: FastAPI) -> Iterator[APIRoute]:
    pending = list(app.router.routes)
    while pending:
        route = pending.pop()
        if isinstance(route, APIRoute) and route.body_field is not None:
            yield route
        elif (router := getattr(route, "original_router", None)) is not None:
            pending += router.routes


def collecting_lists(route: APIRoute) -> Iterator[str]:
    assert route.body_field is not None
    schema = TypeAdapter(route.body_field.field_info.annotation or object).core_schema
    yield from _collecting(schema, "body")


def _collecting(schema: object, place: str) -> Iterator[str]:
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from _collecting(part, place)
    if not isinstance(schema, dict):
        return
    collects = schema.get("type") in ("list", "set", "frozenset", "tuple") and not schema.get("fail_fast")
    if collects and not _is_json_value(schema):
        yield place
    for name, part in schema.items():
        if name == "fields" and isinstance(part, dict):
            for field, inner in part.items():
                yield from _collecting(inner, f"{place}.{field}")
        elif name not in ("metadata", "serialization", "cls", "config"):
            yield from _collecting(part, place)


def _is_json_value(schema: dict[str, object]) -> bool:
    """A list of any JSON has no wrong items."""
    return "JsonValue" in json.dumps(schema.get("items_schema"), default=str)


class Loose(BaseModel):
    numbers: list[int]


def test_the_walk_finds_a_list_that_collects_errors() -> None:
    router = ServiceRouter()

    @router.post("/loose")
    async def loose(request: Loose) -> None: ...

    app = service_app("tools", ServiceSettings(), routers=[router])
    assert [list(collecting_lists(route)) for route in bodies(app)] == [["body.numbers"]]


@pytest.mark.parametrize(
    ("content_type", "got"),
    [
        (None, "none"),
        ("application/x-www-form-urlencoded", "'application/x-www-form-urlencoded'"),
        ("text/json", "'text/json'"),
    ],
)
async def test_a_body_without_its_content_type_is_refused_by_name(running, content_type: str | None, got: str) -> None:
    async with running(app_of()) as client:
        headers = {} if content_type is None else {"content-type": content_type}
        answer = await client.post("/order", content=b'{"note": "hello"}', headers=headers)

    assert message_of(answer).startswith(
        f"expected the header `content-type: application/json` with the body, got {got}"
    )


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/a+json"])
async def test_json_is_read_under_each_of_its_content_types(running, content_type: str) -> None:
    async with running(app_of()) as client:
        answer = await client.post(
            "/order", content=b'{"items": [{"number": 1}]}', headers={"content-type": content_type}
        )

    assert (answer.status_code, answer.json()) == (200, 1)
