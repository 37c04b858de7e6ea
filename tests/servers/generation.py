"""Generation by a real server: logprobs of others, stops, streams, bounds, cuts, pauses."""

import asyncio
from contextlib import aclosing
from types import ModuleType

import pytest
import torch

from tests.vllm.vllm_runs import BLOCK, EOS, GREEDY, LONG, MAX_LEN, PROMPT, SHORT, VOCAB, Weights, worst
from trackway.rollout.engines.remote.engine import RemoteEngine
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import PromptLogprobs


async def refused(engine: RemoteEngine, prompt: list[int]) -> TrackwayError:
    with pytest.raises(TrackwayError) as raised:
        await engine.generate(prompt, SHORT, "refused")
    return raised.value


@pytest.mark.parametrize(("streamed", "top_k"), [(False, -1), (True, -1), (False, 20)])
async def test_top_logprobs_are_the_likeliest_tokens_and_the_sampled_one(
    engine: RemoteEngine, first: Weights, streamed: bool, top_k: int
) -> None:
    asked = SHORT.model_copy(update={"logprobs": 5, "temperature": 1.5, "top_k": top_k})
    if streamed:
        pieces = [piece async for piece in engine.stream(PROMPT, asked, "a")]
        tokens = [token for piece in pieces for token in piece.token_ids]
        tops = [top for piece in pieces for top in piece.top_logprobs]
    else:
        made = await engine.generate(PROMPT, asked, "a")
        tokens, tops = made.token_ids, list(made.top_logprobs)
        assert worst(made, first.model, asked) < 1e-4
    with torch.inference_mode():
        logits = first.model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    expected = torch.log_softmax(logits / 1.5, -1)
    for position, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        best = expected[position].topk(5).indices.tolist()
        assert [other for other, _ in top] == (best if token in best else [*best[:4], token])
        assert dict(top) == pytest.approx({other: expected[position, other].item() for other, _ in top}, abs=1e-4)


async def test_a_stop_token_ends_generation_and_is_part_of_it(engine: RemoteEngine) -> None:
    free = await engine.generate(PROMPT, GREEDY, "a")
    stop = free.token_ids[10]
    stopped = await engine.generate(PROMPT, GREEDY.model_copy(update={"stop_token_ids": [stop]}), "b")
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_the_models_own_stop_token_ends_generation_unless_ignored(engine: RemoteEngine) -> None:
    stopped = await engine.generate(PROMPT, LONG.model_copy(update={"ignore_eos": False}), "a")
    ignored = await engine.generate(PROMPT, LONG, "b")
    assert (stopped.finish_reason, stopped.token_ids[-1], stopped.token_ids.count(EOS)) == ("stop", EOS, 1)
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", LONG.max_tokens)


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [5] * MAX_LEN], ids=["empty", "unknown", "negative", "long"])
async def test_a_prompt_that_the_model_cannot_take_is_refused(engine: RemoteEngine, prompt: list[int]) -> None:
    assert (await refused(engine, prompt)).code is ErrorCode.INVALID_REQUEST


async def test_a_stream_in_pieces_is_what_generate_returns(engine: RemoteEngine) -> None:
    params = GREEDY.model_copy(update={"max_tokens": 30})
    whole = await engine.generate(PROMPT, params, "a")
    pieces = [piece async for piece in engine.stream(PROMPT, params, "b")]
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [lp for piece in pieces for lp in piece.logprobs] == pytest.approx(whole.logprobs, abs=1e-6)
    assert {piece.version for piece in pieces} == {engine.version}
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


async def test_closing_a_stream_ends_the_request(server: ModuleType, engine: RemoteEngine) -> None:
    async with server.slowed(engine):
        async with aclosing(engine.stream(PROMPT, LONG, "a")) as pieces:
            await anext(pieces)
        await server.idle(engine)


async def test_a_cancelled_caller_frees_its_place(server: ModuleType, engine: RemoteEngine) -> None:
    async with server.slowed(engine):
        tasks = [asyncio.create_task(engine.generate(PROMPT, LONG, str(n))) for n in range(3)]
        await server.busy(engine, running=3)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await server.idle(engine)


async def test_an_aborted_request_returns_what_it_has(server: ModuleType, engine: RemoteEngine, first: Weights) -> None:
    async with server.slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "mine"))
        await server.busy(engine)
        assert await engine.abort("other") == 0
        assert await engine.abort("mine") == 1
        done = await task
    assert done.finish_reason == "abort"
    assert 0 < len(done.token_ids) < LONG.max_tokens
    assert worst(done, first.model, LONG) < 1e-4


async def test_one_request_more_than_places_and_queue_is_refused_and_the_others_finish(engine: RemoteEngine) -> None:
    params = LONG.model_copy(update={"max_tokens": 100})
    taken = [asyncio.create_task(engine.generate([n, 7], params, str(n))) for n in range(3, 9)]
    await asyncio.sleep(0)
    assert (engine.stats().running, engine.stats().waiting) == (4, 2)
    error = await refused(engine, PROMPT)
    assert (error.code, error.detail["bound"]) == (ErrorCode.OVERLOADED, 6)
    assert [len(done.token_ids) for done in await asyncio.gather(*taken)] == [100] * 6


