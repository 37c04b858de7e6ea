"""SGLang's protocol: weights change under requests in flight, and no token of refused ones gets out."""

import asyncio
import math
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.services.rollout.engines.remote.sglang.sglang_cases import (
    LONG,
    PROMPT,
    answer,
    in_flight,
    params,
    proof,
    sent,
)
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from tests.waiting import async_until
from trackway.rollout.engines.protocol import Generation, Piece
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import WeightSpan

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
Folder = Callable[[int], Path]
Starts = Callable[..., AbstractAsyncContextManager[SglangEngine]]


async def test_an_aborted_stream_says_which_tokens_are_new(engine: SglangEngine, fake: Fake, folder: Folder) -> None:
    task = await in_flight(engine, fake)
    await engine.load_weights(folder(4), 1, proof(4))
    met = len(fake.requests[0].output)
    await async_until(lambda: len(fake.requests[0].output) > met)
    await engine.abort("long")
    made = await task
    old, new = made.spans
    assert (made.finish_reason, old.version, new.version, new.end) == ("abort", 0, 1, len(made.token_ids))
    before = answer(0, old.end)
    assert made.token_ids == before + answer(4, new.end - new.start, PROMPT + before)


async def test_an_update_ends_requests_whose_tokens_an_overlapping_server_counts_wrongly(
    starts: Starts, fake: Fake, folder: Folder
) -> None:
    fake.overlaps = True
    async with starts() as engine:
        task = await in_flight(engine, fake)
        await engine.load_weights(folder(4), 1, proof(4))
        made = await task
    assert (made.finish_reason, made.token_ids) == ("abort", answer(0, len(made.token_ids)))
    assert made.spans == [WeightSpan(version=0, start=0, end=len(made.token_ids))]


