"""SGLang's protocol: what goes out, what comes back, and what is refused."""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.services.rollout.engine_runs import until
from tests.services.rollout.engines.remote.sglang import sglang_fake as fakes
from tests.services.rollout.engines.remote.sglang.sglang_cases import LONG, PROMPT, answer, in_flight, params, sent
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from trackway.rollout.engines.protocol import Capability
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import WeightSpan
from trackway.wire.weights import Probe, WeightProof

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
Folder = Callable[[int], Path]
Starts = Callable[..., AbstractAsyncContextManager[SglangEngine]]


async def test_ids_and_logprobs_are_the_models_and_the_span_is_version_0(engine: SglangEngine) -> None:
    generation = await engine.generate(PROMPT, params(6), "r")
    assert generation.token_ids == answer(0, 6)
    assert generation.logprobs == [fakes.logprob(0, token) for token in generation.token_ids]
    assert generation.finish_reason == "length"
    assert generation.spans == [WeightSpan(version=0, start=0, end=6)]


async def test_a_request_has_the_fields_of_the_protocol(engine: SglangEngine, fake: Fake) -> None:
    await engine.generate(PROMPT, params(4, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop_token_ids=[9]), "r")
    (body,) = sent(fake, "/generate")
    assert len(body.pop("rid")) == 32
    assert body == {
        "input_ids": PROMPT,
        "sampling_params": {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "max_new_tokens": 4,
            "stop_token_ids": [fakes.EOS, 9],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "sampling_seed": 3,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_sampling_mask": True,
        "extra_key": "0",
        "stream": True,
    }


@pytest.mark.parametrize(
    ("grammar", "text"),
    [({"json": {"enum": [1, 2]}}, '{"enum": [1, 2]}'), ({"json_object": True}, '{"type": "object"}')],
)
async def test_a_grammar_goes_out_as_a_json_schema_and_the_answer_ends_with_it(
    engine: SglangEngine, fake: Fake, grammar: dict[str, Any], text: str
) -> None:
    await engine.generate(PROMPT, params(4, ignore_eos=True, structured_outputs=grammar), "r")
    sampling = sent(fake, "/generate")[0]["sampling_params"]
    assert (sampling["json_schema"], sampling["ignore_eos"]) == (text, False)
    assert fakes.EOS in sampling["stop_token_ids"]


async def test_a_structural_tag_goes_out_as_it_is_and_the_answer_ends_with_it(engine: SglangEngine, fake: Fake) -> None:
    tag = '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}'
    await engine.generate(PROMPT, params(4, ignore_eos=True, structured_outputs={"structural_tag": tag}), "r")
    sampling = sent(fake, "/generate")[0]["sampling_params"]
    assert (sampling["structural_tag"], "json_schema" in sampling, sampling["ignore_eos"]) == (tag, False, False)


async def test_a_grammar_that_sglang_refuses_is_a_bad_request_by_name(engine: SglangEngine) -> None:
    nonsense = {"json": {"type": "nonsense"}}
    with pytest.raises(TrackwayError, match=r"that sglang can guide by.*400: Failed to compile json grammar") as raised:
        await engine.generate(PROMPT, params(4, structured_outputs=nonsense), "r")
    assert (raised.value.code, raised.value.detail["param"]) == (ErrorCode.INVALID_REQUEST, "response_format")


@pytest.mark.parametrize(
    ("engine_tokenizer", "files", "skips"), [(False, True, True), (True, True, False), (True, False, True)]
)
def test_sglang_has_its_tokenizer_only_if_it_is_wanted_and_there(
    folder: Folder, engine_tokenizer: bool, files: bool, skips: bool
) -> None:
    path = folder(0)
    if files:
        (path / "tokenizer.json").write_text("{}")
    settings = RolloutSettings(
        engine="sglang", model_path=path, engine_python=Path("python"), engine_tokenizer=engine_tokenizer
    )
    engine = SglangEngine(settings)
    assert ("--skip-tokenizer-init" in engine._command(1)) == skips
    assert (Capability.STRUCTURED_OUTPUTS in engine.capabilities) == (not skips)


async def test_logprobs_are_those_after_temperature(engine: SglangEngine) -> None:
    warm = await engine.generate(PROMPT, params(3, temperature=0.5), "r")
    assert warm.logprobs == [fakes.logprob(0, token, 0.5) for token in warm.token_ids]


@pytest.mark.parametrize(
    ("asked", "top_k"), [({"top_p": 0.5}, fakes.VOCAB), ({"top_k": 3}, 3), ({"top_p": 0.5, "top_k": 3}, 3)]
)
async def test_logprobs_after_top_k_and_top_p_are_asked_for_with_a_finite_top_k(
    engine: SglangEngine, fake: Fake, asked: dict[str, Any], top_k: int
) -> None:
    made = await engine.generate(PROMPT, params(3, **asked), "r")
    assert made.logprobs == [fakes.logprob(0, token) / 2 for token in made.token_ids]
    assert sent(fake, "/generate")[0]["sampling_params"]["top_k"] == top_k


@pytest.mark.parametrize("asked", [{}, {"top_k": 0}, {"temperature": 0.0, "top_k": 3, "top_p": 0.5}])
async def test_the_plain_and_the_greedy_distribution_need_no_candidates(
    engine: SglangEngine, fake: Fake, asked: dict[str, Any]
) -> None:
    made = await engine.generate(PROMPT, params(3, **asked), "r")
    assert made.logprobs == [fakes.logprob(0, token) for token in made.token_ids]
    assert not sent(fake, "/generate")[0]["return_sampling_mask"]


@pytest.mark.parametrize("incremental", [True, False])
async def test_top_logprobs_are_asked_for_and_hold_the_sampled_token(
    starts: Starts, fake: Fake, incremental: bool
) -> None:
    fake.incremental = incremental
    async with starts() as engine:
        made = await engine.generate(PROMPT, params(20, logprobs=3), "r")
    assert sent(fake, "/generate")[0]["top_logprobs_num"] == 3
    best = [(token, fakes.logprob(0, token)) for token in (0, 10, 20)]  # of 5 equally likely ones
    assert made.logprobs == [fakes.logprob(0, token) for token in made.token_ids]
    for token, logprob, top in zip(made.token_ids, made.logprobs, made.top_logprobs, strict=True):
        assert top == (best if (token, logprob) in best else [*best[:2], (token, logprob)])


async def test_top_logprobs_after_top_k_and_top_p_are_of_the_kept_tokens_with_the_sampled_ones_shift(
    engine: SglangEngine, fake: Fake
) -> None:
    made = await engine.generate(PROMPT, params(20, logprobs=20, top_p=0.9), "r")
    for token, logprob, top in zip(made.token_ids, made.logprobs, made.top_logprobs, strict=True):
        shift = logprob - fakes.logprob(0, token)
        ids = [*dict.fromkeys((*(kept for kept in (0, 10) if kept != token), token))]
        assert sorted(top) == sorted(
            (other, logprob if other == token else fakes.logprob(0, other) + shift) for other in ids
        )


async def test_top_logprobs_that_do_not_come_fail_the_request(engine: SglangEngine, fake: Fake) -> None:
    fake.ranks = False
    with pytest.raises(TrackwayError, match="expected top_logprobs of 1 tokens, got 0") as raised:
        await engine.generate(PROMPT, params(3, logprobs=3), "r")
    assert raised.value.code is ErrorCode.ENGINE_FAILED


async def test_pieces_join_to_the_generation_and_the_last_says_why_it_ended(engine: SglangEngine) -> None:
    pieces = [piece async for piece in engine.stream(PROMPT, params(20), "r")]
    assert [token for piece in pieces for token in piece.token_ids] == answer(0, 20)
    assert len(pieces) > 5
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


async def test_a_server_whose_events_repeat_all_tokens_gives_the_same(starts: Starts, fake: Fake) -> None:
    fake.incremental = False
    async with starts() as engine:
        generation = await engine.generate(PROMPT, params(20, top_k=3), "r")
    assert generation.token_ids == answer(0, 20)
    assert generation.logprobs == [fakes.logprob(0, token) / 2 for token in generation.token_ids]


async def test_a_server_without_spans_names_the_version_of_each_event(starts: Starts, fake: Fake) -> None:
    fake.spans = False
    async with starts() as engine:
        assert (await engine.generate(PROMPT, params(4), "r")).spans == [WeightSpan(version=0, start=0, end=4)]


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_stop_token_ends_the_response_and_is_its_last(
    engine: SglangEngine, fake: Fake, ignore_eos: bool
) -> None:
    fake.step_s = 0.02
    stop = answer(0, 4)[3]
    made = await engine.generate(PROMPT, params(200, stop_token_ids=[stop], ignore_eos=ignore_eos), "r")
    assert (made.token_ids, made.finish_reason) == (answer(0, 4), "stop")
    await until(lambda: not fake.requests, within_s=1)
    assert len(sent(fake, "/abort_request")) == ignore_eos


async def test_the_models_own_stop_ends_the_response_unless_ignored(engine: SglangEngine, fake: Fake) -> None:
    fake.forced = [9, fakes.EOS]
    made = await engine.generate(PROMPT, params(10), "r")
    assert (made.token_ids, made.finish_reason) == ([9, fakes.EOS], "stop")
    fake.forced = [9, fakes.EOS, 11]
    assert (await engine.generate(PROMPT, params(3, ignore_eos=True), "r")).token_ids == [9, fakes.EOS, 11]


async def test_the_response_is_bounded_by_the_length_of_the_model(starts: Starts, fake: Fake) -> None:
    async with starts(max_model_len=10) as engine:
        assert engine.max_len == 10
        assert len((await engine.generate(PROMPT, params(100), "r")).token_ids) == 7


async def test_the_last_token_of_the_vocabulary_is_scored(engine: SglangEngine) -> None:
    last = fakes.VOCAB - 1
    assert await engine.score([3, last, 5]) == [fakes.logprob(0, last), fakes.logprob(0, 5)]
    proof = WeightProof(probes=[Probe(token_ids=[3, last], positions=[1], logprobs=[fakes.logprob(0, last)])])
    await engine.load_weights(engine.settings.model_path, 1, proof)


async def test_a_probe_is_cut_to_what_the_server_takes(engine: SglangEngine, fake: Fake) -> None:
    probe = Probe(token_ids=[3] * 256, positions=[1], logprobs=[fakes.logprob(0, 3)])
    await engine.load_weights(engine.settings.model_path, 1, WeightProof(probes=[probe]))
    [scored] = [body for body in sent(fake, "/generate") if body["sampling_params"]["max_new_tokens"] == 1]
    assert len(scored["input_ids"]) == 249


async def test_prompt_tokens_out_of_the_cache_are_counted_as_reused(engine: SglangEngine) -> None:
    await engine.generate(PROMPT, params(4), "r")
    await engine.generate(PROMPT + answer(0, 4) + [9], params(4), "r")
    stats = engine.stats()
    assert (stats.generated_tokens, stats.reused_tokens, stats.prefilled_tokens) == (8, 7, 3 + 8 - 7)
    assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "expected 1 to 249 prompt tokens, got 0"),
        ([3] * 250, "expected 1 to 249 prompt tokens, got 250"),
        ([3, fakes.VOCAB], r"expected token ids in 0\.\.49, got 3\.\.50"),
        ([-1], r"got -1\.\.-1"),
    ],
)
async def test_a_prompt_that_cannot_be_continued_is_refused_here(
    engine: SglangEngine, fake: Fake, prompt: list[int], message: str
) -> None:
    with pytest.raises(TrackwayError, match=message) as raised:
        await engine.generate(prompt, params(1), "r")
    assert raised.value.code is ErrorCode.INVALID_REQUEST
    assert sent(fake, "/generate") == []


