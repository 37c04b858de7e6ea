"""New weights while requests are in flight: what `keep`, `wait` and `abort` make of them, and who may cut what."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from trackway.clients.weights import WeightStore
from trackway.rollout.engines.collector import Collector
from trackway.rollout.engines.engine import Generation, Piece
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.rollout.survivor import Survivor
from trackway.rollout.weights import WeightWatcher
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateRequest, SamplingParams
from trackway.wire.weights import Canary

pytestmark = pytest.mark.anyio

Started = Callable[[RolloutSettings], AbstractAsyncContextManager[TorchEngine]]
LENGTH = 900
WRONG = Canary(token_ids=[3, 4, 5], logprobs=[-99.0, -99.0])
LONG = GenerateRequest(
    token_ids=[11, 12, 13], sampling_params=SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=5)
)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(str(tmp_path / "weights"))


@pytest.fixture
async def engine(model_path: Path, started: Started) -> AsyncIterator[TorchEngine]:
    async with started(RolloutSettings(model_path=model_path, device="cpu")) as engine:
        yield engine


@asynccontextmanager
async def surviving(
    engine: TorchEngine, store: WeightStore, cache: Path, mode: str, wait_s: float = 30.0
) -> AsyncIterator[tuple[Survivor, WeightWatcher]]:
    watcher = WeightWatcher(engine, store, cache, 0.01, wait_s, mode)  # pyright: ignore[reportArgumentType]
    await watcher.start()
    try:
        yield Survivor(engine, watcher), watcher
    finally:
        await watcher.stop()


async def first_tokens(survivor: Survivor, begun: asyncio.Event) -> tuple[Generation, list[Piece]]:
    """The whole of LONG; `begun` is set at its first token."""
    collector, pieces = Collector(), list[Piece]()
    async with aclosing(survivor.stream(LONG, "long")) as stream:
        async for piece in stream:
            collector.add(piece)
            pieces.append(piece)
            begun.set()
    return collector.generation(), pieces


async def updated_midway(survivor: Survivor, store: WeightStore, weights: Path) -> tuple[Generation, list[Piece]]:
    begun = asyncio.Event()
    task = asyncio.create_task(first_tokens(survivor, begun))
    await begun.wait()
    await asyncio.to_thread(store.publish, 1, "run", weights)
    async with asyncio.timeout(60):
        return await task


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_request_in_flight_is_one_answer_of_two_versions(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path, mode: str
) -> None:
    async with surviving(engine, store, tmp_path, mode) as (survivor, _):
        whole, pieces = await updated_midway(survivor, store, other_path)
    first, second = whole.spans
    assert (first.version, first.start, second.version, second.end) == (0, 0, 1, LENGTH)
    assert 0 < first.end == second.start < LENGTH
    assert (len(whole.token_ids), len(whole.logprobs), whole.finish_reason) == (LENGTH, LENGTH, "length")
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


async def test_after_an_abort_the_rest_is_what_the_new_weights_say_of_the_whole(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with surviving(engine, store, tmp_path, "abort") as (survivor, _):
        whole, _ = await updated_midway(survivor, store, other_path)
    cut = whole.spans[0].end
    ids = torch.tensor([[*LONG.token_ids, *whole.token_ids]])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(other_path)(ids).logits[0, :-1]
    scored = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    rest = scored[len(LONG.token_ids) - 1 + cut :]
    assert whole.logprobs[cut:] == pytest.approx(rest, abs=1e-4)


async def test_waiting_lets_requests_finish_on_the_old_weights_and_holds_new_ones_at_the_gate(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with surviving(engine, store, tmp_path, "wait") as (survivor, watcher):
        begun = asyncio.Event()
        task = asyncio.create_task(first_tokens(survivor, begun))
        await begun.wait()
        await asyncio.to_thread(store.publish, 1, "run", other_path)
        async with asyncio.timeout(60):
            while watcher.ready().ready:
                await asyncio.sleep(0.001)
            late = await survivor.generate(
                GenerateRequest(token_ids=[11], sampling_params=SamplingParams(max_tokens=3, ignore_eos=True)), "late"
            )
            whole, _ = await task
    assert [(span.version, span.end) for span in whole.spans] == [(0, LENGTH)]
    assert [(span.version, span.end) for span in late.spans] == [(1, 3)]
    assert watcher.ready().ready


async def test_the_gate_is_no_wait_without_an_end(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with surviving(engine, store, tmp_path, "wait", wait_s=0.0) as (survivor, watcher):
        begun = asyncio.Event()
        task = asyncio.create_task(first_tokens(survivor, begun))
        await begun.wait()
        await asyncio.to_thread(store.publish, 1, "run", other_path)
        async with asyncio.timeout(60):
            while watcher.ready().ready:
                await asyncio.sleep(0.001)
            with pytest.raises(TrackwayError, match="weights version 1 is still being loaded") as raised:
                await survivor.generate(LONG, "late")
            await task
    assert raised.value.code is ErrorCode.PAUSED


async def test_what_someone_aborts_is_not_continued_by_an_update(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with surviving(engine, store, tmp_path, "abort") as (survivor, watcher):
        begun = asyncio.Event()
        task = asyncio.create_task(first_tokens(survivor, begun))
        await begun.wait()
        watcher.updates += 1
        assert await survivor.abort(["someone-else"]) == 0
        assert await survivor.abort(["long"]) == 1
        whole, _ = await task
    assert (whole.finish_reason, len(whole.token_ids) < LENGTH) == ("abort", True)


async def test_leaving_a_stream_early_frees_its_slot(engine: TorchEngine, store: WeightStore, tmp_path: Path) -> None:
    async with surviving(engine, store, tmp_path, "keep") as (survivor, _):
        async with aclosing(survivor.stream(LONG, "left")) as stream:
            async for _ in stream:
                break
        async with asyncio.timeout(10):
            while engine.stats().running:
                await asyncio.sleep(0.001)


async def test_an_update_that_fails_its_canary_leaves_the_request_on_the_old_weights(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with surviving(engine, store, tmp_path, "abort", wait_s=0.5) as (survivor, watcher):
        begun = asyncio.Event()
        task = asyncio.create_task(first_tokens(survivor, begun))
        await begun.wait()
        await asyncio.to_thread(store.publish, 1, "run", other_path, WRONG)
        async with asyncio.timeout(60):
            whole, _ = await task
        with pytest.raises(TrackwayError, match="canary logprobs"):
            await watcher.catch_up(1)
    assert (len(whole.token_ids), [(s.version, s.end) for s in whole.spans]) == (LENGTH, [(0, LENGTH)])
    assert watcher.updates > 0
