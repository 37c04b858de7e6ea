"""Prompt logprobs of the routes: whole, streamed, in a batch, of other policies and by OpenAI's client."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.services.rollout.idle_engine import IdleEngine
from tests.services.rollout.test_app import Running
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.wire import rollout as wire
from trackway.wire.rollout import GeneratePiece, GenerateReply, PromptLogprobs
from trackway.wire.service import BatchResult
from trackway.wire.weights import policy_url

pytestmark = pytest.mark.anyio

PROMPT = [11, 12, 13, 40, 41]


@pytest.fixture
def settings(model_path: Path, tmp_path: Path) -> RolloutSettings:
    return RolloutSettings(model_path=model_path, weights_url=str(tmp_path / "weights"), device="cpu", max_num_seqs=4)


def body(most_likely: int | None, token_ids: Sequence[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": 3, "seed": 1, "ignore_eos": True, "prompt_logprobs": most_likely}
    return {"token_ids": [*token_ids], "sampling_params": params, **fields}


def expect_scores(found: PromptLogprobs | None, folder: Path, token_ids: Sequence[int], most_likely: int) -> None:
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[*token_ids]])).logits[0, :-1]
    logprobs = torch.log_softmax(logits, -1)
    assert found is not None
    assert found.logprobs == pytest.approx(
        logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist(), abs=1e-5
    )
    assert found.top_ids == logprobs.topk(most_likely).indices.tolist()


async def scores_of(client: httpx.AsyncClient, request: dict[str, Any]) -> PromptLogprobs | None:
    answer = await client.post("/generate", json=request)
    assert answer.status_code == 200, answer.text
    return GenerateReply.model_validate(answer.json()).prompt_logprobs


async def test_a_reply_a_stream_and_a_batch_have_the_same_scores(running: Running, settings: RolloutSettings) -> None:
    async with running(create_app(settings)) as client:
        whole = await scores_of(client, body(2))
        lines = (await client.post("/generate_stream", json=body(2))).text.splitlines()
        entries = [{"request": request} for request in (body(2), body(0, [7, 8]), body(None))]
        results = (await client.post("/generate_batch", json={"entries": entries})).text.splitlines()
        plain = (await client.post("/generate", json=body(None))).json()
    expect_scores(whole, settings.model_path, PROMPT, 2)
    streamed = [GeneratePiece.model_validate_json(line).prompt_logprobs for line in lines]
    assert [scores for scores in streamed if scores is not None] == [whole]
    batch = {read.index: read for read in map(BatchResult[GenerateReply].model_validate_json, results)}
    replies = [reply for index in range(3) if (reply := batch[index].reply)]
    assert replies[0].prompt_logprobs == whole
    expect_scores(replies[1].prompt_logprobs, settings.model_path, [7, 8], 0)
    assert replies[2].prompt_logprobs is None and "prompt_logprobs" not in plain


async def test_each_policy_scores_with_its_own_weights(
    running: Running, settings: RolloutSettings, other_path: Path
) -> None:
    WeightStore(policy_url(str(settings.weights_url), "teacher")).publish(1, "teacher", other_path, ANY_PROOF)
    async with running(create_app(settings)) as client:
        teacher = await scores_of(client, body(3, model="teacher", min_weight_version=1))
        own = await scores_of(client, body(3))
    expect_scores(teacher, other_path, PROMPT, 3)
    expect_scores(own, settings.model_path, PROMPT, 3)


async def test_more_scores_than_a_reply_may_have_are_refused(
    running: Running, settings: RolloutSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_PROMPT_LOGPROBS", 8)
    async with running(create_app(settings)) as client:
        assert await scores_of(client, body(2)) is not None
        beyond = await client.post("/generate", json=body(3))
        alone = await client.post("/generate", json=body(0, [5] * 10))
    assert (beyond.status_code, beyond.json()["error"]["detail"]["param"]) == (422, "prompt_logprobs")
    assert beyond.json()["error"]["message"] == (
        "prompt_logprobs: expected at most 8 logprobs in a reply, got 12 of 4 prompt positions; lower it, or score "
        "fewer tokens"
    )
    assert "got 9 of 9 prompt positions" in alone.json()["error"]["message"]


async def test_an_engine_that_scores_no_prompts_refuses_by_name(running: Running, settings: RolloutSettings) -> None:
    async with running(create_app(settings, IdleEngine())) as client:
        refused = await client.post("/generate", json=body(0))
    assert (refused.status_code, refused.json()["error"]["detail"]["param"]) == (422, "prompt_logprobs")
    assert "prompt_logprobs: expected an engine that scores prompts" in refused.json()["error"]["message"]
