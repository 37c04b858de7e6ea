"""One request answered by something that generates, recorded, and answered again from the record."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from tests.services.model_api.scripted_model import ScriptedModel, Tokens
from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.anthropic import MessagesResponseBuilder, chat_of_messages
from trackway.model_api.choices import jobs_of, respond, respond_again
from trackway.model_api.openai.completions import ChatResponseBuilder
from trackway.model_api.response_builder import ResponseBuilder
from trackway.model_api.stream_decoder import Delta
from trackway.wire.anthropic import MessagesRequest
from trackway.wire.openai import ChatRequest
from trackway.wire.rollout import GenerateRequest
from trackway.wire.trajectory import WeightSpan

pytestmark = pytest.mark.anyio

BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "1+1?"}],
    "tools": [{"type": "function", "function": {"name": "add"}}],
}
TEXT = 'Wait.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
Builders = list[ChatResponseBuilder]
Record = Callable[[list[Delta]], None]


async def answered(handle: Callable[[Request], object], stream: bool) -> str:
    """The text of the answer to BODY over HTTP."""
    app = FastAPI()
    app.post("/", response_model=None)(handle)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://model") as client:
        return (await client.post("/", json={**BODY, "stream": stream})).text


def contents(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of an answer, whole or streamed."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    key = "delta" if events else "message"
    messages = [json.loads(event)["choices"][0][key] for event in events or [text]]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    return "".join(message.get("content") or "" for message in messages), [
        (call["name"], call["arguments"]) for call in calls
    ]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_recorded_answer_can_be_given_again_without_a_generation(
    tokenizer: ChatTokenizer, stream: bool, again: bool
) -> None:
    says = tokenizer.encode(TEXT, add_special_tokens=False)
    model, builders, recorded = ScriptedModel(says), list[ChatResponseBuilder](), list[Delta]()

    def builder(stream: bool) -> ChatResponseBuilder:
        request = ChatRequest.model_validate({**BODY, "stream": stream})
        builders.append(ChatResponseBuilder(request, tokenizer, [7, 8]))
        return builders[-1]

    async def first(request: Request) -> Response:
        body = ChatRequest.model_validate({**BODY, "stream": stream})
        jobs = jobs_of("name", [[7, 8]], body, 99, tokenizer)
        return await respond(request, model, builder(stream), jobs, stream=stream, record=recorded.extend)

    async def second(request: Request) -> Response:
        return await respond_again(builder(again), recorded, stream=again)

    said = contents(await answered(first, stream))
    assert said == ("Wait.", [("add", '{"a": 1}')])
    [delta] = recorded
    assert (delta.token_ids, delta.logprobs) == (says, [-(place + 1) / 8 for place in range(len(says))])
    assert [(span.version, span.start, span.end) for span in delta.spans] == [(5, 0, len(says))]
    assert contents(await answered(second, again)) == said
    assert [request.token_ids for request in model.requests] == [[7, 8]]
    message = builders[0].messages[0]
    assert (message.content, [call.function.name for call in message.tool_calls or []]) == (*said[:1], ["add"])


async def test_a_stream_shows_weight_versions_once_they_are_final(tokenizer: ChatTokenizer) -> None:
    class Corrected(ScriptedModel):
        async def stream(self, request: GenerateRequest) -> AsyncGenerator[Tokens]:
            spans = [WeightSpan(version=5, start=0, end=1), WeightSpan(version=6, start=1, end=len(self.says))]
            async for tokens in super().stream(request):
                yield replace(tokens, weight_versions=spans) if tokens.finish_reason else tokens

    model = Corrected(tokenizer.encode("No.", add_special_tokens=False))
    recorded = list[Delta]()

    async def handle(http: Request) -> Response:
        request = ChatRequest.model_validate({**BODY, "stream": True, "return_token_ids": True})
        jobs = jobs_of("name", [[7]], request, 99, tokenizer)
        builder = ChatResponseBuilder(request, tokenizer, [7])
        return await respond(http, model, builder, jobs, stream=True, record=recorded.extend)

    lines = (await answered(handle, stream=True)).splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    final = [{"version": 5, "start": 0, "end": 1}, {"version": 6, "start": 1, "end": len(model.says)}]
    assert [token for choice in choices for token in choice["token_ids"]] == model.says
    assert [choice["weight_versions"] for choice in choices if "weight_versions" in choice] == [final]
    assert [span.model_dump() for span in recorded[0].spans] == final


async def test_an_answer_is_recorded_before_the_client_can_see_its_end(tokenizer: ChatTokenizer) -> None:
    model = ScriptedModel(tokenizer.encode(TEXT, add_special_tokens=False))
    request = ChatRequest.model_validate({**BODY, "stream": True})
    recorded = list[Delta]()
    seen = list[tuple[bool, bool]]()

    async def handle(http: Request) -> Response:
        builder = ChatResponseBuilder(request, tokenizer, [7])
        jobs = jobs_of("name", [[7]], request, 99, tokenizer)
        response = await respond(http, model, builder, jobs, stream=True, record=recorded.extend)
        lines = response.body_iterator  # pyright: ignore[reportAttributeAccessIssue]
        seen.extend([('"finish_reason":"tool_calls"' in line, bool(recorded)) async for line in lines])
        return Response("{}", media_type="application/json")

    await answered(handle, True)
    assert [recorded for is_end, recorded in seen if is_end] == [True]
    assert not seen[0][1]


class SlowModel(ScriptedModel):
    """Streams one token for each item put into `go_on`."""

    def __init__(self, says: list[int]) -> None:
        super().__init__(says)
        self.go_on: asyncio.Queue[None] = asyncio.Queue()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Tokens]:
        async for tokens in super().stream(request):
            await self.go_on.get()
            yield tokens


MESSAGES = {"model": "tiny", "messages": BODY["messages"], "max_tokens": 9, "stream": True}
COMMENT = ": keep-alive\n\n"
PING = 'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(("is_anthropic", "later"), [(False, COMMENT), (True, PING)])
async def test_a_stream_that_waits_sends_what_keeps_its_connection_open(
    tokenizer: ChatTokenizer, is_anthropic: bool, later: str
) -> None:
    model = SlowModel(tokenizer.encode("ok<|im_end|>", add_special_tokens=False))
    body = MessagesRequest.model_validate(MESSAGES)
    chat = chat_of_messages(body)
    lines: list[str] = []

    async def handle(http: Request) -> Response:
        builder: ResponseBuilder = ChatResponseBuilder(chat, tokenizer, [7])
        if is_anthropic:
            builder = MessagesResponseBuilder(body, chat, tokenizer, [7])
        jobs = jobs_of("name", [[7]], chat, 99, tokenizer)
        response = await respond(http, model, builder, jobs, stream=True, keep_alive_s=0.01)
        async for line in response.body_iterator:  # pyright: ignore[reportAttributeAccessIssue]
            waits = line in (COMMENT, later) and lines[-1:] == [line]
            lines.append(line)
            if waits:  # the second in a row
                model.go_on.put_nowait(None)
        return Response("{}", media_type="application/json")

    await answered(handle, True)
    assert lines[:2] == [COMMENT, COMMENT]
    assert later in lines[2:]
    said = "".join(line for line in lines if line not in (COMMENT, PING))
    assert ('"text":"ok"' if is_anthropic else '"content":"ok"') in said
