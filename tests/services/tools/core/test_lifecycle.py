"""The life of an instance over HTTP: kwargs, deadlines, retries, and what operators see and end."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.services.tools.faulty_tool import FaultyTool
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.clients.tools import ToolsClient
from trackway.tools.app import create_app
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ErrorReply
from trackway.wire.tools import ExecuteRequest, OneShotRequest

pytestmark = pytest.mark.anyio

OK = {"arguments": {"mode": "ok"}}
SLEEP = {"arguments": {"mode": "sleep"}}


@pytest.fixture
def faulty() -> FaultyTool:
    return FaultyTool.default()


@pytest.fixture
async def http(running, faulty: FaultyTool) -> AsyncIterator[httpx.AsyncClient]:
    settings = ToolsSettings(call_timeout_s=0.05, max_instances=3, instance_ttl_s=1e6)
    async with running(create_app(settings, [faulty, CalculatorTool.default(), Gsm8kTool.default()])) as client:
        yield client


async def made(http: httpx.AsyncClient, session: str | None = None) -> str:
    answer = await http.post("/instances", json={"tool": "faulty", "session_id": session})
    return answer.json()["instance_id"]


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, ErrorReply.model_validate_json(answer.content).error.code.value


async def test_the_rows_kwargs_reach_calc_reward_and_release(http: httpx.AsyncClient, faulty: FaultyTool) -> None:
    client = ToolsClient("http://tools", http)
    instance_id = (await client.create("faulty")).instance_id

    await client.reward(instance_id, calc_reward_kwargs={"scale": 2})
    await client.release(instance_id, release_kwargs={"keep": ["a"]})

    assert faulty.given == {"calc_reward": {"scale": 2}, "release": {"keep": ["a"]}}


async def test_a_one_shot_takes_the_kwargs_of_every_step(http: httpx.AsyncClient, faulty: FaultyTool) -> None:
    request = OneShotRequest(arguments={"mode": "ok"}, calc_reward_kwargs={"scale": 2}, release_kwargs={"keep": 1})

    await ToolsClient("http://tools", http).one_shot("faulty", request)

    assert faulty.given == {"calc_reward": {"scale": 2}, "release": {"keep": 1}}


async def test_reward_and_release_need_no_body(http: httpx.AsyncClient, faulty: FaultyTool) -> None:
    instance_id = await made(http)

    reward = await http.post(f"/instances/{instance_id}/reward")
    released = await http.delete(f"/instances/{instance_id}")

    assert (reward.json(), released.status_code, released.content) == ({"reward": 0.0}, 204, b"")
    assert faulty.given == {"calc_reward": {}, "release": {}}


@ENDS_SOON
async def test_the_callers_deadline_ends_a_call_before_the_tools_own_does(running, faulty: FaultyTool) -> None:
    async with running(create_app(ToolsSettings(call_timeout_s=60.0), [faulty])) as http:
        path = f"/instances/{await made(http)}/execute"
        late = await http.post(path, json=SLEEP, headers={"x-request-timeout": "0.05"})
        after = await http.post(path, json=OK)

    assert code_of(late) == (504, "deadline_exceeded")
    assert (faulty.running, after.json()["text"]) == (0, "ok 1")


@ENDS_SOON
async def test_a_retry_after_a_504_is_given_the_504_and_runs_nothing(
    http: httpx.AsyncClient, faulty: FaultyTool
) -> None:
    path = f"/instances/{await made(http)}/execute"
    faulty.gate.clear()

    answers = [await http.post(path, json=OK, headers={"idempotency-key": "once"}) for _ in range(2)]
    faulty.gate.set()
    answers.append(await http.post(path, json=OK, headers={"idempotency-key": "once"}))

    assert [code_of(answer) for answer in answers] == [(504, "tool_timeout")] * 3
    assert (faulty.started, list(faulty.calls.values())) == (1, [0])


async def test_a_retry_while_the_first_still_runs_shares_its_answer_though_the_first_client_left(
    running, faulty: FaultyTool
) -> None:
    async with running(create_app(ToolsSettings(), [faulty])) as http:
        path = f"/instances/{await made(http)}/execute"
        faulty.gate.clear()
        key = {"idempotency-key": "once"}
        left, waiting = (asyncio.create_task(http.post(path, json=OK, headers=key)) for _ in range(2))
        await async_until(lambda: faulty.running == 1)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        faulty.gate.set()
        answers = [await waiting, await http.post(path, json=OK, headers=key)]

    assert [answer.json()["text"] for answer in answers] == ["ok 1", "ok 1"]
    assert faulty.started == 1


async def test_a_key_with_another_body_is_a_conflict(http: httpx.AsyncClient) -> None:
    path = f"/instances/{await made(http)}/execute"

    await http.post(path, json=OK, headers={"idempotency-key": "once"})
    other_answer = await http.post(path, json={"arguments": {"mode": "long"}}, headers={"idempotency-key": "once"})

    assert code_of(other_answer) == (409, "conflict")


async def test_a_full_server_says_when_to_come_back(http: httpx.AsyncClient) -> None:
    for _ in range(3):
        await made(http)

    refused = await http.post("/instances", json={"tool": "faulty"})

    assert (code_of(refused), refused.headers["retry-after"]) == ((429, "overloaded"), "1")


async def test_an_operator_sees_the_instances_without_their_content(http: httpx.AsyncClient) -> None:
    create_kwargs = {"ground_truth": "the truth"}
    body = {"tool": "calc_gsm8k_reward", "session_id": "a/1", "create_kwargs": create_kwargs}
    await http.post("/instances", json=body)
    second = await made(http, "b")
    client = ToolsClient("http://tools", http)

    whole, first, of_b = await client.instances(), await client.instances(limit=1), await client.instances("b")

    seen = [(instance.tool, instance.session_id, instance.state) for instance in whole.instances]
    assert seen == [("calc_gsm8k_reward", "a/1", "idle"), ("faulty", "b", "idle")]
    assert (whole.total, first.total, [instance.session_id for instance in first.instances]) == (2, 2, ["a/1"])
    assert [instance.instance_id for instance in of_b.instances] == [second]
    assert all(0 <= instance.idle_s <= instance.age_s for instance in whole.instances)
    assert "the truth" not in (await http.get("/instances")).text


async def test_an_operator_releases_a_whole_session_and_nothing_else(
    http: httpx.AsyncClient, faulty: FaultyTool
) -> None:
    await made(http, "run/1/0/0")
    await made(http, "run/1/0/0")
    other_instance = await made(http, "run/1/0/1")
    client = ToolsClient("http://tools", http)

    answers = [await client.release_session("run/1/0/0") for _ in range(2)]

    assert [(answer.released, answer.failed) for answer in answers] == [(2, []), (0, [])]
    assert list(faulty.calls) == [other_instance]
    assert (await client.execute(other_instance, ExecuteRequest(arguments={"mode": "ok"}))).text == "ok 1"


async def test_one_instance_that_cannot_be_released_does_not_keep_its_sessions_others(
    http: httpx.AsyncClient, faulty: FaultyTool
) -> None:
    broken, whole = await made(http, "s"), await made(http, "s")
    del faulty.calls[broken]

    released = await ToolsClient("http://tools", http).release_session("s")

    assert released.released == 1
    assert released.failed == [f"{broken}: tool 'faulty' failed in release: KeyError: '{broken}'"]
    assert whole not in faulty.calls


@pytest.mark.parametrize(("method", "path"), [("GET", "/instances"), ("DELETE", "/sessions/run/1/0/0")])
async def test_an_agents_token_opens_no_operators_route(running, method: str, path: str) -> None:
    tokens = {
        "agents": {"secret": "agents-secret-0123456789"},
        "ops": {"secret": "operators-secret-0123456789", "scopes": ["admin"]},
    }
    settings = ToolsSettings.model_validate({"auth": {"tokens": tokens}})
    async with running(create_app(settings)) as http:
        answers = [
            await http.request(method, path, headers={"authorization": f"Bearer {token['secret']}"})
            for token in tokens.values()
        ]

    assert code_of(answers[0]) == (403, "forbidden")
    assert answers[1].status_code == 200
