"""An agent of a framework with the tiny model itself, in the embedded engine."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.services.agent.agent_services import group
from tests.services.agent.sessions.external_services import serving_with
from tests.services.agent.sessions.test_examples import installed
from trackway.agent.settings import AgentSettings
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.app import create_app as create_rollout
from trackway.rollout.settings import RolloutSettings
from trackway.wire.trajectory import StopReason

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.timeout(900)]

QUESTION = "Tom had 12 pens and lost 5 of them. How many pens does Tom still have?"


async def test_the_openai_agents_sdk_solves_a_problem_with_the_tiny_model(
    settings: AgentSettings, tmp_path: Path
) -> None:
    rollout = create_rollout(RolloutSettings(model_path=TINY_MODEL, model_name="tiny", weights_url=str(tmp_path)))
    own = settings.model_copy(update={"model_path": str(TINY_MODEL)})
    serving = serving_with(own, AutoTokenizer.from_pretrained(TINY_MODEL))
    async with serving(installed("openai_agents_sdk.py")) as services, rollout.router.lifespan_context(rollout):
        services.rollout.app = rollout
        [trajectory] = await services.run(
            group(
                "external",
                truth="7",
                sample__prompt=[{"role": "user", "content": QUESTION}],
                sampling_params={"max_tokens": 64, "temperature": 0.0},
                limits={"max_prompt_length": 512, "max_response_length": 512, "timeout_s": 120.0},
            )
        )
        seen = [request.token_ids for _, request in services.model.requests]

    assert trajectory.error is None, trajectory.error.message
    first, second = trajectory.turns
    assert trajectory.further_rows == [] and trajectory.stop_reason is StopReason.ANSWERED
    assert seen == [
        trajectory.prompt_ids,
        trajectory.prompt_ids + trajectory.response_ids[: second.response_start],
    ]
    [call] = first.messages[0].tool_calls or []
    value = eval(json.loads(call.function.arguments)["expression"], {})  # of the tiny model's numbers
    assert first.messages[1].content == f"\n<|im_start|>tool\n{value}<|im_end|>\n<|im_start|>assistant\n"
    assert second.messages[0].content.startswith("#### ") and second.messages[0].content == trajectory.log.strip()
    correct = float(second.messages[0].content == "#### 7")
    assert trajectory.reward is not None and trajectory.reward.score == correct
