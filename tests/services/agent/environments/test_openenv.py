"""Trajectories in an OpenEnv environment: what the model reads, what is rewarded, how an episode ends."""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, call, group, open_services
from tests.services.agent.environments.openenv_server import MCP_ACTION, EchoServer, echo_server
from tests.services.agent.scripted_model import END
from tests.services.agent.test_tracing import tree
from tests.waiting import async_until
from trackway.agent.settings import AgentSettings, EnvironmentSettings
from trackway.system.process import free_port
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import StopReason

pytestmark = pytest.mark.anyio

ANSWER = "#### 18" + END
PROMPT = (
    "<|im_start|>system\nTools: echo<|im_end|>\n"
    '<|im_start|>user\n9+9?\n\n{"echoed_message": "Ready!", "message_length": 0}<|im_end|>\n<|im_start|>assistant\n'
)


def echo(message: str) -> str:
    return call("echo", f'{{"message": "{message}"}}')


def observed(text: str) -> str:
    return f"\n<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
async def server() -> AsyncIterator[EchoServer]:
    async with echo_server() as server:
        yield server


@asynccontextmanager
async def playing(
    url: str, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, **changes: Any
) -> AsyncIterator[AgentServices]:
    """The services with the environment `echo`."""
    environment = EnvironmentSettings.model_validate({"protocol": "openenv", "url": url, **changes})
    own = settings.model_copy(update={"environments": {"echo": environment}})
    async with open_services(own, tokenizer) as services:
        yield services


