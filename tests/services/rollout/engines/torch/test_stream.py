"""Streaming: the pieces are the generation, and who stops listening stops the request."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.services.rollout.engine_runs import LONG, PROMPT, running
from tests.services.rollout.rollout_models import EOS
from tests.waiting import async_until
from tests.weight_proofs import ANY_PROOF
from trackway.rollout.engines.protocol import Piece
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams

pytestmark = pytest.mark.anyio


async def pieces_of(engine: TorchEngine, params: SamplingParams, request_id: str) -> list[Piece]:
    return [piece async for piece in engine.stream(PROMPT, params, request_id)]


async def test_the_pieces_joined_are_what_generate_returns(engine: TorchEngine) -> None:
    params = SamplingParams(seed=2, max_tokens=300)
    whole = await engine.generate(PROMPT, params, "a")
    pieces = await pieces_of(engine, params, "b")
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [logprob for piece in pieces for logprob in piece.logprobs] == pytest.approx(whole.logprobs, abs=1e-5)
    assert whole.token_ids[-1] == EOS
    assert [piece.finish_reason for piece in pieces] == [None] * len(whole.token_ids) + ["stop"]


async def test_a_piece_comes_while_the_request_runs(engine: TorchEngine) -> None:
    async with aclosing(engine.stream(PROMPT, LONG, "a")) as stream:
        first = await anext(stream)
        assert engine.stats().running == 1
    assert len(first.token_ids) == len(first.logprobs) == 1


async def test_closing_the_iterator_aborts_the_request(engine: TorchEngine) -> None:
    async with aclosing(engine.stream(PROMPT, LONG, "a")) as stream:
        await anext(stream)
    await async_until(lambda: not engine.stats().running)
    assert engine.stats().generated_tokens < 300


async def test_a_cut_stream_ends_with_that_reason(engine: TorchEngine) -> None:
    task = asyncio.create_task(pieces_of(engine, LONG, "mine"))
    await running(engine, 1)
    assert await engine.abort("mine") == 1
    pieces = await task
    assert pieces[-1] == Piece([], [], 0, "abort")
    assert len(pieces) - 1 == engine.stats().generated_tokens < 300


async def test_each_piece_names_the_weights_that_made_it(engine: TorchEngine, other_path: Path) -> None:
    task = asyncio.create_task(pieces_of(engine, LONG, "a"))
    await running(engine, 1)
    await engine.pause("keep")
    cut = engine.stats().generated_tokens
    await engine.load_weights(other_path, 4, ANY_PROOF)
    await engine.resume()
    assert [piece.version for piece in await task] == [0] * cut + [4] * (300 - cut + 1)


async def test_a_prompt_that_is_refused_is_refused_at_the_first_piece(engine: TorchEngine) -> None:
    with pytest.raises(TrackwayError, match="expected 1 to 1023 prompt tokens, got 0") as raised:
        await anext(engine.stream([], LONG, "a"))
    assert raised.value.code is ErrorCode.INVALID_REQUEST
