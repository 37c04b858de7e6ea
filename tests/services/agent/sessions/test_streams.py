"""Streams of a session: sent as the model writes, recorded as they were sent."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message

from tests.services.agent.agent_services import AgentServices
from tests.services.agent.replaceable import Answer
from tests.services.agent.scripted_model import END
from tests.services.agent.sessions.test_session import (
    ANSWER,
    COUNT,
    QUESTION,
    TOOLS,
    chat,
    ended,
    message_of,
    opened,
    retry,
    state,
)
from tests.services.agent.streaming_transport import StreamingTransport, scope_of
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.agent.sessions import session
from trackway.model_api import choices
from trackway.wire.sessions import NodeKind, SessionAccess
from trackway.wire.trajectory import WeightSpan

pytestmark = [pytest.mark.anyio, ENDS_SOON]


@pytest.fixture
def model(services: AgentServices) -> "asyncio.Queue[None]":
    """Each item lets the model say one token; the client and the agent see each as it comes."""
    services.rollout.transport = StreamingTransport
    services.model.told = asyncio.Queue()
    return services.model.told


def say(model: "asyncio.Queue[None]", tokens: int) -> None:
    for _ in range(tokens):
        model.put_nowait(None)


@asynccontextmanager
async def streamed(services: AgentServices, access: SessionAccess, **body: Any) -> AsyncIterator[AsyncIterator[str]]:
    """The text of the answer, as it comes."""
    body = {"model": "any", "messages": QUESTION, "stream": True, **body}
    transport = StreamingTransport(services.agent)
    async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
        path = f"/sessions/{access.session_id}/v1/chat/completions"
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            yield _texts(response)


async def _texts(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            assert "error" not in line, line
            for choice in json.loads(line[6:])["choices"]:
                yield choice["delta"].get("content") or ""


async def taken(texts: AsyncIterator[str], length: int) -> str:
    text = ""
    while len(text) < length:
        text += await anext(texts)
    return text


async def test_a_stream_is_sent_as_the_model_writes(services: AgentServices, model: "asyncio.Queue[None]") -> None:
    access = await opened(services, ANSWER)
    say(model, 3)
    async with streamed(services, access) as texts:
        assert await taken(texts, 3) == "###"
        say(model, len(ANSWER))
        assert "".join([text async for text in texts]) == "# 18"

    trajectory = await ended(services, access)

    ids = services.model.encode(ANSWER)
    assert trajectory.response_ids == ids and trajectory.response_mask == [1] * len(ids)
    assert trajectory.response_logprobs == [-(place + 1) / 8 for place in range(len(ids))]
    assert trajectory.weight_versions == [WeightSpan(version=3, start=0, end=len(ids))]


async def test_a_stream_that_its_client_leaves_is_marked_and_not_trained_and_the_retry_is_new(
    services: AgentServices, model: "asyncio.Queue[None]"
) -> None:
    access = await opened(services, COUNT, ANSWER)
    say(model, 3)
    async with streamed(services, access) as texts:
        await taken(texts, 3)
    await async_until(lambda: len(services.model.aborted) == 1)
    left = (await state(services, access)).nodes[-1]
    say(model, len(ANSWER))
    async with streamed(services, access) as texts:
        assert "".join([text async for text in texts]) == "#### 18"

    assert (left.kind, left.ids, left.finish_reason) == (NodeKind.SAMPLED, services.model.encode(COUNT)[:3], "abort")
    assert (left.delivered, left.logprobs) == (False, [-0.125, -0.25, -0.375])
    kinds = [node.kind for node in (await state(services, access)).nodes]
    assert kinds == [NodeKind.PROMPT, NodeKind.SAMPLED, NodeKind.SAMPLED]
    trajectory = await ended(services, access)
    assert [row.response_ids for row in trajectory.rows] == [services.model.encode(ANSWER)]


async def test_a_stop_string_ends_the_generation_with_the_token_that_completes_it(
    services: AgentServices, model: "asyncio.Queue[None]"
) -> None:
    access = await opened(services, COUNT)
    say(model, len("I will"))
    async with streamed(services, access, stop=["will"], tools=TOOLS) as texts:
        assert "".join([text async for text in texts]).strip() == "I"

    trajectory = await ended(services, access)

    assert trajectory.response_ids == services.model.encode("I will")
    assert trajectory.error is None and len(services.model.aborted) == 1


async def test_a_stream_that_breaks_goes_on_with_the_recorded_tokens(
    services: AgentServices, model: "asyncio.Queue[None]"
) -> None:
    async def breaks_after_two(answer: Answer) -> httpx.Response:
        response = await answer()
        return httpx.Response(200, stream=_Cut(response, 2))

    services.rollout.faults = [breaks_after_two]
    access = await opened(services, COUNT, ANSWER)
    say(model, 2)
    async with streamed(services, access) as texts:
        assert await taken(texts, 2) == "I "
        await async_until(lambda: len(services.model.aborted) == 1)
        say(model, len(ANSWER))
        assert "".join([text async for text in texts]) == "#### 18"

    trajectory = await ended(services, access)

    encode = services.model.encode
    assert trajectory.response_ids == encode("I ") + encode(ANSWER)
    assert [(span.version, span.start) for span in trajectory.weight_versions] == [(3, 0), (4, 2)]
    first, second = services.model.seen()
    assert second.token_ids == first.token_ids + encode("I ")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep-alives come soon, and clients that leave are noticed before."""
    monkeypatch.setattr(session, "KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr(choices, "WATCH_AFTER_S", 0.0)


@asynccontextmanager
async def retried(
    services: AgentServices, access: SessionAccess, route: str, **changes: Any
) -> AsyncIterator[AsyncIterator[str]]:
    """The lines after the third keep-alive of a streamed call that waits; by default a retry of the one in progress."""
    body = {"model": "any", "max_tokens": 64, **ROUTES[route], "stream": True, **changes}
    url = f"http://agent/sessions/{access.session_id}/v1/{route}"
    async with (
        httpx.AsyncClient(transport=StreamingTransport(services.agent)) as client,
        client.stream("POST", url, json=body, headers=retry(1)) as response,
    ):
        kind = response.headers["content-type"].partition(";")[0]
        assert (response.status_code, kind) == (200, "text/event-stream")
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(6)] == [": keep-alive", ""] * 3
        yield lines


