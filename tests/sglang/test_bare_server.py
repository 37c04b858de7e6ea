"""A real SGLang without a tokenizer and without adapters: what it refuses, and the loss of its scheduler."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers.structured_outputs import guided
from tests.sglang.core.test_contract import write_adapter
from tests.sglang.sglang_runs import MARKS, settings_of
from tests.vllm.vllm_runs import PROMPT, SHORT, started
from tests.waiting import async_until
from tests.weight_proofs import ANY_PROOF
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = MARKS


@pytest.fixture(scope="module")
async def bare(environment: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SglangEngine]:
    """An engine whose server the last test of this module ends."""
    async with started(SglangEngine(settings_of(base, tmp_path_factory.mktemp("bare") / "sglang.log"))) as engine:
        yield engine


def attached(bare: SglangEngine, **more: Any) -> SglangEngine:
    """An engine that takes the server for one with a tokenizer and adapters."""
    return SglangEngine(bare.settings.model_copy(update={"engine_url": bare.http.base_url, **more}))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_guided_request_is_refused_without_a_token(bare: SglangEngine, streamed: bool) -> None:
    async with started(attached(bare)) as engine:
        with pytest.raises(TrackwayError, match="that sglang can guide by, got its refusal") as raised:
            if streamed:
                await anext(engine.stream(PROMPT, guided(), "a"))
            else:
                await engine.generate(PROMPT, guided(), "a")
        assert raised.value.code is ErrorCode.INVALID_REQUEST
        assert len((await engine.generate(PROMPT, SHORT, "b")).token_ids) == SHORT.max_tokens


async def test_an_adapter_is_refused_in_the_servers_words(bare: SglangEngine, tmp_path: Path) -> None:
    async with started(attached(bare, max_lora_rank=8)) as engine:
        with pytest.raises(TrackwayError, match="LoRA is not enabled") as raised:
            await engine.load_weights(write_adapter(tmp_path / "adapter"), 1, ANY_PROOF)
        assert (raised.value.code, engine.version) == (ErrorCode.WEIGHTS_CORRUPT, 0)
        assert len((await engine.generate(PROMPT, SHORT, "a")).token_ids) == SHORT.max_tokens


async def test_a_scheduler_that_dies_of_memory_taken_again_twice_takes_the_server_with_it(bare: SglangEngine) -> None:
    async with httpx.AsyncClient(base_url=bare.http.base_url, timeout=30) as http:
        await http.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
        await http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
        with pytest.raises(httpx.TransportError):
            await http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
    await async_until(lambda: bare.stuck_for() == float("inf"))
    with pytest.raises(TrackwayError, match="expected a running server") as raised:
        await bare.generate(PROMPT, SHORT, "a")
    assert (raised.value.code, raised.value.retryable) == (ErrorCode.UNAVAILABLE, True)
