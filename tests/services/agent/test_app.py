"""The HTTP side: streams, refusals, clients that leave. A real server where the stream itself is the subject."""

import asyncio

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, call, group, open_services
from tests.services.agent.replaceable import Answer
from tests.services.agent.scripted_model import END
from tests.serving import served
from tests.waiting import async_until
from trackway.agent import groups
from trackway.agent.app import create_app
from trackway.agent.settings import AgentSettings
from trackway.clients import AgentClient, shared_http
from trackway.wire.chat import ChatModelSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import EngineLoad
from trackway.wire.service import Wait
from trackway.wire.trajectory import Trajectory

ANSWER = "#### 18" + END
COUNT = call("counter") + END


@pytest.mark.anyio
async def test_each_trajectory_is_streamed_as_it_ends(services: AgentServices, agent: AgentClient) -> None:
    first_was_seen = asyncio.Event()

    async def slow() -> str:
        await first_was_seen.wait()
        return ANSWER

    services.model.scripts = {0: [slow], 1: [ANSWER]}
    seen: list[int] = []
    async for trajectory in agent.group(group(n=2)):
        seen.append(trajectory.tags.rollout_n)
        first_was_seen.set()

    assert seen == [1, 0]


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_its_trajectories_and_releases_their_tools(
    services: AgentServices, agent: AgentClient
) -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    services.model.scripts = {0: [ANSWER], 1: [COUNT, never], 2: [COUNT, never]}
    stream = agent.group(group(n=3))
    assert (await anext(stream)).tags.rollout_n == 0
    await async_until(lambda: len(services.model.requests) == 5)
    await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    await async_until(lambda: len(services.counter.released) == 2)
    assert sorted(services.counter.released) == sorted(services.counter.counts)


@pytest.mark.anyio
async def test_the_stream_says_what_the_rollouts_wait_for_that_do_not_end(
    services: AgentServices, agent: AgentClient
) -> None:
    said: list[list[Wait]] = []
    released = asyncio.Event()

    async def slow() -> str:
        await released.wait()
        return ANSWER

    def on_waits(waits: list[Wait]) -> None:
        if all(wait.until is not None for wait in waits):  # on a busy machine not yet at the first report
            said.append(waits)
            released.set()

    services.model.scripts = {0: [COUNT, ANSWER], 1: [slow]}
    services.counter.before = released.wait
    ended = [trajectory async for trajectory in agent.group(group(n=2, report_waits_s=0.5), on_waits=on_waits)]

    assert sorted(trajectory.tags.rollout_n for trajectory in ended) == [0, 1]
    assert [(wait.who, wait.waits_for, wait.until is not None) for wait in said[0]] == [
        ("rollout 1/7/0", "tool counter", True),
        ("rollout 1/7/1", "the rollout service, turn 0", True),
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.WEIGHTS_BEHIND, ErrorCode.PAUSED])
async def test_the_stream_says_why_an_engine_is_asked_again(
    services: AgentServices, agent: AgentClient, code: ErrorCode
) -> None:
    refusal, said, released = (
        TrackwayError(code, "expected room, got none", retry_after_s=0.02),
        list[str](),
        asyncio.Event(),
    )

    async def refuses(answer: Answer) -> httpx.Response:
        if released.is_set():
            return await answer()
        services.rollout.faults.append(refuses)
        body = refusal.to_reply().model_dump(mode="json")
        return httpx.Response(refusal.status, json=body)

    def on_waits(waits: list[Wait]) -> None:
        said.append(waits[0].progress)
        released.set()

    services.rollout.faults.append(refuses)
    services.model.scripts = {0: [ANSWER]}
    [ended] = [trajectory async for trajectory in agent.group(group(n=1, report_waits_s=0.1), on_waits=on_waits)]

    assert (ended.error, ended.stop_reason) == (None, "answered")
    assert said[0] == f"asked again after: {code}: expected room, got none"