def texts_of(answer: str) -> str:
    """The text of an answer, whole or streamed, in any route's format."""
    texts = re.findall(r'"(?:text|content|delta)":"([^"]*)"', answer)
    return "".join(texts) if "data: " in answer else texts[0]


VOTES = ["#### 1", "#### 2", "#### 3"]


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions", "responses", "messages"])
async def test_parallel_equal_calls_are_answered_one_by_one(
    services: AgentServices, route: str, stream: bool, is_fast: bool
) -> None:
    access = await opened(services, *(vote + END for vote in (*VOTES, *VOTES)))
    body = {"model": "any", "max_tokens": 64, "stream": stream, **VOTED[route]}
    url = f"/sessions/{access.session_id}/v1/{route}"
    kind = {"content-type": "application/json" if is_fast else "application/json; charset=utf-8"}

    parallel = await asyncio.gather(*(services.client.post(url, content=json.dumps(body), headers=kind) for _ in VOTES))
    one_by_one = [await services.client.post(url, content=json.dumps(body), headers=kind) for _ in VOTES]

    for answers in (parallel, one_by_one):
        assert [answer.status_code for answer in answers] == [200] * 3
        assert sorted(texts_of(answer.text)[-len(VOTES[0]) :] for answer in answers) == VOTES
    encode = services.model.encode
    rows = sorted((row.response_ids for row in (await ended(services, access)).rows), reverse=False)
    assert rows == sorted([encode(vote + END) for vote in VOTES] * 2)


@pytest.mark.usefixtures("soon")
async def test_each_vote_whose_client_left_has_a_retry_of_its_own(
    services: AgentServices, model: "asyncio.Queue[None]"
) -> None:
    access = await opened(services, *(vote + END for vote in (*VOTES, *VOTES)))
    for left in range(3):
        say(model, 1)
        async with streamed(services, access) as texts:
            await taken(texts, 1)
        await async_until(lambda left=left: len(services.model.aborted) == left + 1)

    say(model, 3 * len(VOTES[0] + END))
    answers = await asyncio.gather(*(chat(services, access, QUESTION, retries=1) for _ in VOTES))

    assert sorted(message_of(answer)["content"] for answer in answers) == VOTES
    assert NodeKind.RETRY not in [node.kind for node in (await state(services, access)).nodes]


@pytest.mark.usefixtures("soon")
async def test_each_vote_in_progress_may_be_retried(services: AgentServices, model: "asyncio.Queue[None]") -> None:
    """As by clients behind a proxy that keeps the connections of those that have left."""
    access = await opened(services, *(vote + END for vote in VOTES))
    calls = [asyncio.create_task(chat(services, access, QUESTION, max_tokens=64)) for _ in VOTES]
    await async_until(lambda: len(services.model.requests) == 3)
    async with AsyncExitStack() as stack:
        retries = [await stack.enter_async_context(retried(services, access, "chat/completions")) for _ in VOTES]
        say(model, 3 * len(VOTES[0] + END))
        again = ["\n".join([line async for line in lines]) for lines in retries]

    assert sorted(message_of(answer)["content"] for answer in await asyncio.gather(*calls)) == VOTES
    assert sorted(map(texts_of, again)) == VOTES
    assert len(services.model.requests) == 3


