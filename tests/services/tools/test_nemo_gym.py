"""NeMo-Gym's routes of the tool server, asked as its `simple_agent` asks them: cookies of the last answer only."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
from pydantic import JsonValue

from trackway.reward.app import create_app as create_reward
from trackway.tools.app import create_app
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.settings import ToolsSettings

pytestmark = pytest.mark.anyio

ROW: dict[str, JsonValue] = {
    "responses_create_params": {"input": [{"role": "user", "content": "9+9?"}]},
    "data_source": "openai/gsm8k",
    "reward_model": {"ground_truth": "18"},
    "extra_info": {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "18"}}}},
}
SAID: dict[str, JsonValue] = {
    "output": [
        {"type": "function_call", "call_id": "c", "name": "calculator", "arguments": '{"expression": "9+9"}'},
        {"type": "function_call_output", "call_id": "c", "output": "18"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "#### 18"}]},
    ]
}


@pytest.fixture
async def gym() -> AsyncIterator[httpx.AsyncClient]:
    reward = create_reward()
    async with AsyncExitStack() as stack:
        mounts = {"http://reward": httpx.ASGITransport(reward)}
        http = await stack.enter_async_context(httpx.AsyncClient(mounts=mounts, verify=False))
        settings = ToolsSettings(nemo_gym=True, reward_url="http://reward")
        app = create_app(settings, [CalculatorTool.default(), Gsm8kTool.default()], http=http)
        for service in (reward, app):
            await stack.enter_async_context(service.router.lifespan_context(service))
        transport = httpx.ASGITransport(app)
        yield await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://gym"))


async def asked(gym: httpx.AsyncClient, path: str, body: JsonValue, cookies: httpx.Cookies) -> httpx.Response:
    """The answer; `cookies` become those that it set."""
    gym.cookies = cookies
    answer = await gym.post(path, json=body)
    cookies.clear()
    cookies.update(answer.cookies)
    return answer


async def test_a_session_calls_tools_and_is_scored(gym: httpx.AsyncClient) -> None:
    cookies = httpx.Cookies()
    seeded = await asked(gym, "/seed_session", ROW, cookies)
    sum_ = await asked(gym, "/calculator", {"expression": "9+9"}, cookies)
    checked = await asked(gym, "/calc_gsm8k_reward", {"answer": "18"}, cookies)
    verified = await asked(gym, "/verify", {**ROW, "response": SAID}, cookies)

    assert (seeded.json(), sum_.text) == ({}, "18")
    assert checked.text == "Current parsed answer='18' reward=1.0"
    assert verified.json() == {
        **ROW,
        "response": SAID,
        "reward": 1.0,
        "reward_components": {"correct": 1.0, "answered": 1.0},
    }


async def test_errors_of_a_call_are_text_for_the_model(gym: httpx.AsyncClient) -> None:
    cookies = httpx.Cookies()
    await asked(gym, "/seed_session", ROW, cookies)
    refused = await asked(gym, "/calculator", {}, cookies)

    assert (refused.status_code, refused.headers["content-type"]) == (422, "text/plain; charset=utf-8")
    assert "expected arguments: expression" in refused.text


async def test_requests_outside_a_session_or_without_verls_columns_are_refused(gym: httpx.AsyncClient) -> None:
    cookies = httpx.Cookies()
    alone = await asked(gym, "/calculator", {"expression": "9+9"}, cookies)
    await asked(gym, "/seed_session", {}, cookies)
    verified = await asked(gym, "/verify", {"response": SAID}, cookies)

    assert (alone.status_code, verified.status_code) == (422, 422)
    assert "expected the cookie trackway-nemo-gym-session" in alone.json()["error"]["message"]
    assert "data_source" in verified.json()["error"]["message"]


async def test_the_end_of_a_session_releases_its_instances(gym: httpx.AsyncClient) -> None:
    cookies = httpx.Cookies()
    await asked(gym, "/seed_session", ROW, cookies)
    await asked(gym, "/calc_gsm8k_reward", {"answer": "18"}, cookies)
    held = (await gym.get("/instances")).json()["total"]
    await asked(gym, "/verify", {**ROW, "response": SAID}, cookies)

    assert (held, (await gym.get("/instances")).json()["total"]) == (1, 0)
