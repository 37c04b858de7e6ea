"""A model that a rollout service serves judges for the reward service."""

import asyncio

from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from trackway.clients import close_shared_http
from trackway.reward.judge import JudgeScorer, JudgeSettings
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
