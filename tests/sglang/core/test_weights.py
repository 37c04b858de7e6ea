"""Weights under a real SGLang: versions of tokens over updates in flight, and the proof of what it holds."""

import asyncio
from typing import Literal

import pytest

from tests.sglang.sglang_runs import MARKS, busy, next_step, slowed
from tests.vllm.vllm_runs import (
    GREEDY,
    LONG,
    PROMPT,
    Weights,
    assert_split,
    proof_of,
    worst,
)
from trackway.rollout.engines.protocol import Collector
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = MARKS
Mode = Literal["keep", "wait", "abort"]


async def test_an_update_during_generations_splits_each_where_its_logprobs_change(
    engine: SglangEngine, first: Weights, second: Weights
) -> None:
    version = engine.version
    async with slowed(engine):
        tasks = [asyncio.create_task(engine.generate([*PROMPT, n], LONG, f"{n}")) for n in range(3)]
        await busy(engine, running=3)
        await engine.load_weights(second.folder, version + 1, second.proof)
    for n, task in enumerate(tasks):
        assert_split(await task, version, first.model, LONG, [*PROMPT, n])
    assert worst(await engine.generate(PROMPT, GREEDY, "after"), second.model, GREEDY) < 1e-4


async def test_an_update_after_the_prompt_of_another_request_splits_both(
    engine: SglangEngine, first: Weights, second: Weights
) -> None:
    version = engine.version
    async with slowed(engine):
        running = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await busy(engine)
        await next_step(engine)
        late = asyncio.create_task(engine.generate([*PROMPT, 5], LONG, "b"))
        await next_step(engine)
        await engine.load_weights(second.folder, version + 1, second.proof)
    assert_split(await running, version, first.model, LONG)
    assert_split(await late, version, first.model, LONG, [*PROMPT, 5])


async def test_a_stream_says_at_its_end_which_weights_made_which_token(
    engine: SglangEngine, first: Weights, second: Weights
) -> None:
    version, collector = engine.version, Collector()
    async with slowed(engine):
        stream = engine.stream(PROMPT, LONG, "a")
        collector.add(await anext(stream))
        await engine.load_weights(second.folder, version + 1, second.proof)
    async for piece in stream:
        assert piece.version == version
        collector.add(piece)
    assert_split(collector.generation(), version, first.model, LONG)


async def test_weights_that_fail_their_proof_are_taken_back_and_cost_a_request_only_bad_tokens(
    engine: SglangEngine, first: Weights, second: Weights
) -> None:
    version = engine.version
    async with slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await busy(engine)
        with pytest.raises(TrackwayError, match=r"off by 0\.5") as raised:
            await engine.load_weights(second.folder, version + 1, proof_of(second.model, shift=0.5))
        cut = await task
    assert (raised.value.code, engine.version, cut.finish_reason) == (ErrorCode.WEIGHTS_CORRUPT, version, "abort")
    assert [(span.version, span.start, span.end) for span in cut.spans] == [(version, 0, len(cut.token_ids))]
    assert worst(cut, first.model, LONG) < 1e-4
    assert worst(await engine.generate(PROMPT, GREEDY, "b"), first.model, GREEDY) < 1e-4
