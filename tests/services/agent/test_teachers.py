"""A teacher scores what the student wrote: exact places, a span of its own, and its failure."""

import asyncio
import json

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, call, group, open_services
from tests.services.agent.scripted_model import END
from tests.services.agent.test_tool_agent import ANSWER, FIRST, OBSERVATION
from tests.serving import served
from trackway.agent.settings import AgentSettings
from trackway.clients import AgentClient, shared_http
from trackway.clients.http_client import TOKEN
from trackway.wire.errors import ErrorCode
from trackway.wire.service import Wait
from trackway.wire.trajectory import StopReason, TeacherScores


@pytest.mark.anyio
async def test_each_token_of_the_model_is_scored_once_and_no_token_of_a_tool(services: AgentServices) -> None:
    teacher = {"name": "math", "model": "tiny", "top_k": 2}
    trajectory = await services.say(FIRST, ANSWER, teacher=teacher)

    prompt, first, observation, answer = (
        len(trajectory.prompt_ids),
        *(len(services.model.encode(text)) for text in (FIRST, OBSERVATION, ANSWER)),
    )
    begin = prompt + first + observation
    places = [*range(prompt, prompt + first), *range(begin, begin + answer)]
    ids = trajectory.prompt_ids + trajectory.response_ids
    assert trajectory.error is None
    assert trajectory.teacher == TeacherScores(
        teacher="math",
        logprobs=[-place / 16 for place in places],
        top_ids=[[ids[place], ids[place] + 1] for place in places],
        top_logprobs=[[-place / 16] * 2 for place in places],
    )
    (asked,) = [request for request in services.model.seen() if request.sampling_params.prompt_logprobs is not None]
    assert (asked.token_ids, asked.sampling_params.max_tokens) == (ids, 1)


@pytest.mark.anyio
async def test_the_trace_has_one_span_of_the_teacher_with_its_kl(services: AgentServices) -> None:
    trajectory = await services.say(ANSWER, teacher={"name": "math", "model": "tiny"}, trace=True)

    spans = {span.name: span for span in services.spans()}
    tokens, prompt = len(trajectory.response_ids), len(trajectory.prompt_ids)
    kl = sum((prompt + place) / 16 - (place + 1) / 8 for place in range(tokens)) / tokens
    assert [span.name for span in services.spans()].count("chat tiny") == 1
    assert f'"kl":{kl}'.replace(" ", "")[:12] in str(dict(spans["teacher"].attributes or {})).replace(" ", "")
    assert trajectory.teacher is not None and trajectory.teacher.top_ids == []


@pytest.mark.anyio
async def test_a_teacher_that_no_service_has_fails_the_trajectory_by_name(services: AgentServices) -> None:
    trajectory = await services.say(ANSWER, teacher={"name": "math", "model": "nobody"})

    assert trajectory.error is not None
    assert (trajectory.stop_reason, trajectory.error.code) == (StopReason.ERROR, ErrorCode.MODEL_NOT_FOUND)
    assert "nobody" in trajectory.error.message
    assert trajectory.teacher is None


@pytest.mark.anyio
async def test_a_rollout_service_of_its_own_is_asked_by_its_name_and_without_our_token(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "the-deployments-own")
    settings = settings.model_copy(update={"teachers": {"elsewhere": "http://teacher"}})
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        tokens = json.loads(request.content)["token_ids"]
        reply = {"request_id": "r", "model": "m", "created": 0, "choices": []}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 0, "total_tokens": len(tokens)}
        scores = {"logprobs": [-1.0] * (len(tokens) - 1), "top_ids": [], "top_logprobs": []}
        return httpx.Response(200, json={**reply, "usage": usage, "prompt_logprobs": scores})

    async with open_services(settings, tokenizer, teacher=httpx.MockTransport(answer)) as services:
        trajectory = await services.say(call("counter") + END, ANSWER, teacher={"name": "t", "model": "elsewhere"})
        agents = (await services.client.get("/agents")).json()

    assert trajectory.error is None and trajectory.teacher is not None
    assert trajectory.teacher.logprobs == [-1.0] * sum(trajectory.response_mask)
    assert [request.headers.get("authorization") for request in asked] == [None]
    assert agents["teachers"] == {"elsewhere": "http://teacher"}


@pytest.mark.anyio
async def test_a_slow_teacher_is_a_named_wait_and_one_that_dies_fails_the_trajectory(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    said, was_seen = list[Wait](), asyncio.Event()

    async def die(request: httpx.Request) -> httpx.Response:
        await was_seen.wait()
        raise httpx.ReadError("the teacher closed the connection", request=request)

    def on_waits(waits: list[Wait]) -> None:
        said.extend(wait for wait in waits if "teacher" in wait.waits_for)
        if said:
            was_seen.set()

    settings = settings.model_copy(update={"teachers": {"elsewhere": "http://teacher"}})
    async with open_services(settings, tokenizer, teacher=httpx.MockTransport(die)) as services:
        services.model.scripts = {0: [ANSWER]}
        request = group(teacher={"name": "math", "model": "elsewhere"}, report_waits_s=0.1)
        async with served(services.agent, lifespan="off") as url:
            try:
                [ended] = [trajectory async for trajectory in AgentClient(url).group(request, on_waits=on_waits)]
            finally:
                await shared_http().aclose()

    assert (said[0].who, said[0].waits_for, said[0].until is not None) == ("rollout 1/7/0", "teacher 'math'", True)
    assert ended.error is not None and (ended.teacher, ended.stop_reason) == (None, StopReason.ERROR)
    assert ended.error.code is ErrorCode.UNAVAILABLE and "http://teacher" in ended.error.message