@pytest.fixture
async def services(
    server: EchoServer, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> AsyncIterator[AgentServices]:
    async with playing(server.url, settings, tokenizer, max_reply_bytes=50_000) as services:
        yield services


ROW: dict[str, Any] = {"agent_name": "environment:echo", "sample__extra_info": {"env_kwargs": {"seed": 3}, "index": 7}}


async def test_an_episode_is_the_prompt_the_observations_and_the_reward(
    services: AgentServices, server: EchoServer
) -> None:
    trajectory = await services.say(echo("hi") + END, echo("four") + END, ANSWER, trace=True, **ROW)

    seen = '{"echoed_message": "hi", "message_length": 2}', '{"echoed_message": "four", "message_length": 4}'
    encode = services.model.encode
    assert trajectory.error is None
    assert trajectory.prompt_ids == encode(PROMPT)
    assert trajectory.response_ids == [
        *encode(echo("hi") + END),
        *encode(observed(seen[0])),
        *encode(echo("four") + END),
        *encode(observed(seen[1])),
        *encode(ANSWER),
    ]
    assert trajectory.reward is not None
    assert trajectory.reward.model_dump() == {
        "score": 0.75,
        "components": {"tool/echo": 0.75},
        "turn_scores": [0.25, 0.5, 0.0],
    }
    assert (trajectory.stop_reason, trajectory.tool_rewards) == (StopReason.ANSWERED, [0.25, 0.5])
    assert server.resets == [{"episode_id": trajectory.id, "seed": 3}]
    await async_until(lambda: server.closed == ["close"])
    spans = services.spans()
    assert tree(spans) == [
        ("chat tiny", "turn 0"),
        ("chat tiny", "turn 1"),
        ("chat tiny", "turn 2"),
        ("execute_tool echo", "turn 0"),
        ("execute_tool echo", "turn 1"),
        ("reset echo", "trajectory"),
        ("reward", "trajectory"),
        ("score echo", "trajectory"),
        ("trajectory", None),
        ("turn 0", "trajectory"),
        ("turn 1", "trajectory"),
        ("turn 2", "trajectory"),
    ]
    [score] = [dict(span.attributes or {}) for span in spans if span.name == "score echo"]
    assert '"step_count": 2' in str(score["agentic.outputs"])
    [reward] = [dict(span.attributes or {}) for span in spans if span.name == "reward"]
    assert json.loads(str(reward["agentic.outputs"])) == {"score": 0.75, "tool/echo": 0.75}
    assert server.headers[0]["traceparent"].split("-")[1] == trajectory.trace_id


async def test_the_environment_ends_the_trajectory_and_runs_no_call_behind_its_end(
    services: AgentServices, server: EchoServer
) -> None:
    said = echo("end") + echo("later") + END
    trajectory = await services.say(said, limits__max_parallel_calls=2, **ROW)

    assert (trajectory.stop_reason, trajectory.error, len(trajectory.turns)) == (StopReason.ENVIRONMENT_DONE, None, 1)
    assert [message.content for message in trajectory.turns[0].messages[1:]] == [
        '{"echoed_message": "end", "message_length": 3}',
        "The episode has ended; this call was not run.",
    ]
    assert trajectory.reward is not None
    assert (trajectory.reward.score, trajectory.reward.turn_scores) == (0.375, [0.375])
    await async_until(lambda: server.closed == ["close"])


@pytest.mark.parametrize(
    ("said", "observation"),
    [
        (call("echo"), "Error executing tool 'echo': VALIDATION_ERROR: Invalid message"),
        (echo("fail"), "Error executing tool 'echo': EXECUTION_ERROR: it broke"),
    ],
)
async def test_the_model_reads_why_a_call_failed(services: AgentServices, said: str, observation: str) -> None:
    trajectory = await services.say(said + END, ANSWER, **ROW)

    assert (trajectory.error, trajectory.turns[0].messages[1].content) == (None, observation)


@pytest.mark.parametrize(
    ("said", "kwargs", "code", "message"),
    [
        ("gone", {}, ErrorCode.UNAVAILABLE, "got the end of the connection"),
        ("long", {}, ErrorCode.UNAVAILABLE, "expected an answer to step of at most 50000 bytes"),
        ("hi", {"seed": -1}, ErrorCode.INVALID_REQUEST, "reset with the row's env_kwargs, got VALIDATION_ERROR: seed"),
    ],
)
async def test_a_lost_episode_ends_the_trajectory_and_its_connection(
    services: AgentServices, server: EchoServer, said: str, kwargs: dict[str, Any], code: ErrorCode, message: str
) -> None:
    trajectory = await services.say(
        echo(said) + END, ANSWER, agent_name="environment:echo", sample__extra_info={"env_kwargs": kwargs}
    )

    assert trajectory.error is not None and trajectory.error.code is code
    assert message in trajectory.error.message
    await async_until(lambda: server.open == 0)


async def test_an_answer_that_does_not_come_ends_the_trajectory(
    server: EchoServer, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with playing(server.url, settings, tokenizer, call_timeout_s=0.1) as services:
        trajectory = await services.say(echo("hang") + END, ANSWER, **ROW)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.UNAVAILABLE
    assert "expected an answer within 0 s to answer echo, got none" in trajectory.error.message
    await async_until(lambda: server.open == 0)


async def test_a_trajectory_past_its_deadline_closes_its_episode(
    server: EchoServer, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with playing(server.url, settings, tokenizer) as services:
        trajectory = await services.say(echo("hang") + END, limits__timeout_s=0.1, **ROW)

    assert trajectory.error is not None
    await async_until(lambda: server.open == 0)


async def test_a_full_environment_is_asked_again(settings: AgentSettings, tokenizer: PreTrainedTokenizerFast) -> None:
    async with echo_server(most_open=1) as server, playing(server.url, settings, tokenizer) as services:
        services.model.scripts = {place: [echo("four") + END, ANSWER] for place in range(2)}
        trajectories = await services.run(group(n=2, **ROW))

    assert [t.reward and t.reward.score for t in trajectories] == [0.5, 0.5]
    assert (server.highest, server.closed) == (1, ["close", "close"])


async def test_no_more_episodes_begin_than_the_setting_allows(
    server: EchoServer, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with playing(server.url, settings, tokenizer, max_open=1) as services:
        services.model.scripts = {place: [echo("four") + END, ANSWER] for place in range(3)}
        await services.run(group(n=3, **ROW))

    assert (server.highest, len(server.resets)) == (1, 3)


async def test_an_environment_that_is_not_there_is_an_error_after_its_time(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with playing(url, settings, tokenizer, open_timeout_s=0.1) as services:
        trajectory = await services.say(ANSWER, **ROW)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.UNAVAILABLE
    assert f"environment 'echo' at {url}: expected an answer" in trajectory.error.message


async def test_an_environment_with_mcp_tools_offers_these(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with echo_server(action=MCP_ACTION) as server, playing(server.url, settings, tokenizer) as services:
        trajectory = await services.say(call("echo_message", '{"message": "hi"}') + END, ANSWER, **ROW)
        prompt = services.model.tokenizer.decode(trajectory.prompt_ids)

    assert "Tools: echo_message<" in prompt
    assert trajectory.turns[0].messages[1].content == "hi"
    assert trajectory.reward is not None and trajectory.reward.components == {"tool/echo_message": 0.25}


async def test_the_reward_service_may_score_the_episode(
    server: EchoServer, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with playing(
        server.url, settings, tokenizer, scored_by="reward", observation_field="echoed_message"
    ) as services:
        trajectory = await services.say(echo("hi") + END, ANSWER, **ROW)

    assert trajectory.turns[0].messages[1].content == "hi"
    assert trajectory.reward is not None
    assert trajectory.reward.score == 1.0 and trajectory.reward.components["tool/echo"] == 0.25


@pytest.mark.agents
@pytest.mark.timeout(900)
async def test_the_environment_that_openenv_init_writes(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    uv = shutil.which("uv")
    assert uv is not None, "expected uv on the PATH, got none; run `make test-agents`"
    run = [uv, "run", "--no-project", "--python", sys.executable, "--with", "openenv==0.10.0"]
    made = await asyncio.create_subprocess_exec(*run, "openenv", "init", "echo", "--output-dir", tmp_path)
    assert await made.wait() == 0
    port = free_port()
    serving = await asyncio.create_subprocess_exec(
        *run, "uvicorn", "server.app:app", "--port", str(port), cwd=tmp_path / "echo"
    )
    try:
        async with playing(f"http://127.0.0.1:{port}", settings, tokenizer, max_open=2) as services:
            services.model.scripts = {place: [echo("hi") + END, ANSWER] for place in range(2)}
            trajectories = await services.run(group(n=2, **ROW))
    finally:
        serving.terminate()
        await serving.wait()

    seen = '{"echoed_message": "hi", "message_length": 2}'
    assert [t.error for t in trajectories] == [None, None]
    assert [t.turns[0].messages[1].content for t in trajectories] == [seen, seen]
    assert [t.reward and t.reward.score for t in trajectories] == [0.2, 0.2]
