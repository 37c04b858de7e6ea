"""Trajectories in a session of a NeMo-Gym resources server, whose requests are those of its `simple_agent`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, call, open_services
from tests.services.agent.environments.nemo_gym_server import ROW, CounterServer, counter_server
from tests.services.agent.scripted_model import END
from trackway.agent.settings import AgentSettings, EnvironmentSettings
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import StopReason

pytestmark = pytest.mark.anyio

ANSWER = "It is 6." + END
ADD, READ = call("increment_counter", '{"count": 3}') + END, call("get_counter_value") + END
ASKED: dict[str, Any] = {"agent_name": "environment:counter", "sample__extra_info": {"env_kwargs": ROW}}


@asynccontextmanager
async def playing(
    url: str, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> AsyncIterator[AgentServices]:
    """The services with the environment `counter`."""
    environment = EnvironmentSettings(protocol="nemo_gym", url=url)
    async with open_services(
        settings.model_copy(update={"environments": {"counter": environment}}), tokenizer
    ) as opened:
        yield opened


@pytest.fixture
async def server() -> AsyncIterator[CounterServer]:
    async with counter_server() as server:
        yield server


@pytest.fixture
async def services(
    server: CounterServer, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> AsyncIterator[AgentServices]:
    async with playing(server.url, settings, tokenizer) as services:
        yield services


async def test_a_session_gives_tools_their_answers_and_the_reward(
    services: AgentServices, server: CounterServer
) -> None:
    trajectory = await services.say(ADD, READ, ANSWER, **ASKED)

    assert trajectory.error is None
    assert "Tools: increment_counter, get_counter_value<" in services.model.tokenizer.decode(trajectory.prompt_ids)
    assert [turn.messages[1].content for turn in trajectory.turns[:2]] == ['{"success": true}', '{"count": 6}']
    assert trajectory.reward is not None
    assert trajectory.reward.model_dump() == {
        "score": 1.0,
        "components": {"tool/increment_counter": 0.0, "tool/get_counter_value": 0.0, "count": 1.0},
    }
    assert (trajectory.stop_reason, len(server.counts)) == (StopReason.ANSWERED, 1)


async def test_verify_gets_the_row_and_the_response_in_openais_format(
    services: AgentServices, server: CounterServer
) -> None:
    await services.say(ADD, ANSWER, **ASKED)

    [asked] = server.verified
    assert asked.responses_create_params == ROW["responses_create_params"]
    first, observation, last = asked.response.output
    assert isinstance(first, ResponseFunctionToolCall) and isinstance(last, ResponseOutputMessage)
    assert (first.name, first.arguments, first.call_id) == ("increment_counter", '{"count": 3}', "call00000")
    assert observation.model_dump(include={"type", "call_id", "output"}) == {
        "type": "function_call_output",
        "call_id": "call00000",
        "output": '{"success": true}',
    }
    assert last.content[0].model_dump()["text"] == "It is 6."


async def test_the_model_reads_what_the_server_refuses(services: AgentServices) -> None:
    trajectory = await services.say(call("increment_counter") + END, ANSWER, **ASKED)

    assert (trajectory.error, trajectory.reward and trajectory.reward.score) == (None, 0.0)
    assert trajectory.turns[0].messages[1].content == '{"detail": "count: field required"}'


async def test_a_row_that_the_server_refuses_is_an_error_of_the_row(services: AgentServices) -> None:
    trajectory = await services.say(
        ANSWER, agent_name="environment:counter", sample__extra_info={"env_kwargs": {"expected_count": 6}}
    )

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.INVALID_REQUEST
    assert "/seed_session to take the row's env_kwargs, got 422" in trajectory.error.message


async def test_a_reward_that_does_not_come_is_an_error_of_the_environment(
    services: AgentServices, server: CounterServer
) -> None:
    server.verify_status = 500
    trajectory = await services.say(ANSWER, **ASKED)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.UNAVAILABLE
    assert 'expected 200 from /verify, got 500: "repr(e)"' in trajectory.error.message
