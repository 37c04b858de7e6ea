"""The engine on its thread: stops, limits, seeds, aborts, pauses, updates, bounds."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.services.rollout.engine_runs import LONG, PROMPT, running, started
from tests.services.rollout.rollout_models import EOS, VOCAB
from tests.waiting import async_until
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.weights import Probe, WeightProof

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def refused(engine: TorchEngine, prompt: list[int]) -> TrackwayError:
    with pytest.raises(TrackwayError) as raised:
        await engine.generate(prompt, LONG, "refused")
    return raised.value


def proof_of(folder: Path, shift: float = 0.0) -> WeightProof:
    tokens = list(range(3, 20))
    logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    positions = list(range(1, len(tokens)))
    return WeightProof(probes=[Probe(token_ids=tokens, positions=positions, logprobs=(logprobs + shift).tolist())])


async def test_generation_ends_with_a_stop_token_which_is_part_of_it(engine: TorchEngine) -> None:
    free = await engine.generate(PROMPT, SamplingParams(seed=3, max_tokens=30, ignore_eos=True), "a")
    stop = free.token_ids[10]
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    stopped = await engine.generate(PROMPT, params, "b")
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_the_models_own_stop_token_ends_generation_unless_ignored(engine: TorchEngine) -> None:
    params = SamplingParams(seed=2, max_tokens=300)
    stopped = await engine.generate(PROMPT, params, "a")
    ignored = await engine.generate(PROMPT, params.model_copy(update={"ignore_eos": True}), "b")
    assert (stopped.finish_reason, stopped.token_ids[-1], stopped.token_ids.count(EOS)) == ("stop", EOS, 1)
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 300)


@pytest.mark.parametrize("streamed", [False, True])
async def test_top_logprobs_are_those_of_the_models_logits(
    engine: TorchEngine, model_path: Path, streamed: bool
) -> None:
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, temperature=0.7)
    plain = await engine.generate(PROMPT, params, "a")
    asked = params.model_copy(update={"logprobs": 5})
    if streamed:
        pieces = [piece async for piece in engine.stream(PROMPT, asked, "b")]
        tokens = [token for piece in pieces for token in piece.token_ids]
        tops = [top for piece in pieces for top in piece.top_logprobs]
    else:
        made = await engine.generate(PROMPT, asked, "b")
        tokens, tops = made.token_ids, list(made.top_logprobs)
        assert made.logprobs == pytest.approx(plain.logprobs, abs=1e-5)

    assert tokens == plain.token_ids and plain.top_logprobs == ()
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits / 0.7, -1)
    for position, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        best = expected[position].topk(5).indices.tolist()
        ids = [other for other, _ in top]
        assert ids == (best if token in best else [*best[:4], token])
        assert [value for _, value in top] == pytest.approx(expected[position, ids].tolist(), abs=1e-4)


async def test_generation_ends_at_max_tokens_or_at_the_models_length(settings: RolloutSettings) -> None:
    async with started(TorchEngine(settings.model_copy(update={"max_model_len": 20}))) as engine:
        short = await engine.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True), "a")
        full = await engine.generate(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True), "b")
    assert (short.finish_reason, len(short.token_ids), len(short.logprobs)) == ("length", 5, 5)
    assert (full.finish_reason, len(full.token_ids)) == ("length", 17)


def test_a_context_length_beyond_the_models_positions_is_refused_at_the_start(settings: RolloutSettings) -> None:
    def length(**changes: int) -> int:
        return TorchEngine(settings.model_copy(update=changes)).max_len

    assert length() == 1024
    assert length(max_model_len=1024) == 1024
    assert length(max_model_len=1025, max_position_embeddings=1025) == 1025
    assert length(max_position_embeddings=5000) == 4096
    for refused in ({"max_model_len": 1025}, {"max_model_len": 1000, "max_position_embeddings": 999}):
        with pytest.raises(TrackwayError) as raised:
            length(**refused)
        positions = refused.get("max_position_embeddings", 1024)
        assert raised.value.code is ErrorCode.INVALID_REQUEST
        assert raised.value.message == (
            f"max_model_len: expected at most {positions}, the most that the model's max_position_embeddings allow, "
            f"got {refused['max_model_len']}; lower it (of a run: actor_rollout_ref.rollout.max_model_len, or "
            "data.max_prompt_length + data.max_response_length), or set max_position_embeddings (of a run: "
            "actor_rollout_ref.model.override_config.max_position_embeddings) for a model that reads more"
        )


async def test_the_same_seed_gives_the_same_tokens_and_none_gives_others(engine: TorchEngine) -> None:
    seeded, free = (SamplingParams(seed=seed, max_tokens=40, ignore_eos=True) for seed in (5, None))
    first, again = await asyncio.gather(*(engine.generate(PROMPT, seeded, name) for name in "ab"))
    unseeded, unseeded_again = await asyncio.gather(*(engine.generate(PROMPT, free, name) for name in "cd"))
    assert first.token_ids == again.token_ids
    assert unseeded.token_ids != unseeded_again.token_ids


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [5] * 1024])
async def test_a_prompt_that_the_model_cannot_take_is_refused(engine: TorchEngine, prompt: list[int]) -> None:
    assert (await refused(engine, prompt)).code is ErrorCode.INVALID_REQUEST


async def test_one_request_more_than_slots_and_queue_is_refused_and_the_others_finish(engine: TorchEngine) -> None:
    taken = [asyncio.create_task(engine.generate([n, 7], LONG, str(n))) for n in (3, 4, 5)]
    await running(engine, 2)
    error = await refused(engine, PROMPT)
    assert (error.code, error.detail) == (ErrorCode.OVERLOADED, {"bound": 3, "retry_after_s": 2.5})
    assert [len(done.token_ids) for done in await asyncio.gather(*taken)] == [300, 300, 300]


async def test_an_aborted_request_returns_what_it_has(engine: TorchEngine) -> None:
    task = asyncio.create_task(engine.generate(PROMPT, LONG, "mine"))
    await running(engine, 1)
    assert await engine.abort("other") == 0
    assert await engine.abort("mine") == 1
    done = await task
    assert done.finish_reason == "abort"
    assert 0 < len(done.token_ids) == len(done.logprobs) < 300


async def test_a_cancelled_caller_frees_its_slot(engine: TorchEngine) -> None:
    tasks = [asyncio.create_task(engine.generate(PROMPT, LONG, str(n))) for n in range(2)]
    await running(engine, 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    done = await engine.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), "next")
    assert len(done.token_ids) == 3
    await async_until(lambda: engine.stats().running == 0)
    assert engine.stats().generated_tokens < 600


async def test_a_pause_that_waits_lets_requests_finish_and_refuses_new_ones(engine: TorchEngine) -> None:
    task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
    await running(engine, 1)
    pausing = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    assert (await refused(engine, PROMPT)).code is ErrorCode.PAUSED
    await pausing
    assert task.done() and len((await task).token_ids) == 300
    await engine.resume()
    assert len((await engine.generate(PROMPT, SamplingParams(max_tokens=1), "b")).token_ids) == 1


async def test_a_pause_that_aborts_cuts_requests(engine: TorchEngine) -> None:
    tasks = [asyncio.create_task(engine.generate([n, 7], LONG, str(n))) for n in (3, 4, 5)]
    await running(engine, 2)
    await engine.pause("abort")
    done = await asyncio.gather(*tasks)
    assert [generation.finish_reason for generation in done] == ["abort"] * 3
    assert len(done[2].token_ids) == 0  # it was waiting for a slot


async def test_a_pause_that_keeps_freezes_requests_and_an_update_goes_under_them(
    engine: TorchEngine, other_path: Path
) -> None:
    task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
    await running(engine, 1)
    await engine.pause("keep")
    frozen = engine.stats()
    await engine.load_weights(other_path, 4, proof_of(other_path))
    assert engine.stats() == frozen
    await engine.resume()
    spans = (await task).spans
    cut = frozen.generated_tokens
    assert [(s.version, s.start, s.end, s.kv_version) for s in spans] == [(0, 0, cut, None), (4, cut, 300, 0)]


async def test_weights_that_fail_their_proof_are_not_taken(engine: TorchEngine, other_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    before = await engine.generate(PROMPT, greedy, "a")
    with pytest.raises(TrackwayError, match=r"got other weights: its logprobs are off by 0\.5 \(at most 0\.001\)"):
        await engine.load_weights(other_path, 1, proof_of(other_path, shift=0.5))
    assert engine.version == 0
    assert (await engine.generate(PROMPT, greedy, "b")).token_ids == before.token_ids
    await engine.load_weights(other_path, 1, proof_of(other_path))
    assert engine.version == 1
    assert (await engine.generate(PROMPT, greedy, "c")).token_ids != before.token_ids


async def test_a_proof_of_no_number_is_not_taken(engine: TorchEngine, other_path: Path) -> None:
    with pytest.raises(TrackwayError, match="off by nan"):
        await engine.load_weights(other_path, 1, proof_of(other_path, shift=float("nan")))
    assert engine.version == 0


async def test_stopping_returns_requests_in_flight_as_aborted(settings: RolloutSettings) -> None:
    async with started(TorchEngine(settings)) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await running(engine, 1)
    assert (await task).finish_reason == "abort"
