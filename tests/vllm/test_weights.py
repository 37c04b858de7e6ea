"""Weights under a real vLLM: between and during generations, versions, prefix cache, proof, the way back."""

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path

import pytest

from tests.vllm.vllm_runs import (
    BLOCK,
    GREEDY,
    LONG,
    MARKS,
    PROMPT,
    SHORT,
    Weights,
    assert_split,
    busy,
    metrics,
    proof_of,
    settings_of,
    slowed,
    stands_still,
    started,
    worst,
)
from tests.waiting import async_until
from tests.weight_proofs import ANY_PROOF
from trackway.rollout.engines.protocol import Collector, Generation, Piece
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = MARKS


async def refused(loading: Coroutine[object, object, None]) -> str:
    with pytest.raises(TrackwayError) as raised:
        await loading
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT
    return raised.value.message


async def listened(engine: VllmEngine) -> tuple[list[Piece], asyncio.Task[None]]:
    """The pieces of a long stream as they come, the first few of them here already, and who listens to it."""
    pieces: list[Piece] = []

    async def listen() -> None:
        async for piece in engine.stream(PROMPT, LONG, "a"):
            pieces.append(piece)  # noqa: PERF401  the test reads them meanwhile

    listening = asyncio.create_task(listen())
    await async_until(lambda: len(pieces) >= 3)
    return pieces, listening


async def test_an_update_between_generations_changes_tokens_and_version(
    engine: VllmEngine, first: Weights, second: Weights
) -> None:
    old = await engine.generate(PROMPT, GREEDY, "a")
    await engine.load_weights(second.folder, engine.version + 1, second.proof)
    new = await engine.generate(PROMPT, GREEDY, "b")
    assert worst(old, first.model, GREEDY) < 1e-4
    assert worst(new, second.model, GREEDY) < 1e-4
    assert [old.spans[0].version + 1] == [new.spans[0].version] == [engine.version]


async def test_an_update_during_a_generation_splits_it_into_spans_and_keeps_its_cache(
    engine: VllmEngine, first: Weights, second: Weights
) -> None:
    async with slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await busy(engine)
        version, before = engine.version, await metrics(engine)
        await engine.load_weights(second.folder, version + 1, second.proof)
    made = await task
    assert_split(made, version, first.model, LONG)
    assert (await metrics(engine))["num_preemptions_total"] == before["num_preemptions_total"]


async def test_a_stream_says_at_its_end_which_weights_made_which_token(
    engine: VllmEngine, first: Weights, second: Weights
) -> None:
    version, collector = engine.version, Collector()
    async with slowed(engine):
        stream = engine.stream(PROMPT, LONG, "a")
        collector.add(await anext(stream))
        await engine.load_weights(second.folder, version + 1, second.proof)  # the stream is read later
    async for piece in stream:
        assert piece.version == version
        collector.add(piece)
    assert_split(collector.generation(), version, first.model, LONG)


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "with-a-request-in-flight"])
async def test_no_prefix_computed_by_old_weights_is_reused(
    engine: VllmEngine, second: Weights, in_flight: bool
) -> None:
    prompt = [7, 9] * BLOCK
    await engine.generate(prompt, SHORT, "a")
    async with slowed(engine):
        others = [asyncio.create_task(engine.generate(prompt, LONG, "b"))] if in_flight else []
        await busy(engine, running=len(others))
        await engine.load_weights(second.folder, engine.version + 1, second.proof)
    await asyncio.gather(*others)
    before = engine.stats().reused_tokens
    made = await engine.generate(prompt, GREEDY, "c")
    assert engine.stats().reused_tokens == before
    assert worst(made, second.model, GREEDY, prompt) < 1e-4
    await engine.generate([*prompt, 5], SHORT, "d")
    assert engine.stats().reused_tokens == before + 2 * BLOCK


async def test_weights_that_fail_their_proof_are_taken_back_and_cost_a_request_only_bad_tokens(
    engine: VllmEngine, first: Weights, second: Weights
) -> None:
    async with slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await busy(engine)
        version = engine.version
        loading = engine.load_weights(second.folder, version + 1, proof_of(second.model, shift=0.5))
        assert "off by 0.5" in await refused(loading)
        cut = await task
    assert (engine.version, cut.finish_reason) == (version, "abort")
    assert [(span.version, span.start, span.end) for span in cut.spans] == [(version, 0, len(cut.token_ids))]
    assert worst(cut, first.model, LONG) < 1e-4
    assert worst(await engine.generate(PROMPT, GREEDY, "b"), first.model, GREEDY) < 1e-4