@pytest.mark.anyio
async def test_trajectories_are_counted_by_kind_and_outcome(services: AgentServices) -> None:
    async def refuse() -> str:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, "no such prompt")

    services.model.scripts = {0: [ANSWER], 1: [COUNT, ANSWER], 2: [refuse]}
    await services.run(group(n=3))
    services.model.begin_again()
    await services.run(group(n=1, validate=True))
    lines = (await services.client.get("/metrics")).text.splitlines()

    assert {line for line in lines if line.startswith("trackway_trajectories")} == {
        'trackway_trajectories_total{kind="training",outcome="answered"} 2.0',
        'trackway_trajectories_total{kind="training",outcome="invalid_request"} 1.0',
        'trackway_trajectories_total{kind="validation",outcome="answered"} 1.0',
        "trackway_trajectories_running 0.0",
    }
    name = "gen_ai_invoke_agent_duration_seconds_count"
    labels = 'gen_ai_agent_name="tool_agent",gen_ai_operation_name="invoke_agent"'
    assert {line for line in lines if line.startswith(name)} == {
        f'{name}{{error_type="",{labels}}} 3.0',
        f'{name}{{error_type="invalid_request",{labels}}} 1.0',
    }
    calls = 'gen_ai_invoke_agent_%s_calls_%s{gen_ai_agent_name="tool_agent"} %s'
    for line in (
        calls % ("inference", "count", 4.0),
        calls % ("inference", "sum", 4.0),
        calls % ("tool", "count", 4.0),
        calls % ("tool", "sum", 1.0),
    ):
        assert line in lines


@pytest.mark.anyio
async def test_calls_that_full_replicas_passed_on_are_counted_by_service(services: AgentServices) -> None:
    lines = (await services.client.get("/metrics")).text.splitlines()

    assert {line for line in lines if line.startswith("trackway_spilled_calls")} == {
        f'trackway_spilled_calls_total{{service="{service}"}} 0.0' for service in ("rollout", "tools", "reward")
    }
    assert "trackway_moved_turns_total 0.0" in lines


@pytest.mark.anyio
async def test_only_the_asked_rollouts_are_run(services: AgentServices) -> None:
    services.model.scripts = {1: [ANSWER], 3: [ANSWER]}

    trajectories = await services.run(group(n=4, rollouts=[3, 1]))

    assert [trajectory.id for trajectory in trajectories] == ["run-a/1/7/1", "run-a/1/7/3"]
    assert len(services.model.requests) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("rollouts", [[0, 0], [4], [-1]])
async def test_rollouts_outside_the_group_are_refused(services: AgentServices, rollouts: list[int]) -> None:
    response = await services.client.post("/groups", json=group(n=4, rollouts=rollouts).model_dump(mode="json"))

    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


@pytest.mark.anyio
async def test_an_unknown_agent_is_refused_before_the_stream_begins(services: AgentServices) -> None:
    response = await services.client.post("/groups", json=group(agent_name="unregistered").model_dump(mode="json"))

    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_agent")


@pytest.mark.anyio
async def test_groups_are_ndjson(services: AgentServices) -> None:
    services.model.scripts = {0: [ANSWER], 1: [ANSWER]}

    response = await services.client.post("/groups", json=group(n=2).model_dump(mode="json"))

    assert response.headers["content-type"] == "application/x-ndjson"
    assert len(response.text.splitlines()) == 2
    assert response.text.endswith("\n")


@pytest.mark.anyio
async def test_one_trajectory_is_answered_as_json(services: AgentServices) -> None:
    services.model.scripts = {1: [ANSWER]}

    response = await services.client.post("/trajectories", json=group(n=2, rollouts=[1]).model_dump(mode="json"))

    assert Trajectory.model_validate(response.json()).id == "run-a/1/7/1"


@pytest.mark.anyio
async def test_several_trajectories_are_refused_where_one_is_expected(services: AgentServices) -> None:
    response = await services.client.post("/trajectories", json=group(n=2).model_dump(mode="json"))

    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


@pytest.mark.anyio
async def test_the_agents_are_listed(services: AgentServices) -> None:
    response = await services.client.get("/agents")

    names = {agent["name"] for agent in response.json()["agents"]}
    assert names >= {"single_turn_agent", "tool_agent"}
    offering = {agent["name"]: agent["offers_tools"] for agent in response.json()["agents"]}
    assert (offering["single_turn_agent"], offering["tool_agent"]) == (False, True)
    assert response.json()["without_tools"] == ""


