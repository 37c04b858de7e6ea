"""Streams by OpenAI's asynchronous client: they come at once, end with who listens, and say when they fail."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.openai_server import CHAT
from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from tests.waiting import async_until

pytestmark = pytest.mark.anyio

ENDLESS = [64, 65]


@pytest.fixture
async def caller(scripted_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{scripted_url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


async def test_the_asynchronous_client_gets_the_same_whole_and_streamed(
    caller: AsyncOpenAI, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says = tokenizer.encode("Grüße 🎉 an alle<|im_end|>", add_special_tokens=False)
    whole = await caller.chat.completions.create(model="tiny", messages=CHAT)
    stream = await caller.chat.completions.create(model="tiny", messages=CHAT, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content == "Grüße 🎉 an alle"
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)


async def test_many_calls_at_once_are_all_answered(
    caller: AsyncOpenAI, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    answers = await asyncio.gather(
        *(caller.chat.completions.create(model="tiny", messages=CHAT, n=2) for _ in range(20))
    )
    assert [choice.message.content for answer in answers for choice in answer.choices] == ["ok"] * 40


@pytest.mark.parametrize("n", [1, 3])
async def test_who_stops_listening_ends_the_generation(caller: AsyncOpenAI, engine: ScriptedEngine, n: int) -> None:
    engine.says, engine.endless = ENDLESS, True
    stream = await caller.chat.completions.create(model="tiny", messages=CHAT, stream=True, n=n)
    async with stream:
        async for _ in stream:
            break
    await _idle(engine)


@pytest.mark.parametrize("stop", [None, "never"])
async def test_who_does_not_wait_for_a_whole_answer_ends_its_generation_too(
    caller: AsyncOpenAI, engine: ScriptedEngine, stop: str | None
) -> None:
    engine.says, engine.endless = ENDLESS, True
    with pytest.raises(openai.APITimeoutError):
        await caller.with_options(timeout=0.3).chat.completions.create(model="tiny", messages=CHAT, stop=stop)
    await _idle(engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_generation(caller: AsyncOpenAI, engine: ScriptedEngine, stream: bool) -> None:
    engine.says, engine.endless = ENDLESS, True
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "stop": "___"}
    if stream:
        chunks = [chunk.choices[0] async for chunk in await caller.chat.completions.create(**asked, stream=True)]
        text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        choice = (await caller.chat.completions.create(**asked)).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ("^", "stop")
    await _idle(engine)


async def test_a_failure_on_the_way_is_an_error_of_the_stream(
    caller: AsyncOpenAI, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says, engine.breaks_after = tokenizer.encode("one two three", add_special_tokens=False), 3
    stream = await caller.completions.create(model="tiny", prompt="1", stream=True)
    pieces: list[str] = []
    with pytest.raises(openai.APIError, match="ZeroDivisionError: the engine broke") as raised:
        async for chunk in stream:
            pieces.append(chunk.choices[0].text)  # noqa: PERF401  the pieces before the failure count
    assert (len(pieces), raised.value.code, raised.value.type) == (3, "internal", "server_error")


async def test_a_generation_cut_on_its_way_is_an_error_of_the_stream(
    caller: AsyncOpenAI, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says, engine.ends = tokenizer.encode("one", add_special_tokens=False), "abort"
    stream = await caller.chat.completions.create(model="tiny", messages=CHAT, stream=True)
    with pytest.raises(openai.APIError, match="the generation was aborted"):
        async for _ in stream:
            pass


async def test_the_stream_is_server_sent_events_that_end_with_done(
    scripted_url: str, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{scripted_url}/v1/completions", json={"model": "tiny", "prompt": "1", "stream": True}
        )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert all(event.startswith('data: {"id":"cmpl-') for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]


async def test_a_keyed_stream_is_whole_and_runs_once(
    caller: AsyncOpenAI, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    for _ in range(2):
        stream = await caller.completions.create(
            model="tiny", prompt="1", stream=True, extra_headers={"Idempotency-Key": "keyed-stream"}
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "ok"
    assert len(engine.calls) == 1


async def _idle(engine: ScriptedEngine) -> None:
    assert await asyncio.to_thread(engine.ended_early.wait, 5.0)
    await async_until(lambda: not engine.running)