async def test_a_stream_never_shows_a_token_of_weights_that_failed(
    engine: VllmEngine, first: Weights, second: Weights
) -> None:
    version = engine.version
    async with slowed(engine):
        pieces, listening = await listened(engine)
        await refused(engine.load_weights(second.folder, version + 1, proof_of(second.model, shift=0.5)))
        await listening
    tokens = [token for piece in pieces for token in piece.token_ids]
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    assert pieces[-1].finish_reason == "abort"
    assert {piece.version for piece in pieces} == {version}
    assert worst(Generation(tokens, logprobs, "abort", []), first.model, LONG) < 1e-4


async def test_tied_weights_without_their_head_are_caught(
    engine: VllmEngine, first: Weights, second: Weights, without_head: Path
) -> None:
    """vLLM's CPU build takes the new body and keeps the old head, and only a line in its log says so."""
    version = engine.version
    message = await refused(engine.load_weights(without_head, version + 1, second.proof))
    assert "lm_head.weight" in message
    assert engine.version == version
    assert worst(await engine.generate(PROMPT, GREEDY, "a"), first.model, GREEDY) < 1e-4
    await engine.load_weights(second.folder, version + 1, second.proof)
    assert worst(await engine.generate(PROMPT, GREEDY, "b"), second.model, GREEDY) < 1e-4


async def test_a_folder_that_vllm_cannot_load_is_refused_before_it_sees_it(engine: VllmEngine, tmp_path: Path) -> None:
    """A reload that raises inside a worker would end the whole server."""
    await refused(engine.load_weights(tmp_path / "nowhere", engine.version + 1, ANY_PROOF))
    assert len((await engine.generate(PROMPT, SHORT, "a")).token_ids) == 8


async def test_an_update_under_a_paused_engine_leaves_it_paused(engine: VllmEngine, second: Weights) -> None:
    async with slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await busy(engine)
        await engine.pause("keep")
        version = engine.version
        await engine.load_weights(second.folder, version + 1, second.proof)
        assert engine.paused
        assert await stands_still(engine)
        assert not task.done()
    await engine.resume()
    assert [span.version for span in (await task).spans] == [version, version + 1]


async def test_without_the_old_weights_to_go_back_to_the_engine_serves_nothing(
    engine: VllmEngine, first: Weights, second: Weights, tmp_path: Path
) -> None:
    """On an adapter of its own, attached to the same server."""
    settings = settings_of(first.folder, tmp_path / "log", engine_url=engine.http.base_url)
    pruned = tmp_path / "1"
    shutil.copytree(first.folder, pruned)
    async with started(VllmEngine(settings)) as fresh:
        await fresh.load_weights(pruned, 1, first.proof)
        shutil.rmtree(pruned)
        with pytest.raises(TrackwayError, match="pruned"):
            await fresh.load_weights(second.folder, 2, proof_of(second.model, shift=0.5))
        assert fresh.stuck_for() == float("inf")
        with pytest.raises(TrackwayError, match="pruned") as raised:
            await fresh.generate(PROMPT, SHORT, "a")
        assert raised.value.code is ErrorCode.UNAVAILABLE


async def test_weights_that_come_between_two_stages_of_a_wake_up_serve_after_it(
    engine: VllmEngine, base: Path, second: Weights, tmp_path: Path
) -> None:
    """The calls are real; on the CPU no memory moves."""
    settings = settings_of(base, tmp_path / "log", engine_url=engine.http.base_url, enable_sleep=True)
    async with started(VllmEngine(settings)) as fresh:
        await fresh.pause("abort")
        await fresh.sleep(["weights", "kv_cache"])
        assert await fresh.http.get("/is_sleeping") == {"is_sleeping": True}
        await fresh.wake_up(["weights"])
        await fresh.load_weights(second.folder, 1, second.proof)
        assert await fresh.http.get("/is_sleeping") == {"is_sleeping": True}
        await fresh.wake_up(["kv_cache"])
        await fresh.resume()
        made = await fresh.generate(PROMPT, GREEDY, "a")
    assert made.spans[0].version == 1
    assert worst(made, second.model, GREEDY) < 1e-4
