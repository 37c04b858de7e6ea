"""SGLang's protocol: what goes out, what comes back, and what is refused."""

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.services.rollout.engines.remote.sglang import sglang_fake as fakes
from tests.services.rollout.engines.remote.sglang.sglang_cases import LONG, PROMPT, answer, in_flight, params, sent
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from tests.waiting import async_until
from trackway.rollout.engines.protocol import Capability
from trackway.rollout.engines.remote.control import TokenChunk
from trackway.rollout.engines.remote.sglang import SglangEngine, _Meta, _tops
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import PromptLogprobs
from trackway.wire.weights import Probe, WeightProof

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
Folder = Callable[[int], Path]
Starts = Callable[..., AbstractAsyncContextManager[SglangEngine]]


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


def test_top_logprobs_that_do_not_come_fail_the_request() -> None:
    with pytest.raises(TrackwayError, match="expected top_logprobs of 1 tokens, got 0") as raised:
        _tops(_Meta(), TokenChunk([5], [-1.0], []), truncated=False, count=3)
    assert raised.value.code is ErrorCode.ENGINE_FAILED


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_scored_prompt_is_in_the_first_piece(engine: SglangEngine, fake: Fake, streamed: bool) -> None:
    asked = params(20).model_copy(update={"prompt_logprobs": 0})
    if streamed:
        scores = [piece.prompt_logprobs async for piece in engine.stream(PROMPT, asked, "r")]
        assert scores[1:] == [None] * (len(scores) - 1) and len(scores) > 1
    else:
        scores = [(await engine.generate(PROMPT, asked, "r")).prompt_logprobs]
    rows: list[list[int]] = [[] for _ in PROMPT[1:]]
    logprobs = [fakes.logprob(0, token) for token in PROMPT[1:]]
    assert scores[0] == PromptLogprobs(logprobs=logprobs, top_ids=rows, top_logprobs=[[] for _ in rows])
    assert sent(fake, "/generate")[-1]["logprob_start_len"] == 0


async def test_a_server_whose_events_repeat_all_tokens_gives_the_same(starts: Starts, fake: Fake) -> None:
    fake.incremental = False
    async with starts() as engine:
        generation = await engine.generate(PROMPT, params(20, top_k=3), "r")
    assert generation.token_ids == answer(0, 20)
    assert generation.logprobs == [fakes.logprob(0, token) / 2 for token in generation.token_ids]


async def test_a_probe_is_cut_to_what_the_server_takes(engine: SglangEngine, fake: Fake) -> None:
    probe = Probe(token_ids=[3] * 256, positions=[1], logprobs=[fakes.logprob(0, 3)])
    await engine.load_weights(engine.settings.model_path, 1, WeightProof(probes=[probe]))
    [scored] = [body for body in sent(fake, "/generate") if body["sampling_params"]["max_new_tokens"] == 1]
    assert len(scored["input_ids"]) == 249


async def test_logprobs_that_are_no_numbers_fail_the_request(engine: SglangEngine, fake: Fake) -> None:
    fake.step_s, fake.nan_at = 0.2, 3
    with pytest.raises(TrackwayError, match="expected finite logprobs") as raised:
        await engine.generate(PROMPT, LONG, "r")
    assert raised.value.code is ErrorCode.ENGINE_FAILED
    await async_until(lambda: not fake.requests, within_s=30)  # all its tokens take 40


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
