"""Weights under a real SGLang: versions of tokens over updates in flight, and the proof of what it holds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest

from tests.sglang.sglang_runs import MARKS, busy, settings_of, slowed
from tests.vllm.vllm_runs import (
    DEADLINE_S,
    GREEDY,
    LONG,
    PROMPT,
    SHORT,
    Weights,
    assert_split,
    logprobs_of,
    proof_of,
    worst,
)
from trackway.clients.rollout import RolloutClient
from trackway.clients.weights import WeightStore
from trackway.rollout.app import create_app
from trackway.rollout.engines.generation_builder import Collector
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateRequest, PausedReply

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


@asynccontextmanager
async def serving(engine: SglangEngine, base: Path, folder: Path, mode: Mode) -> AsyncIterator[RolloutClient]:
    """The service, attached to the session's server and following a store in `folder`."""
    settings = settings_of(
        base, folder / "log", engine_url=engine.http.base_url, weights_url=str(folder / "store"), update_mode=mode
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rollout") as http:
            yield RolloutClient("http://rollout", http)


async def under_way(client: RolloutClient, mode: Mode) -> bool:
    """Whether the update is done or, in the mode `wait`, waits for the generation."""
    if mode == "wait":
        return (await client.call("GET", "/is_paused", reply=PausedReply)).is_paused
    return (await client.weights()).version == 1


@pytest.mark.parametrize(("mode", "versions"), [("keep", [0, 1]), ("abort", [0, 1]), ("wait", [0])])
async def test_versions_are_exact_over_an_update_in_each_mode(
    engine: SglangEngine, base: Path, first: Weights, second: Weights, tmp_path: Path, mode: Mode, versions: list[int]
) -> None:
    async with serving(engine, base, tmp_path, mode) as client:
        async with slowed(engine):
            call = asyncio.create_task(client.generate(GenerateRequest(token_ids=PROMPT, sampling_params=LONG)))
            await busy(engine)
            WeightStore(str(tmp_path / "store")).publish(1, "run", second.folder, proof=second.proof)
            async with asyncio.timeout(DEADLINE_S):
                while not await under_way(client, mode):
                    await asyncio.sleep(0.02)
        choice = (await call).choices[0]
        request = GenerateRequest(token_ids=PROMPT, sampling_params=SHORT, min_weight_version=1)
        later = (await client.generate(request)).choices[0]

    assert (choice.finish_reason, len(choice.token_ids)) == ("length", LONG.max_tokens)
    assert [span.version for span in choice.weight_versions] == versions
    cut = choice.weight_versions[0].end
    old = logprobs_of(first.model, [*PROMPT, *choice.token_ids], len(PROMPT), LONG)
    new = logprobs_of(second.model, [*PROMPT, *choice.token_ids], len(PROMPT), LONG)
    assert choice.token_logprobs[:cut] == pytest.approx(old[:cut], abs=1e-4)
    if mode == "abort":  # new weights compute the tokens of the old ones again
        assert choice.token_logprobs[cut:] == pytest.approx(new[cut:], abs=1e-4)
    if mode != "wait":
        assert abs(choice.token_logprobs[cut] - old[cut]) > 1e-4
    assert [span.version for span in later.weight_versions] == [1]


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
