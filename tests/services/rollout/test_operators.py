"""Steering an engine is an operator's; generating and looking are not."""

import pytest
from benchmarks.sim_engine import SIM

from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings

pytestmark = pytest.mark.anyio

AGENT, OPERATOR = "agent-0123456789abcdef", "operator-0123456789abcdef"
OPERATORS = ["/pause", "/resume", "/abort_requests", "/inference/v1/abort_requests", "/sleep", "/wake_up"]
EVERYBODYS = ["/is_paused", "/is_sleeping", "/weight_info", "/weights", "/v1/models"]


async def test_an_agents_token_generates_and_looks_and_does_not_steer(running) -> None:
    tokens = {"agents": {"secret": AGENT}, "ops": {"secret": OPERATOR, "scopes": ["admin"]}}
    settings = RolloutSettings.model_validate({"engine": SIM, "enable_sleep": True, "auth": {"tokens": tokens}})
    generate = {"token_ids": [11, 12], "sampling_params": {"max_tokens": 2}}
    found: dict[str, list[int]] = {}
    async with running(create_app(settings)) as client:
        for token in (AGENT, OPERATOR):
            headers = {"authorization": f"Bearer {token}"}
            steered = [(await client.post(path, headers=headers)).status_code for path in OPERATORS]
            looked = [(await client.get(path, headers=headers)).status_code for path in EVERYBODYS]
            generated = await client.post("/generate", json=generate, headers=headers)
            found[token] = [*steered, *looked, generated.status_code]
    assert found[AGENT] == [403] * len(OPERATORS) + [200] * (len(EVERYBODYS) + 1)
    assert found[OPERATOR] == [200] * (len(OPERATORS) + len(EVERYBODYS) + 1)
