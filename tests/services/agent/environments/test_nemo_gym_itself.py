"""NeMo-Gym's own `example_session_state_mgmt` and `simple_agent`, from its package in an environment of its own."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import JsonValue
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedTokenizerFast

from tests.interpreters import python_of
from tests.services.agent.agent_services import call, open_services
from tests.services.agent.environments.test_nemo_gym import ADD, ANSWER, ASKED, READ, playing
from tests.services.agent.scripted_model import END
from tests.serving import served
from trackway.agent.settings import AgentSettings
from trackway.reward.app import create_app as create_reward
from trackway.system.process import free_port
from trackway.tools.app import create_app as create_tools
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.settings import ToolsSettings
from trackway.wire.sessions import SessionAccess
from trackway.wire.trajectory import StopReason, Trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("nemo_gym_program.py")
STARTS_S = 300.0
"""Also installs it, once: 1.1 GB."""


@asynccontextmanager
async def nemo_gym(part: str, *others: int) -> AsyncIterator[str]:
    """The URL of a part of NeMo-Gym, which uses servers at these ports."""
    uv, python = shutil.which("uv"), python_of("3.12")
    assert uv is not None, "expected uv on the PATH, got none; run `make test-agents`"
    assert python is not None, "expected Python 3.12, which NeMo-Gym needs, got none; install it"
    port = free_port()
    run = [uv, "run", "--quiet", "--no-project", "--python", python, "--with", "nemo-gym==0.4.0", PROGRAM]
    serving = await asyncio.create_subprocess_exec(*run, part, *map(str, (port, *others)))
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(STARTS_S), httpx.AsyncClient() as http:
            while not await _answers(http, url):
                assert serving.returncode is None, f"expected {part} to serve, it exited with {serving.returncode}"
                await asyncio.sleep(0.1)
        yield url
    finally:
        if serving.returncode is None:
            serving.terminate()
        await serving.wait()


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        await http.get(f"{url}/openapi.json")
    except httpx.TransportError:
        return False
    return True


@asynccontextmanager
async def at_a_port(app: ASGIApp) -> AsyncIterator[int]:
    """The port of an app in this process, in its event loop."""
    port = free_port()
    async with served(app, port, lifespan="off"):
        yield port


async def test_its_stateful_counter_is_an_environment(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with nemo_gym("counter") as url, playing(url, settings, tokenizer) as services:
        right = await services.say(ADD, READ, ANSWER, **ASKED)
        services.model.begin_again()
        wrong = await services.say(ADD, ADD, ANSWER, **ASKED)

    assert (right.error, wrong.error) == (None, None)
    assert [turn.messages[1].content for turn in right.turns[:2]] == ['{"success":true}', '{"count":6}']
    assert [trajectory.reward and trajectory.reward.score for trajectory in (right, wrong)] == [1.0, 0.0]
    assert (right.stop_reason, wrong.stop_reason) == (StopReason.ANSWERED, StopReason.ANSWERED)


async def test_its_simple_agent_calls_our_tools_and_trains_in_a_session(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    reward = create_reward()
    rewards = httpx.AsyncClient(mounts={"http://reward": httpx.ASGITransport(reward)}, verify=False)
    own_tools = [CalculatorTool.default(), Gsm8kTool.default()]
    tools = create_tools(ToolsSettings(nemo_gym=True, reward_url="http://reward"), own_tools, http=rewards)
    said = call("calculator", '{"expression": "9+9"}') + END, "#### 18" + END
    async with (
        rewards,
        tools.router.lifespan_context(tools),
        open_services(settings, tokenizer) as services,
        at_a_port(tools) as tools_port,
    ):
        services.model.scripts[0] = list(said)
        opening = await services.client.post("/sessions", json={"sample": SAMPLE})
        access = SessionAccess.model_validate(opening.json())

        async def model(scope: Scope, receive: Receive, send: Send) -> None:
            """The session's model at the root, where NeMo-Gym expects a model server."""
            path = f"/sessions/{access.session_id}{scope['path']}"
            await services.agent({**scope, "path": path, "raw_path": path.encode()}, receive, send)

        async with (
            at_a_port(model) as port,
            nemo_gym("simple_agent", tools_port, port) as url,
            httpx.AsyncClient(timeout=60.0) as http,
        ):
            answer = await http.post(f"{url}/run", json=ROW)
        assert answer.status_code == 200, answer.text
        ending = await services.client.post(f"/sessions/{access.session_id}/end")
        encode = services.model.encode
        first, second = map(encode, said)

    assert answer.json()["reward"] == 1.0
    kinds = [item["type"] for item in answer.json()["response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "message"]
    assert answer.json()["response"]["output"][1]["output"] == "18"
    trajectory = Trajectory.model_validate(ending.json())
    assert trajectory.error is None and trajectory.further_rows == []
    between = len(trajectory.response_ids) - len(first) - len(second)
    assert trajectory.response_ids[: len(first)] == first and trajectory.response_ids[-len(second) :] == second
    assert trajectory.response_mask == [1] * len(first) + [0] * between + [1] * len(second)


SAMPLE: dict[str, JsonValue] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "9+9?"}],
    "reward_model": {"ground_truth": "18"},
    "extra_info": {"index": 7, "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "18"}}}},
}
ROW: dict[str, JsonValue] = {
    **SAMPLE,
    "responses_create_params": {
        "model": "policy",
        "input": [{"role": "user", "content": "9+9?"}],
        "tools": [
            {
                "type": "function",
                "name": "calculator",
                "description": "Counts.",
                "strict": True,
                "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
            }
        ],
    },
}