async def test_an_answer_that_found_no_client_is_kept_for_the_same_body(services: AgentServices) -> None:
    access = await opened(services, "#### 1" + END, "#### 2" + END)
    await answered_a_client_that_left(services, access)
    lost = (await state(services, access)).nodes[-1]

    answers = [message_of(await chat(services, access, QUESTION))["content"] for _ in range(2)]

    assert (lost.finish_reason, lost.delivered) == ("stop", False)
    assert answers == ["#### 1", "#### 2"]
    kinds = [node.kind for node in (await state(services, access)).nodes]
    assert kinds == [NodeKind.PROMPT, NodeKind.SAMPLED, NodeKind.RETRY, NodeKind.SAMPLED]
    encode = services.model.encode
    rows = [row.response_ids for row in (await ended(services, access)).rows]
    assert rows == [encode("#### 1" + END), encode("#### 2" + END)]


async def answered_a_client_that_left(services: AgentServices, access: SessionAccess, **body: Any) -> int:
    """The status of the answer to a client that leaves as soon as its call is sent."""
    url = f"http://agent/sessions/{access.session_id}/v1/chat/completions"
    request = httpx.Request("POST", url, json={"model": "any", "messages": QUESTION, **body})
    messages = iter([{"type": "http.request", "body": request.content, "more_body": False}])
    sent: list[Message] = []

    async def receive() -> Message:
        return next(messages, {"type": "http.disconnect"})  # however often it is asked for, as a server says it

    async def send(message: Message) -> None:
        sent.append(message)

    await services.agent(scope_of(request), receive, send)
    return sent[0]["status"]


ROUTES = {
    "chat/completions": {"messages": QUESTION},
    "completions": {"prompt": "9+9?"},
    "messages": {"messages": QUESTION},
}


VOTED = {**ROUTES, "responses": {"input": "9+9?"}}
VOTED["responses"]["max_output_tokens"] = 64


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("soon")
async def test_a_streamed_retry_is_kept_alive_until_its_first_call_is_answered(
    services: AgentServices, model: "asyncio.Queue[None]", route: str
) -> None:
    access = await opened(services, ANSWER, bounds={"max_calls": 1})
    body = {"model": "any", "max_tokens": 64, **ROUTES[route]}
    first = asyncio.create_task(services.client.post(f"/sessions/{access.session_id}/v1/{route}", json=body))
    await async_until(lambda: len(services.model.requests) == 1)
    async with retried(services, access, route) as lines:
        say(model, len(ANSWER))
        rest = [line async for line in lines]

    assert (await first).status_code == 200 and "#### 18" in (await first).text
    assert "error" not in "".join(rest) and "18" in "".join(rest)
    kinds = [node.kind for node in (await state(services, access)).nodes]
    assert kinds == [NodeKind.PROMPT, NodeKind.SAMPLED, NodeKind.RETRY]
    assert len(services.model.requests) == 1


@pytest.mark.usefixtures("soon")
async def test_a_client_that_leaves_while_its_retry_waits_leaves_nothing_behind(
    services: AgentServices, model: "asyncio.Queue[None]"
) -> None:
    access = await opened(services, ANSWER, bounds={"max_calls": 1})
    first = asyncio.create_task(chat(services, access, QUESTION, max_tokens=64))
    await async_until(lambda: len(services.model.requests) == 1)
    async with retried(services, access, "chat/completions"):
        running = asyncio.all_tasks()
    async with retried(services, access, "chat/completions"):
        pass
    await async_until(lambda: asyncio.all_tasks() < running)
    say(model, len(ANSWER))

    assert message_of(await first)["content"] == "#### 18"
    assert message_of(await chat(services, access, QUESTION, retries=1, max_tokens=64))["content"] == "#### 18"
    kinds = [node.kind for node in (await state(services, access)).nodes]
    assert kinds == [NodeKind.PROMPT, NodeKind.SAMPLED, NodeKind.RETRY]
    assert (await ended(services, access)).response_ids == services.model.encode(ANSWER)