async def test_requests_that_are_cut_before_they_got_a_place_return_no_tokens(
    server: ModuleType, engine: RemoteEngine
) -> None:
    async with server.slowed(engine):
        running = [asyncio.create_task(engine.generate([n, 7], LONG, str(n))) for n in range(3, 7)]
        await server.busy(engine, running=4)
        waiting = [asyncio.create_task(engine.generate([n, 7], LONG, str(n))) for n in range(7, 9)]
        await server.busy(engine, running=4, waiting=2)
        await engine.pause("abort")
        done = await asyncio.gather(*running, *waiting)
    assert {made.finish_reason for made in done} == {"abort"}
    assert [bool(made.token_ids) for made in done] == [True] * 4 + [False] * 2


async def test_a_pause_that_waits_refuses_new_requests_and_lets_the_others_finish(
    server: ModuleType, engine: RemoteEngine
) -> None:
    async with server.slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await server.busy(engine)
        pausing = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0)
        assert (await refused(engine, PROMPT)).code is ErrorCode.PAUSED
        assert not pausing.done()
    await pausing
    done = await task
    assert (done.finish_reason, len(done.token_ids)) == ("length", 300)
    await engine.resume()
    assert len((await engine.generate(PROMPT, SHORT, "b")).token_ids) == 8


async def test_a_pause_that_aborts_refuses_new_requests_and_cuts_the_others(
    server: ModuleType, engine: RemoteEngine
) -> None:
    async with server.slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await server.busy(engine)
        await engine.pause("abort")
        done = await task
    assert (done.finish_reason, 0 < len(done.token_ids) < 300) == ("abort", True)
    assert (await refused(engine, PROMPT)).code is ErrorCode.PAUSED
    await engine.resume()
    assert len((await engine.generate(PROMPT, SHORT, "b")).token_ids) == 8


async def test_a_pause_that_keeps_freezes_requests_which_go_on_with_their_cache(
    server: ModuleType, engine: RemoteEngine, first: Weights
) -> None:
    computed = engine.stats().prefilled_tokens
    async with server.slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await server.busy(engine)
        assert not await server.stands_still(engine)
        await engine.pause("keep")
        assert await server.stands_still(engine)
    assert (task.done(), engine.stats().running, engine.stuck_for()) == (False, 1, 0.0)
    await engine.resume()
    made = await task
    assert (made.finish_reason, len(made.token_ids)) == ("length", 300)
    assert worst(made, first.model, LONG) < 1e-4
    assert engine.stats().prefilled_tokens == computed + len(PROMPT)


async def test_a_frozen_request_that_is_cut_returns_what_it_has(
    server: ModuleType, engine: RemoteEngine, first: Weights
) -> None:
    async with server.slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await server.busy(engine)
        await engine.pause("keep")
    assert await engine.abort("a") == 1
    done = await task
    assert (done.finish_reason, 0 < len(done.token_ids) < 300) == ("abort", True)
    assert worst(done, first.model, LONG) < 1e-4


async def test_the_load_has_the_requests_and_the_kv_tokens_that_they_hold(
    server: ModuleType, engine: RemoteEngine
) -> None:
    idle = await engine.load()
    async with server.slowed(engine):
        task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
        await server.busy(engine)
        busy = idle
        async with asyncio.timeout(60):
            while (busy.running, busy.kv_used) < (1, idle.kv_used + len(PROMPT)):
                busy = await engine.load()
    await engine.abort("a")
    await task
    print(idle, busy)
    assert (idle.running, idle.waiting, idle.max_len) == (0, 0, engine.max_len)
    assert (busy.running, busy.waiting, busy.kv_tokens) == (1, 0, idle.kv_tokens)
    assert idle.kv_tokens >= engine.max_len
    assert busy.kv_used <= idle.kv_used + len(PROMPT) + 300 + BLOCK


async def test_a_prefix_that_was_computed_is_not_computed_again(engine: RemoteEngine) -> None:
    prompt = [7, 9] * BLOCK
    before = engine.stats()
    await engine.generate(prompt, SHORT, "a")
    await engine.generate([*prompt, 5], SHORT, "b")
    after = engine.stats()
    assert after.reused_tokens - before.reused_tokens == 2 * BLOCK
    assert after.prefilled_tokens - before.prefilled_tokens == 2 * BLOCK + 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("most_likely", [0, 3, 20])
async def test_a_scored_prompt_has_the_models_logprobs_whether_its_prefix_is_cached_or_not(
    engine: RemoteEngine, first: Weights, most_likely: int, streamed: bool
) -> None:
    prompt = [*([17, 19] * BLOCK), *PROMPT]
    asked = SHORT.model_copy(update={"prompt_logprobs": most_likely, "temperature": 0.5, "top_k": 2})
    with torch.inference_mode():
        logprobs = first.model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    best = logprobs.topk(most_likely)
    for name in "ab":
        if streamed:
            pieces = [piece async for piece in engine.stream(prompt, asked, name)]
            [scores] = [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None]
        else:
            scores = (await engine.generate(prompt, asked, name)).prompt_logprobs
        assert scores is not None
        expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert scores.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert scores.top_ids == best.indices.tolist()
        values = [value for row in scores.top_logprobs for value in row]
        assert values == pytest.approx(best.values.flatten().tolist(), abs=1e-4)


async def test_a_prompt_of_one_token_has_no_scores(engine: RemoteEngine) -> None:
    made = await engine.generate([5], SHORT.model_copy(update={"prompt_logprobs": 2}), "a")
    assert made.prompt_logprobs == PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[])
    assert len(made.token_ids) == SHORT.max_tokens
