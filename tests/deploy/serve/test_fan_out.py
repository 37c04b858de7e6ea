"""One call makes every rollout replica sleep or wake up; real replicas and a client, without Ray between them."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest
from benchmarks.sim_engine import SIM
from ray.exceptions import ActorDiedError, RayTaskError

from tests.services.rollout.replica_group import Group
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.clients import Deadline
from trackway.deploy.serve.fan_out import Refusal, agreed, replicas_route
from trackway.rollout.settings import RolloutSettings
from trackway.serving import ServiceSettings, service_app
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.rollout import MemoryPart, SleepReply

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

OPERATOR, AGENT = "operator-0123456789abcdef", "agent-0123456789abcdef"
SLEEPY = RolloutSettings(engine=SIM, enable_sleep=True)
ENDLESS = {"token_ids": [11, 12], "sampling_params": {"max_tokens": 900, "ignore_eos": True}}
PARTS = ["kv_cache", "weights"]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


def raised_there(cause: Exception) -> Exception:
    """What Ray makes of an exception of a replica."""
    return RayTaskError(
        "describe", "the replica's own traceback", cause, "replica", 1, "127.0.0.1"
    ).as_instanceof_cause()


async def running_at(http: httpx.AsyncClient) -> bool:
    return re.search(r"^trackway_engine_running\S* 1", (await http.get("/metrics")).text, re.MULTILINE) is not None


async def test_all_replicas_sleep_and_wake_in_stages_however_often_they_are_told(group: Group) -> None:
    async with group.running(SLEEPY, SLEEPY) as client:
        names = sorted(await group.names())
        calls: list[Callable[[], Awaitable[object]]] = [
            client.sleep,
            client.sleep,
            lambda: client.wake_up(["weights"]),
            lambda: client.wake_up(["kv_cache"]),
            client.wake_up,
        ]
        found = []
        for call in calls:
            await call()
            told = (await client.sleeping()).replicas
            assert [state.replica for state in told] == names
            found.append([state.asleep for state in told])
        ready = [(await replica.describe()).ready.ready for replica in group.replicas]
    assert found == [[PARTS] * 2, [PARTS] * 2, [["kv_cache"]] * 2, [[]] * 2, [[]] * 2]
    assert ready == [True, True]


async def test_a_replica_that_came_while_the_others_slept_is_awake_and_stays_so(group: Group) -> None:
    stages: list[list[MemoryPart]] = [["weights"], ["kv_cache"]]
    async with group.running(SLEEPY, SLEEPY) as client:
        late = group.replicas.pop()
        await client.sleep()
        group.replicas.append(late)
        found = [sorted(replica.is_sleeping for replica in (await client.sleeping()).replicas)]
        for parts in stages:
            await client.wake_up(parts)
            found.append(sorted(replica.is_sleeping for replica in (await client.sleeping()).replicas))
    assert found == [[False, True], [False, True], [False, False]]


async def test_who_cannot_sleep_is_named_and_the_others_sleep(group: Group) -> None:
    async with group.running(SLEEPY, RolloutSettings(engine=SIM)) as client:
        names = await group.names()
        with pytest.raises(TrackwayError) as refused:
            await client.sleep()
        said = {
            replica.replica: (replica.can_sleep, replica.is_sleeping) for replica in (await client.sleeping()).replicas
        }
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert refused.value.message.startswith(
        f"POST /sleep?mode=wait failed on 1 of 2 rollout replicas: {names[1]}: expected an engine that can sleep"
    )
    assert said == {names[0]: (True, True), names[1]: (False, False)}


@ENDS_SOON
async def test_who_does_not_finish_in_the_callers_time_is_named(group: Group) -> None:
    async with group.running(SLEEPY, SLEEPY) as client:
        names, second = await group.names(), group.https[1]
        endless = asyncio.create_task(second.post("/generate", json=ENDLESS))
        await async_until(lambda: running_at(second))
        with pytest.raises(TrackwayError) as late:
            await client.sleep(deadline=Deadline.after(2.2))
        await client.sleep("abort")
        cut = (await endless).json()["choices"][0]["finish_reason"]
    assert late.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert (
        f"failed on 1 of 2 rollout replicas: {names[1]}: expected an answer within the caller's" in late.value.message
    )
    assert cut == "abort"


@ENDS_SOON
async def test_weights_that_do_not_come_are_asked_for_until_the_deadline_and_everybody_is_named(group: Group) -> None:
    async with group.running(SLEEPY, SLEEPY) as client:
        names, began = sorted(await group.names()), time.monotonic()
        with pytest.raises(TrackwayError) as late:
            await client.wake_up(min_weight_version=3, deadline=Deadline.after(4.5))
    behind = "expected weights version 3 within x s, got 0: the newest version published is 0; retry later"
    assert late.value.code is ErrorCode.WEIGHTS_BEHIND
    assert re.sub(r"\d\.\d+ s", "x s", late.value.message) == (
        "POST /wake_up?min_weight_version=3 failed on 2 of 2 rollout replicas: "
        f"{names[0]}: {behind}; {names[1]}: {behind}"
    )
    assert time.monotonic() - began >= 1.0  # asked again at least once


async def test_steering_all_is_an_operators(group: Group) -> None:
    tokens = {"agents": {"secret": AGENT}, "ops": {"secret": OPERATOR, "scopes": ["admin"]}}
    settings = SLEEPY.model_validate({**SLEEPY.model_dump(), "auth": {"tokens": tokens}})
    asked = [("GET", "/replicas/is_sleeping"), ("POST", "/replicas/sleep"), ("POST", "/replicas/wake_up")]
    found = {}
    async with group.running(settings, settings):
        for token in (AGENT, OPERATOR):
            headers = {"authorization": f"Bearer {token}"}
            found[token] = [(await group.https[0].request(*call, headers=headers)).status_code for call in asked]
    assert found == {AGENT: [200, 403, 403], OPERATOR: [200, 200, 200]}


def test_a_replica_that_died_is_a_reason_to_ask_again_and_one_that_refuses_is_none() -> None:
    awake, died = SleepReply(is_sleeping=False, replica="a"), ActorDiedError()
    refused = Refusal(replica="b", error=ErrorBody(code=ErrorCode.WEIGHTS_CORRUPT, message="wrong", retryable=False))
    with pytest.raises(TrackwayError) as lost:
        agreed("POST /wake_up", [awake, died])
    with pytest.raises(TrackwayError) as corrupt:
        agreed("POST /wake_up", [died, refused])
    assert (lost.value.code, lost.value.detail) == (ErrorCode.UNAVAILABLE, {"retry_after_s": 1.0})
    assert (corrupt.value.code, corrupt.value.detail) == (ErrorCode.WEIGHTS_CORRUPT, {})
    said = f"2 of 2 rollout replicas: b: wrong; lost: ActorDiedError: {ActorDiedError()}"
    assert corrupt.value.message.endswith(said)


async def replicas_when(answer: BaseException) -> tuple[int, str, str]:
    """What `/replicas` says when a replica's answer is that exception: status, code, message."""

    async def broadcast(method: str, *args: object, within_s: float) -> list[object]:
        return [answer]

    app = service_app("tools", ServiceSettings(), routers=[replicas_route("tools", broadcast)])
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        told = await http.get("/replicas")
    error = told.json()["error"]
    return told.status_code, error["code"], error["message"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ActorDiedError(), f"ActorDiedError: {ActorDiedError()}"),
        (raised_there(TimeoutError("late")), "TimeoutError: late"),
        (asyncio.CancelledError("it stops"), "CancelledError: it stops"),
    ],
    ids=["it died", "it was late", "it stops"],
)
async def test_a_replica_that_is_lost_while_all_are_asked_is_a_503_that_says_so(
    answer: BaseException, reason: str
) -> None:
    assert await replicas_when(answer) == (503, "unavailable", f"a tools replica did not answer ({reason}); ask again")


async def test_a_defect_of_a_replica_is_a_500_and_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    message = "ValueError: wrong; this is a bug; see the traceback in the service's log"
    assert await replicas_when(raised_there(ValueError("wrong"))) == (500, "internal", message)
    assert "the replica's own traceback" in caplog.text
    with pytest.raises(ValueError, match="wrong"):
        agreed("POST /wake_up", [raised_there(ValueError("wrong"))])


async def test_the_load_is_asked_of_all_replicas_that_answer(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    async with group.running(SLEEPY, SLEEPY) as client:
        assert [load.callers for load in await client.loads("a")] == [1, 1]
        assert [load.callers for load in await client.loads("b & c")] == [2, 2]

        async def starting(caller: str) -> None:
            return None

        monkeypatch.setattr(group.replicas[0], "load", starting)
        assert len(await client.loads("a")) == 1
