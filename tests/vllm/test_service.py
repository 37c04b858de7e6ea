"""The rollout service over a real vLLM, and a plain vLLM in the service's place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest

from tests.vllm.vllm_runs import (
    DEADLINE_S,
    LONG,
    MARKS,
    PROMPT,
    SHORT,
    Weights,
    busy,
    logprobs_of,
    settings_of,
    slowed,
)
from trackway.clients import close_shared_http
from trackway.clients.rollout import RolloutClient
from trackway.clients.weights import WeightStore
from trackway.rollout.app import create_app
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import GenerateReply, GenerateRequest, PausedReply

pytestmark = MARKS


@asynccontextmanager
async def serving(
    engine: VllmEngine, base: Path, folder: Path, mode: Literal["keep", "wait", "abort"] = "keep"
) -> AsyncIterator[RolloutClient]:
    """The service, attached to the session's server and following a store in `folder`."""
    settings = settings_of(
        base, folder / "log", engine_url=engine.http.base_url, weights_url=str(folder / "store"), update_mode=mode
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rollout") as http:
            yield RolloutClient("http://rollout", http)


async def test_the_service_answers_in_the_wires_words_and_follows_its_store(
    shared: VllmEngine, base: Path, first: Weights, second: Weights, tmp_path: Path
) -> None:
    request = GenerateRequest(token_ids=PROMPT, sampling_params=SHORT, request_id="mine")
    async with serving(shared, base, tmp_path) as client:
        old = await client.generate(request)
        WeightStore(str(tmp_path / "store")).publish(1, "run", second.folder, proof=second.proof)
        new = await client.generate(request.model_copy(update={"min_weight_version": 1}))
    assert (old.request_id, old.usage.prompt_tokens, old.usage.completion_tokens) == ("mine", 3, 8)
    for reply, weights, version in ((old, first, 0), (new, second, 1)):
        assert [span.version for span in reply.choices[0].weight_versions] == [version]
        assert logprobs(reply) == pytest.approx(
            logprobs_of(weights.model, [*PROMPT, *reply.choices[0].token_ids], 3), abs=1e-4
        )


@pytest.mark.parametrize(("mode", "versions"), [("keep", [0, 1]), ("abort", [0, 1]), ("wait", [0])])
async def test_a_generation_survives_an_update_in_each_mode(
    shared: VllmEngine,
    base: Path,
    second: Weights,
    tmp_path: Path,
    mode: Literal["keep", "wait", "abort"],
    versions: list[int],
) -> None:
    async with serving(shared, base, tmp_path, mode) as client:
        with slowed(shared):
            call = asyncio.create_task(client.generate(GenerateRequest(token_ids=PROMPT, sampling_params=LONG)))
            await busy(shared)
            WeightStore(str(tmp_path / "store")).publish(1, "run", second.folder, proof=second.proof)
            async with asyncio.timeout(DEADLINE_S):
                while not await under_way(client, mode):
                    await asyncio.sleep(0.02)
        choice = (await call).choices[0]
        later = await client.generate(GenerateRequest(token_ids=PROMPT, sampling_params=SHORT, min_weight_version=1))
    assert (choice.finish_reason, len(choice.token_ids)) == ("length", 300)
    assert [span.version for span in choice.weight_versions] == versions
    assert later.choices[0].weight_versions[0].version == 1


async def test_a_plain_vllm_stands_in_for_the_service(engine: VllmEngine, first: Weights) -> None:
    """Ours is a subset of its wire; what only we know (`min_weight_version`, `context_start`) it does not look at."""
    try:
        client = RolloutClient(engine.http.base_url)
        reply = await client.generate(GenerateRequest(token_ids=PROMPT, sampling_params=SHORT))
        with pytest.raises(TrackwayError, match="400"):
            await client.generate(GenerateRequest(token_ids=[5] * 2000))
    finally:
        await close_shared_http()
    choice = reply.choices[0]
    assert (choice.finish_reason, len(choice.token_ids), reply.usage.total_tokens) == ("length", 8, 11)
    assert logprobs(reply) == pytest.approx(logprobs_of(first.model, [*PROMPT, *choice.token_ids], 3), abs=1e-4)
    assert [span.version for span in choice.weight_versions] == [engine.version]


async def under_way(client: RolloutClient, mode: Literal["keep", "wait", "abort"]) -> bool:
    """Whether the update is done or, in the mode `wait`, waits for the generation."""
    if mode == "wait":
        return (await client.call("GET", "/is_paused", reply=PausedReply)).is_paused
    return (await client.weights()).version == 1


async def test_a_plain_vllm_that_was_never_given_a_version_serves_version_0(nameless: GenerateReply) -> None:
    assert [(s.version, s.start, s.end) for s in nameless.choices[0].weight_versions] == [(0, 0, 8)]


def logprobs(reply: GenerateReply) -> list[float]:
    return reply.choices[0].token_logprobs