async def test_one_request_more_than_slots_and_queue_is_told_when_to_come_again(starts: Starts, fake: Fake) -> None:
    async with starts(max_num_seqs=1, max_queue=1) as engine:
        tasks = [asyncio.create_task(engine.generate(PROMPT, LONG, "r")) for _ in range(2)]
        await until(lambda: len(fake.requests) == 2)
        assert engine.stats()[:2] == (1, 1)
        with pytest.raises(TrackwayError, match="expected fewer than 2 requests in flight") as raised:
            await engine.generate(PROMPT, LONG, "r")
        assert raised.value.code is ErrorCode.OVERLOADED
        assert raised.value.detail["bound"] == 2
        assert 0 < float(str(raised.value.detail["retry_after_s"])) < 60
        await engine.abort("r")
        await asyncio.gather(*tasks)
        assert (await engine.generate(PROMPT, params(1), "r")).token_ids == answer(0, 1)


async def test_logprobs_that_are_no_numbers_fail_the_request(engine: SglangEngine, fake: Fake) -> None:
    fake.step_s, fake.nan_at = 0.02, 3
    with pytest.raises(TrackwayError, match="expected finite logprobs") as raised:
        await engine.generate(PROMPT, LONG, "r")
    assert raised.value.code is ErrorCode.ENGINE_FAILED
    await until(lambda: not fake.requests, within_s=1)


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, ErrorCode.INVALID_REQUEST), (500, ErrorCode.ENGINE_FAILED), (503, ErrorCode.UNAVAILABLE)],
)
async def test_an_error_answer_is_raised_and_the_next_request_is_served(
    engine: SglangEngine, fake: Fake, status: int, code: ErrorCode
) -> None:
    fake.fail["/generate"] = (status, {"error": {"message": "because"}})
    with pytest.raises(TrackwayError, match=f"{status}: because") as raised:
        await engine.generate(PROMPT, params(2), "r")
    assert raised.value.code is code
    assert (await engine.generate(PROMPT, params(2), "r")).token_ids == answer(0, 2)


