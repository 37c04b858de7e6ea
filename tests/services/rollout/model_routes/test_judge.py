"""A model that a rollout service serves judges for the reward service."""

import asyncio
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from trackway.clients import close_shared_http
from trackway.deploy.bundled import TINY_MODEL
from trackway.reward.models import JudgeScorer, JudgeSettings
from trackway.reward.scorers import scorers_of
from trackway.reward.settings import RewardSettings
from trackway.wire.reward import ScoreRequest


def test_a_rollout_service_answers_a_judges_question(
    scripted_url: str, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says = tokenizer.encode("Score: 4<|im_end|>", add_special_tokens=False)
    scorer = JudgeScorer(JudgeSettings.model_validate({"base_url": f"{scripted_url}/v1", "model": "tiny"}))

    async def score() -> float:
        try:
            asked = ScoreRequest(data_source="sums", solution_str="1 + 1 = 2", ground_truth="2")
            return (await scorer.score(asked, "default")).score
        finally:
            await close_shared_http()

    assert asyncio.run(score()) == 0.4


VERLS_WAY = """
import httpx

async def compute_score(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
):
    messages = [{"role": "user", "content": f"{solution_str} {ground_truth}"}]
    async with httpx.AsyncClient(trust_env=False) as client:
        url = f"http://{reward_router_address}/v1/chat/completions"
        reply = await client.post(url, json={"model": "tiny", "messages": messages, "max_tokens": 9})
    text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    return {"score": float(text), "ids": len(reward_model_tokenizer.encode("1 + 1"))}
"""


def test_a_rollout_service_answers_a_function_that_asks_verls_reward_model(
    scripted_url: str, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    engine.says = tokenizer.encode("0.25<|im_end|>", add_special_tokens=False)
    file = tmp_path / "judging.py"
    file.write_text(VERLS_WAY)
    settings = {
        "custom_reward_function": {"path": file},
        "reward_model": {"path": str(TINY_MODEL), "base_url": scripted_url},
    }
    [scorer] = scorers_of(RewardSettings.model_validate(settings))

    reward = asyncio.run(
        scorer.score(ScoreRequest(data_source="sums", solution_str="1 + 1 = 2", ground_truth="2"), "default")
    )

    assert (reward.score, reward.components) == (0.25, {"ids": float(len(tokenizer.encode("1 + 1")))})
