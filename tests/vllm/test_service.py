"""The rollout service over a real vLLM, and a plain vLLM in the service's place."""

import pytest

from tests.servers.service import *  # noqa: F403
from tests.vllm.vllm_runs import MARKS, PROMPT, SHORT, Weights, logprobs_of
from trackway.clients import close_shared_http
from trackway.clients.rollout import RolloutClient
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import GenerateReply, GenerateRequest

pytestmark = MARKS


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
    assert choice.token_logprobs == pytest.approx(logprobs_of(first.model, [*PROMPT, *choice.token_ids], 3), abs=1e-4)
    assert [span.version for span in choice.weight_versions] == [engine.version]


async def test_a_plain_vllm_that_was_never_given_a_version_serves_version_0(nameless: GenerateReply) -> None:
    assert [(s.version, s.start, s.end) for s in nameless.choices[0].weight_versions] == [(0, 0, 8)]
