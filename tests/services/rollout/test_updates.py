"""New weights while requests are in flight: what `keep`, `wait` and `abort` make of them, and who may cut what."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.services.rollout.engine_runs import watching
from tests.waiting import async_until
from tests.weight_proofs import ANY_PROOF, WRONG_PROOF
from trackway.clients.weights import WeightStore
from trackway.rollout import service
from trackway.rollout.engines.protocol import Collector, Generation, PauseMode, Piece
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.service import ResumableGeneration
from trackway.rollout.weight_watcher import WeightWatcher
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateRequest, SamplingParams, StructuredOutputs
from trackway.wire.weights import WeightProof

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Surviving = Callable[..., AbstractAsyncContextManager[tuple[ResumableGeneration, WeightWatcher]]]
Answer = asyncio.Task[tuple[Generation, list[Piece]]]
LENGTH = 900
LONG = GenerateRequest(
    token_ids=[11, 12, 13], sampling_params=SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=5)
)


@pytest.fixture
def surviving(engine: TorchEngine, store: WeightStore, tmp_path: Path) -> Surviving:
    """`async with surviving(mode) as (survivor, watcher)`, on `engine` and following `store`."""

    @asynccontextmanager
    async def follow(mode: PauseMode, wait_s: float = 30.0) -> AsyncIterator[tuple[ResumableGeneration, WeightWatcher]]:
        async with watching(engine, store, tmp_path, wait_s=wait_s, mode=mode) as watcher:
            yield ResumableGeneration(engine, watcher), watcher

    return follow


@asynccontextmanager
async def begun(survivor: ResumableGeneration, request: GenerateRequest = LONG) -> AsyncIterator[Answer]:
    """The whole of a request and its pieces in a task that has the first, and a minute for what follows."""
    first, collector, pieces = asyncio.Event(), Collector(), list[Piece]()

    async def read() -> tuple[Generation, list[Piece]]:
        async with aclosing(survivor.stream(request, "long")) as stream:
            async for piece in stream:
                collector.add(piece)
                pieces.append(piece)
                first.set()
        return collector.generation(), pieces

    async with asyncio.timeout(60):
        task = asyncio.create_task(read())
        await first.wait()
        yield task


@asynccontextmanager
async def updated_midway(
    survivor: ResumableGeneration, store: WeightStore, weights: Path, proof: WeightProof = ANY_PROOF
) -> AsyncIterator[Answer]:
    """As `begun`, and version 1 is published then."""
    async with begun(survivor) as answer:
        await asyncio.to_thread(store.publish, 1, "run", weights, proof)
        yield answer


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_request_in_flight_is_one_answer_of_two_versions(
    surviving: Surviving, store: WeightStore, other_path: Path, mode: PauseMode
) -> None:
    async with surviving(mode) as (survivor, _), updated_midway(survivor, store, other_path) as answer:
        whole, pieces = await answer
    first, second = whole.spans
    assert (first.version, first.start, second.version, second.end) == (0, 0, 1, LENGTH)
    assert (first.kv_version, second.kv_version) == (None, 0 if mode == "keep" else None)
    assert 0 < first.end == second.start < LENGTH
    assert (len(whole.token_ids), len(whole.logprobs), whole.finish_reason) == (LENGTH, LENGTH, "length")
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


async def test_after_an_abort_the_rest_is_what_the_new_weights_say_of_the_whole(
    surviving: Surviving, store: WeightStore, other_path: Path
) -> None:
    async with surviving("abort") as (survivor, _), updated_midway(survivor, store, other_path) as answer:
        whole, _ = await answer
    cut = whole.spans[0].end
    ids = torch.tensor([[*LONG.token_ids, *whole.token_ids]])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(other_path)(ids).logits[0, :-1]
    scored = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    rest = scored[len(LONG.token_ids) - 1 + cut :]
    assert whole.logprobs[cut:] == pytest.approx(rest, abs=1e-4)


async def test_a_scored_prompt_that_an_update_cuts_has_the_scores_of_the_weights_before(
    surviving: Surviving, store: WeightStore, model_path: Path, other_path: Path
) -> None:
    asked = LONG.model_copy(update={"sampling_params": LONG.sampling_params.model_copy(update={"prompt_logprobs": 0})})
    async with surviving("abort") as (survivor, _), begun(survivor, asked) as answer:
        await asyncio.to_thread(store.publish, 1, "run", other_path, ANY_PROOF)
        whole, pieces = await answer
    assert [span.version for span in whole.spans] == [0, 1]
    [scores] = [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None]
    ids = torch.tensor([LONG.token_ids])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model_path)(ids).logits[0, :-1]
    assert scores.logprobs == pytest.approx(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist(), abs=1e-5)
    assert whole.prompt_logprobs == scores


async def test_tokens_on_a_kept_cache_differ_from_their_version_and_say_so(
    surviving: Surviving, store: WeightStore, other_path: Path
) -> None:
    async with surviving("keep") as (survivor, _), updated_midway(survivor, store, other_path) as answer:
        whole, _ = await answer
    ids = torch.tensor([[*LONG.token_ids, *whole.token_ids]])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(other_path)(ids).logits[0, :-1]
    scored = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    kept = whole.spans[1]
    fresh = scored[len(LONG.token_ids) - 1 + kept.start :]
    assert max(abs(ours - theirs) for ours, theirs in zip(whole.logprobs[kept.start :], fresh, strict=True)) > 0.01
    assert (kept.version, kept.kv_version) == (1, 0)


async def test_a_guided_answer_that_an_update_cuts_is_begun_again_and_a_stream_of_it_fails(
    surviving: Surviving, store: WeightStore, other_path: Path
) -> None:
    params = LONG.sampling_params.model_copy(update={"structured_outputs": StructuredOutputs(json_object=True)})
    guided = LONG.model_copy(update={"sampling_params": params})
    async with surviving("abort") as (survivor, _), begun(survivor, guided) as streamed:
        whole = asyncio.create_task(survivor.generate(guided, "whole"))
        await asyncio.to_thread(store.publish, 1, "run", other_path, ANY_PROOF)
        with pytest.raises(TrackwayError, match="its grammar cannot be entered in the middle; retry") as raised:
            await streamed
        answer = await whole
    assert (raised.value.code, raised.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert [(span.version, span.start, span.end) for span in answer.spans] == [(1, 0, LENGTH)]


async def test_waiting_lets_requests_finish_on_the_old_weights_and_holds_new_ones_at_the_gate(
    surviving: Surviving, store: WeightStore, other_path: Path
) -> None:
    async with surviving("wait") as (survivor, watcher), updated_midway(survivor, store, other_path) as answer:
        await async_until(lambda: not watcher.ready().ready)
        late = await survivor.generate(
            GenerateRequest(token_ids=[11], sampling_params=SamplingParams(max_tokens=3, ignore_eos=True)), "late"
        )
        whole, _ = await answer
    assert [(span.version, span.end) for span in whole.spans] == [(0, LENGTH)]
    assert [(span.version, span.end) for span in late.spans] == [(1, 3)]
    assert watcher.ready().ready


async def test_the_gate_is_no_wait_without_an_end(surviving: Surviving, store: WeightStore, other_path: Path) -> None:
    async with (
        surviving("wait", wait_s=0.0) as (survivor, watcher),
        updated_midway(survivor, store, other_path) as answer,
    ):
        await async_until(lambda: not watcher.ready().ready)
        with pytest.raises(TrackwayError, match="weights version 1 is still being loaded") as raised:
            await survivor.generate(LONG, "late")
        await answer
    assert raised.value.code is ErrorCode.PAUSED


async def test_a_retracted_generation_keeps_its_tokens_and_goes_on_once_it_is_released(
    surviving: Surviving, engine: TorchEngine, store: WeightStore, other_path: Path
) -> None:
    async with surviving("keep") as (survivor, watcher), begun(survivor) as answer:
        survivor.retract()
        await engine.pause("abort")
        await asyncio.to_thread(store.publish, 1, "run", other_path, ANY_PROOF)
        await watcher.catch_up(1)
        await engine.resume()
        waits = engine.stats().running == 0 and not answer.done()
        survivor.release()
        whole, pieces = await answer
    first, second = whole.spans
    assert waits and second.kv_version is None
    assert (first.version, first.start, second.version, second.end) == (0, 0, 1, LENGTH)
    assert 0 < first.end == second.start < LENGTH and len(whole.token_ids) == LENGTH
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


async def test_a_retracted_generation_does_not_wait_for_ever(
    surviving: Surviving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRACTED_S", 0.01)
    async with surviving("keep") as (survivor, _):
        survivor.retract()
        with pytest.raises(TrackwayError, match="expected the engine to wake up within 0 s, got none") as caught:
            await survivor.generate(LONG, "held")
    assert caught.value.code is ErrorCode.PAUSED


async def test_what_someone_aborts_is_not_continued_by_an_update(surviving: Surviving) -> None:
    async with surviving("abort") as (survivor, watcher), begun(survivor) as answer:
        watcher.updates += 1
        assert await survivor.abort(["someone-else"]) == 0
        assert await survivor.abort(["long"]) == 1
        whole, _ = await answer
    assert (whole.finish_reason, len(whole.token_ids) < LENGTH) == ("abort", True)


async def test_leaving_a_stream_early_frees_its_slot(surviving: Surviving, engine: TorchEngine) -> None:
    async with surviving("keep") as (survivor, _):
        async with aclosing(survivor.stream(LONG, "left")) as stream:
            async for _ in stream:
                break
        await async_until(lambda: not engine.stats().running)


async def test_an_update_that_fails_its_proof_leaves_the_request_on_the_old_weights(
    surviving: Surviving, store: WeightStore, other_path: Path
) -> None:
    async with surviving("abort", wait_s=0.5) as (survivor, watcher):
        async with updated_midway(survivor, store, other_path, WRONG_PROOF) as answer:
            whole, _ = await answer
        with pytest.raises(TrackwayError, match="got other weights"):
            await watcher.catch_up(1)
    assert (len(whole.token_ids), [(s.version, s.end) for s in whole.spans]) == (LENGTH, [(0, LENGTH)])
    assert watcher.updates == 0  # it was refused before its swap