async def test_a_server_that_falls_silent_leaves_the_oldest_version(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    fake.stream_interval = 8
    task = await in_flight(engine, fake)
    await engine.load_weights(folder(4), 1, proof(4))
    met = len(fake.requests[0].output)
    await async_until(lambda: engine.calls.generated > met)
    engine.calls.end_all(0.0)
    made = await task
    assert made.finish_reason == "abort" and len(made.token_ids) > met
    assert made.spans == [WeightSpan(version=0, start=0, end=len(made.token_ids))]


async def test_nothing_that_old_weights_computed_is_reused(engine: SglangEngine, fake: Fake, folder: Folder) -> None:
    task = await in_flight(engine, fake)
    await engine.load_weights(folder(4), 1, proof(4))
    await task  # its KV, half of the old weights, goes to the cache under load
    for _ in range(2):
        assert (await engine.generate(PROMPT, params(5), "r")).token_ids == answer(4, 5)
    assert engine.stats().reused_tokens == 2


async def test_weights_whose_proof_is_wrong_never_show_a_token(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    await engine.load_weights(folder(1), 1, proof(1))
    task = await in_flight(engine, fake)
    pieces: list[Piece] = []

    async def read() -> None:
        pieces.extend([piece async for piece in engine.stream(PROMPT, LONG, "streamed")])

    reading = asyncio.create_task(read())
    await async_until(lambda: len(fake.requests) == 2)
    with pytest.raises(TrackwayError, match="got other weights") as raised:
        await engine.load_weights(folder(4), 2, proof(5))
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT
    made = await task
    await reading
    assert made.finish_reason == pieces[-1].finish_reason == "abort"
    assert made.token_ids == answer(1, len(made.token_ids))
    assert made.spans == [WeightSpan(version=1, start=0, end=len(made.token_ids))]
    streamed = [token for piece in pieces for token in piece.token_ids]
    assert streamed == answer(1, len(streamed))
    assert engine.version == 1
    again = await engine.generate(PROMPT, params(5), "r")
    assert (again.token_ids, again.spans) == (answer(1, 5), [WeightSpan(version=1, start=0, end=5)])


async def test_a_request_that_comes_during_a_load_waits_and_meets_only_proved_weights(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    fake.hang.add("/update_weights_from_disk")
    load = asyncio.create_task(engine.load_weights(folder(4), 1, proof(4)))
    await async_until(lambda: sent(fake, "/update_weights_from_disk"))
    late = asyncio.create_task(engine.generate(PROMPT, params(5), "late"))
    gone = asyncio.create_task(engine.generate(PROMPT, params(5), "gone"))
    await async_until(lambda: engine.stats().running == 2)
    assert sent(fake, "/generate") == []
    await engine.abort("gone")
    assert await gone == Generation([], [], "abort", [])
    fake.hang.clear()
    await load
    assert [body["input_ids"] for body in sent(fake, "/generate")] == [proof(4).probes[0].token_ids]
    assert await late == Generation(
        answer(4, 5), (await late).logprobs, "length", [WeightSpan(version=1, start=0, end=5)]
    )


async def test_a_load_that_is_cancelled_leaves_nothing_to_serve_until_a_load_succeeds(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    running = await in_flight(engine, fake)
    fake.hang.add("/update_weights_from_disk")
    load = asyncio.create_task(engine.load_weights(folder(4), 1, proof(4)))
    await async_until(lambda: sent(fake, "/update_weights_from_disk"))
    late = asyncio.create_task(engine.generate(PROMPT, params(5), "late"))
    await asyncio.sleep(0.02)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    with pytest.raises(TrackwayError, match="was cancelled"):
        await late
    assert (await running).finish_reason == "abort"
    assert engine.stuck_for() == math.inf
    fake.hang.clear()
    await engine.load_weights(folder(4), 1, proof(4))
    assert engine.stuck_for() == 0.0
    assert (await engine.generate(PROMPT, params(5), "r")).token_ids == answer(4, 5)


async def test_a_version_that_failed_is_tried_again_under_a_name_of_its_own(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    for _ in range(2):
        with pytest.raises(TrackwayError):
            await engine.load_weights(folder(4), 1, proof(5))
    await engine.load_weights(folder(4), 1, proof(4))
    names = [body["weight_version"] for body in sent(fake, "/update_weights_from_disk")]
    assert names == ["1", "0+1", "1+2", "0+3", "1+4"]
    assert (await engine.generate(PROMPT, params(2), "r")).spans == [WeightSpan(version=1, start=0, end=2)]


async def test_a_folder_that_does_not_load_leaves_frozen_requests_whole(
    engine: SglangEngine, fake: Fake, folder: Folder, tmp_path: Path
) -> None:
    task = await in_flight(engine, fake)
    (tmp_path / "broken").mkdir()
    with pytest.raises(TrackwayError, match="Failed to get weights iterator") as raised:
        await engine.load_weights(tmp_path / "broken", 1, proof(1))
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT
    made = await task
    assert (made.token_ids, made.spans) == (answer(0, 200), [WeightSpan(version=0, start=0, end=200)])


async def test_an_answer_to_a_probe_that_makes_no_sense_brings_the_old_weights_back(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    fake.fail["/generate"] = (200, {"meta_info": {"input_token_logprobs": "none"}})
    with pytest.raises(TrackwayError, match=r"use SGLang 0\.5\.23"):
        await engine.load_weights(folder(4), 1, proof(4))
    assert (await engine.generate(PROMPT, params(5), "r")).token_ids == answer(0, 5)


@pytest.mark.parametrize("route", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"])
async def test_a_step_of_the_load_that_fails_once_brings_the_old_weights_back(
    engine: SglangEngine, fake: Fake, folder: Folder, route: str
) -> None:
    task = await in_flight(engine, fake)
    fake.fail[route] = (500, {"message": "because"})
    with pytest.raises(TrackwayError, match="500: because") as raised:
        await engine.load_weights(folder(4), 1, proof(4))
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT
    assert (await task).token_ids == answer(0, 200)
    assert (await engine.generate(PROMPT, params(5), "r")).token_ids == answer(0, 5)


async def test_without_the_last_good_folder_nothing_is_served_until_a_load_succeeds(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    good = folder(1)
    await engine.load_weights(good, 1, proof(1))
    task = await in_flight(engine, fake)
    shutil.rmtree(good)
    with pytest.raises(TrackwayError, match=r"got other weights(.|\n)*it was pruned") as raised:
        await engine.load_weights(folder(4), 2, proof(5))
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert engine.stuck_for() == math.inf
    made = await task
    assert made.token_ids == answer(1, len(made.token_ids))
    with pytest.raises(TrackwayError, match="did not load again") as raised:
        await engine.generate(PROMPT, params(1), "r")
    assert raised.value.code is ErrorCode.UNAVAILABLE
    await engine.load_weights(folder(4), 3, proof(4))
    assert (await engine.generate(PROMPT, params(5), "r")).token_ids == answer(4, 5)


async def test_weights_load_while_paused_and_frozen_requests_stay_frozen(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    task = await in_flight(engine, fake)
    await engine.pause("keep")
    await engine.load_weights(folder(4), 1, proof(4))
    made = len(fake.requests[0].output)
    await asyncio.sleep(0.05)
    assert len(fake.requests[0].output) == made
    assert engine.version == 1
    await engine.resume()
    assert (await task).spans[-1].version == 1


async def test_a_server_that_somebody_used_before_gets_the_base_weights(starts: Starts, fake: Fake) -> None:
    fake.version, fake.seed, fake.paused = "12", 9, True
    fake.continued.clear()
    async with starts() as engine:
        made = await engine.generate(PROMPT, params(5), "r")
    assert (made.token_ids, made.spans) == (answer(0, 5), [WeightSpan(version=0, start=0, end=5)])


async def test_a_folder_that_is_not_finite_is_refused_before_the_server_sees_it(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    save_file({"model.norm.weight": torch.tensor([1.0, math.nan])}, folder(4) / "model.safetensors")

    with pytest.raises(TrackwayError, match=r"NaN or infinities in model\.norm\.weight") as raised:
        await engine.load_weights(folder(4), 1, proof(4))

    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT
    assert sent(fake, "/update_weights_from_disk") == []
    assert engine.version == 0