@pytest.mark.usefixtures("soon")
async def test_a_waiting_retry_is_generated_itself_when_its_first_client_leaves(
    services: AgentServices, model: "asyncio.Queue[None]"
) -> None:
    access = await opened(services, COUNT, ANSWER)
    async with AsyncExitStack() as first:
        say(model, 1)
        await taken(await first.enter_async_context(streamed(services, access, max_tokens=64)), 1)
        async with retried(services, access, "chat/completions") as lines:
            await first.aclose()
            say(model, len(ANSWER))
            rest = "".join([line async for line in lines])

    assert "error" not in rest and rest.endswith("data: [DONE]")
    trajectory = await ended(services, access)
    assert [row.response_ids for row in trajectory.rows] == [services.model.encode(ANSWER)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("soon")
async def test_a_waiting_retry_ends_with_an_event_of_its_api_when_the_session_does(
    services: AgentServices, model: "asyncio.Queue[None]", route: str
) -> None:
    access = await opened(services, ANSWER)
    body = {"model": "any", "max_tokens": 64, **ROUTES[route]}
    first = asyncio.create_task(services.client.post(f"/sessions/{access.session_id}/v1/{route}", json=body))
    await async_until(lambda: len(services.model.requests) == 1)
    async with retried(services, access, route) as lines:
        await services.client.post(f"/sessions/{access.session_id}/end")
        rest = [line async for line in lines]

    assert (await first).status_code == 400
    [data] = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert data["error"]["type"] == "invalid_request_error" and "the session has ended" in data["error"]["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("soon")
async def test_a_stream_that_waits_for_the_token_budget_is_kept_alive_and_gets_what_is_left(
    services: AgentServices, model: "asyncio.Queue[None]", route: str
) -> None:
    said = services.model.encode(ANSWER)
    left = len(said) - 2
    most = len(said) + left
    access = await opened(services, ANSWER, ANSWER, bounds={"max_tokens": most})
    first = asyncio.create_task(chat(services, access, QUESTION, max_tokens=most))
    await async_until(lambda: len(services.model.requests) == 1)
    async with retried(services, access, route, max_tokens=most + 1) as lines:
        say(model, 2 * len(ANSWER))
        rest = [line async for line in lines]

    assert message_of(await first)["content"] == "#### 18" and "error" not in "".join(rest)
    assert [request.sampling_params.max_tokens for request in services.model.seen()] == [most, left]
    nodes = (await state(services, access)).nodes
    assert [node.ids for node in nodes if node.kind is NodeKind.SAMPLED] == [said, said[:left]]


@pytest.mark.usefixtures("soon")
async def test_a_client_that_leaves_while_its_call_waits_for_the_token_budget_leaves_nothing_behind(
    services: AgentServices, model: "asyncio.Queue[None]"
) -> None:
    access = await opened(services, ANSWER, ANSWER, bounds={"max_tokens": 64, "max_calls": 2})
    first = asyncio.create_task(chat(services, access, QUESTION, max_tokens=64))
    await async_until(lambda: len(services.model.requests) == 1)
    before = asyncio.all_tasks()
    async with retried(services, access, "chat/completions", max_tokens=63):
        pass
    assert await answered_a_client_that_left(services, access, max_tokens=62) == 400
    await async_until(lambda: asyncio.all_tasks() <= before)
    say(model, 64)

    assert (await first).status_code == 200
    assert message_of(await chat(services, access, QUESTION, max_tokens=61))["content"] == "#### 18"
    assert len(services.model.requests) == 2


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("soon")
async def test_a_stream_that_waits_for_the_token_budget_ends_with_an_event_of_its_api_when_the_session_does(
    services: AgentServices, model: "asyncio.Queue[None]", route: str
) -> None:
    access = await opened(services, ANSWER, bounds={"max_tokens": 64})
    first = asyncio.create_task(chat(services, access, QUESTION, max_tokens=64))
    await async_until(lambda: len(services.model.requests) == 1)
    async with retried(services, access, route, max_tokens=63) as lines:
        await services.client.post(f"/sessions/{access.session_id}/end")
        rest = [line async for line in lines]

    assert (await first).status_code == 400
    [data] = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert data["error"]["type"] == "invalid_request_error" and "the session has ended" in data["error"]["message"]


class _Cut(httpx.AsyncByteStream):
    """The first lines of a response, and then a broken connection."""

    def __init__(self, response: httpx.Response, lines: int) -> None:
        self._response, self._lines = response, lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for line in self._response.aiter_lines():
            yield f"{line}\n".encode()
            count += 1
            if count == self._lines:
                break
        raise httpx.ReadError("connection reset")

    async def aclose(self) -> None:
        await self._response.aclose()


async def test_a_server_without_streams_answers_whole(services: AgentServices, model: "asyncio.Queue[None]") -> None:
    async def no_such_route(answer: Answer) -> httpx.Response:
        return httpx.Response(404, json={"detail": "Not Found"}, request=httpx.Request("POST", "http://rollout"))

    services.rollout.faults = [no_such_route]
    say(model, len(ANSWER))
    access = await opened(services, "#### 18" + END)
    async with streamed(services, access) as texts:
        assert "".join([text async for text in texts]) == "#### 18"

    assert services.rollout.paths == ["POST generate_stream", "POST generate"]
    assert (await ended(services, access)).response_ids == services.model.encode(ANSWER)
