"""With tokens on every service: an agent's token is enough for a whole trajectory, and it shows nowhere."""

import logging

import httpx
import pytest
from pydantic import SecretStr
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, call, group, open_services
from tests.services.agent.scripted_model import END
from trackway.agent.settings import AgentSettings
from trackway.clients import AgentClient
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import StopReason, Trajectory

pytestmark = pytest.mark.anyio

TOKEN, WRONG = "agent-0123456789abcdef", "wrong-0123456789abcdef"
COUNT, ANSWER = call("counter") + END, "#### 18" + END


async def rolled_out(services: AgentServices) -> Trajectory:
    """One traced trajectory, asked for as the trainer does."""
    services.model.scripts[0] = [COUNT, ANSWER]
    http = httpx.AsyncClient(transport=httpx.ASGITransport(services.agent))
    async with http:
        client = AgentClient("http://agent", http, token=SecretStr(TOKEN))
        [trajectory] = [trajectory async for trajectory in client.group(group(trace=True))]
    return trajectory


@pytest.mark.parametrize(("sent", "works"), [(TOKEN, True), (WRONG, False), (None, False)])
async def test_a_trajectory_needs_the_token_of_the_other_services(
    sent: str | None,
    works: bool,
    settings: AgentSettings,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TRACKWAY_AUTH__TOKENS__AGENTS__SECRET", TOKEN)
    if sent is not None:
        monkeypatch.setenv("TRACKWAY_TOKEN", sent)
    settings = AgentSettings(**settings.model_dump(exclude={"token", "auth"}))
    async with open_services(settings, tokenizer) as services:
        trajectory = await rolled_out(services)
        spans = "".join(span.to_json() for span in services.spans())
    assert (trajectory.error is None) is works
    if trajectory.error is None:
        assert (trajectory.stop_reason, trajectory.reward.score if trajectory.reward else None) == (
            StopReason.ANSWERED,
            1.0,
        )
    else:
        assert trajectory.error.code == ErrorCode.UNAUTHORIZED and "TRACKWAY_TOKEN" in trajectory.error.message
    said = f"{spans}{trajectory}{caplog.text}"
    assert [word for word in (TOKEN, WRONG) if word in said] == []