@pytest.mark.anyio
async def test_no_more_trajectories_run_at_once_than_the_settings_allow(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    running, most = 0, 0

    async def watched() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return ANSWER

    async with open_services(settings.model_copy(update={"max_concurrent_trajectories": 2}), tokenizer) as services:
        services.model.scripts = {number: [watched] for number in range(6)}
        trajectories = await services.run(group(n=6))

    assert (most, len(trajectories)) == (2, 6)


@pytest.mark.anyio
async def test_the_number_of_trajectories_follows_the_engines_kv_caches(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, may_end = 0, 0, asyncio.Event()
    why = "at most 3 at once: 85% of 4,096 KV tokens, of which"
    waiting: list[str] = []

    async def watched() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await may_end.wait()
        running -= 1
        return ANSWER

    def on_waits(waits: list[Wait]) -> None:
        slots = [wait.progress for wait in waits if wait.waits_for == "a free slot of its agent replica"]
        if slots and slots[0].startswith(why) and running == 3:
            waiting.extend(slots)
            may_end.set()

    monkeypatch.setattr(groups, "_UPDATE_S", 600.0)
    bounds = {"min_concurrent_trajectories": 1, "max_concurrent_trajectories": 5}
    async with (
        open_services(settings.model_copy(update=bounds), tokenizer) as services,
        served(services.agent, lifespan="off") as url,
    ):
        services.model.max_len = 1024  # of 4,096 KV tokens 85 % hold three contexts of that length
        services.model.scripts = {number: [watched] for number in range(6)}
        request = group(n=6, report_waits_s=0.1)
        ended = [trajectory async for trajectory in AgentClient(url).group(request, on_waits=on_waits)]
        reason = (await services.client.get("/ready")).json()["reason"]
        lines = (await services.client.get("/metrics")).text.splitlines()
        await shared_http().aclose()

    assert (len(ended), most, len(waiting)) == (6, 3, 3)
    assert reason.startswith(why)
    assert "trackway_trajectories_limit 3.0" in lines


@pytest.mark.anyio
async def test_the_limit_stays_while_the_engines_do_not_answer(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_LOADS_S", 0.2)
    monkeypatch.setattr(groups, "_UPDATE_S", 0.02)
    update = {"min_concurrent_trajectories": 2}
    async with open_services(settings.model_copy(update=update), tokenizer) as services:
        may_end = asyncio.Event()

        async def fails() -> EngineLoad:
            may_end.set()
            raise TrackwayError(ErrorCode.UNAVAILABLE, "it starts")

        async def slow() -> str:
            await may_end.wait()
            return ANSWER

        services.model.load = fails
        services.model.scripts = {number: [slow] for number in range(4)}
        assert len(await services.run(group(n=4))) == 4
        reason = ""
        async with asyncio.timeout(60):
            while not reason.startswith("at most 2 at once: the engines' load is unknown: "):
                reason = (await services.client.get("/ready")).json()["reason"]


def test_bounds_of_trajectories_out_of_order_are_refused(settings: AgentSettings) -> None:
    with pytest.raises(ValueError, match=r"expected at most max_concurrent_trajectories \(4\), got 5"):
        AgentSettings(model_path="m", min_concurrent_trajectories=5, max_concurrent_trajectories=4)


def test_a_limit_by_kv_caches_is_refused_where_a_chat_model_answers() -> None:
    chat_model = ChatModelSettings(base_url="http://127.0.0.1:9/v1", model="m")
    with pytest.raises(ValueError, match="expected None with chat_model, whose KV cache is unknown, got 5"):
        AgentSettings(model_path="m", chat_model=chat_model, min_concurrent_trajectories=5)


def test_an_unknown_parser_is_refused_at_the_start(settings: AgentSettings) -> None:
    with pytest.raises(TrackwayError) as caught:
        create_app(settings.model_copy(update={"tool_parser": "nope"}))

    assert caught.value.code is ErrorCode.INVALID_REQUEST