@pytest.mark.parametrize(
    ("finish", "code"),
    [
        ({"type": "abort", "status_code": 400, "message": "no"}, ErrorCode.INVALID_REQUEST),
        ({"type": "abort", "status_code": 503, "message": "full"}, ErrorCode.UNAVAILABLE),
        ({"type": "abort", "status_code": 500, "message": "oh"}, ErrorCode.ENGINE_FAILED),
        ({"type": "stop", "matched": fakes.NAN}, ErrorCode.ENGINE_FAILED),
    ],
)
async def test_an_error_inside_the_stream_is_raised(
    engine: SglangEngine, fake: Fake, finish: dict[str, Any], code: ErrorCode
) -> None:
    task = await in_flight(engine, fake)
    (request,) = fake.requests
    request.finish = finish
    fake.leave(request)
    request.changed.set()
    with pytest.raises(TrackwayError) as raised:
        await task
    assert raised.value.code is code


async def test_weights_that_somebody_else_loaded_fail_the_request_and_the_replica(
    engine: SglangEngine, fake: Fake
) -> None:
    fake.version = "12"
    with pytest.raises(TrackwayError, match="got '12'; no other client may update or restart the server") as raised:
        await engine.generate(PROMPT, params(2), "r")
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert engine.stuck_for() == math.inf
