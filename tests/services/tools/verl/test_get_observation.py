"""verl-tool's `POST /get_observation`, driven over a real socket by a client of its documented shape."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from pydantic import JsonValue

from tests.services.tools.faulty_tool import FaultyTool
from tests.serving import served
from tests.waiting import async_until
from trackway.tools.app import create_app
from trackway.tools.base import BaseTool
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.builtin.python import PythonTool
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ToolResult

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

GONE = "the state of faulty in this session was idle for too long and is gone; the next call makes a new one"

Answer = tuple[Any, bool, bool]
"""Observation, done, valid."""


class Client:
    """As verl-tool's agent loop calls its server: aiohttp, one POST with lists, three lists back."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/get_observation"

    async def post(self, **payload: object) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.post(self.url, json=payload) as answer:
            return answer.status, await answer.json()

    async def batch(self, ids: list[str], actions: list[str], **more: object) -> list[Answer]:
        status, body = await self.post(trajectory_ids=ids, actions=actions, **more)
        assert (status, body["processing_time_ms"] >= 0) == (200, True)
        return [*zip(body["observations"], body["dones"], body["valids"], strict=True)]

    async def one(self, trajectory_id: str, action: str, **more: object) -> Answer:
        lists = {name: [value] for name, value in more.items()}
        return (await self.batch([trajectory_id], [action], **lists))[0]

    async def finish(self, trajectory_id: str) -> Answer:
        """As `close_traj_tool_threads` does."""
        return await self.one(trajectory_id, "", finish=True, is_last_step=True)


class Crowded(CalculatorTool):
    """Has no place for anybody."""

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        raise TrackwayError(ErrorCode.OVERLOADED, "no place")


def hermes(tool: str, **arguments: JsonValue) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def said(text: str) -> str:
    return f"\n<tool_response>\n{text}\n</tool_response>\n"


def app_of(*tools: BaseTool, **settings: float) -> FastAPI:
    return create_app(ToolsSettings.model_validate(settings), tools)


@pytest.fixture
def faulty() -> FaultyTool:
    return FaultyTool.default()


@pytest.fixture
async def client(faulty: FaultyTool) -> AsyncIterator[Client]:
    async with served(app_of(faulty, CalculatorTool.default(), Gsm8kTool.default(), call_timeout_s=0.1)) as url:
        yield Client(url)


async def test_state_lives_from_the_first_action_to_finish(client: Client, faulty: FaultyTool) -> None:
    ok = hermes("faulty", mode="ok")

    told = [(await client.one("t", ok))[0] for _ in range(2)]
    other_answer = await client.one("u", ok)
    finished = await client.finish("t")
    after = await client.one("t", ok)

    assert [observation["obs"] for observation in (*told, other_answer[0], after[0])] == [
        said(f"ok {n}") for n in (1, 2, 1, 1)
    ]
    assert (finished, len(faulty.calls)) == (("", True, True), 2)


async def test_a_step_reward_comes_with_the_text_and_plain_text_without_one(client: Client) -> None:
    rewarded, plain = await client.batch(
        ["a", "b"], [hermes("faulty", mode="ok"), hermes("calculator", expression="84/4")]
    )

    assert rewarded == ({"obs": said("ok 1"), "reward": 0.5}, False, True)
    assert plain == (said("21"), False, True)


async def test_a_batch_keeps_its_order_and_a_bad_action_fails_alone(client: Client) -> None:
    actions = [
        hermes("calculator", expression="1+1"),
        hermes("calculator", expression="1/0"),
        hermes("abacus"),
        "<tool_call>{oops}</tool_call>",
        "I give up.",
        hermes("faulty", mode="raise"),
        hermes("faulty", mode="sleep"),
        hermes("calculator", expression="2+2"),
    ]

    answers = await client.batch([f"t{n}" for n in range(8)], actions)

    assert [valid for _, _, valid in answers] == [True, False, False, False, False, False, False, True]
    assert [done for _, done, _ in answers] == [False] * 8
    assert (answers[0][0], answers[7][0]) == (said("2"), said("4"))
    reasons = [told["invalid_reason"] for told, _, valid in answers if not valid]
    assert reasons[0] == "division by zero in '1/0'"
    assert reasons[1].startswith("expected one of the tools")
    assert reasons[2].startswith("Invalid tool call")
    assert reasons[3] == "No valid tool found for action"
    assert reasons[4] == "tool 'faulty' failed in execute: ZeroDivisionError: asked to fail"
    assert reasons[5].startswith("tool 'faulty': expected execute to end within")
    assert answers[1][0]["obs"] == said("division by zero in '1/0'")
    assert answers[4][0]["obs"] == ""
    assert "• calculator: Evaluate" in answers[4][0]["available_tools"]


async def test_what_is_the_servers_fault_ends_that_trajectory_only() -> None:
    async with served(app_of(Crowded.default(), FaultyTool.default())) as url:
        crowded, fine = await Client(url).batch(
            ["a", "b"], [hermes("calculator", expression="1"), hermes("faulty", mode="ok")]
        )

    assert crowded == ({"obs": "", "error": "no place", "tool_type": "calculator"}, True, False)
    assert fine[2] is True


async def test_trajectories_of_a_batch_run_side_by_side_and_one_trajectorys_actions_in_order(
    client: Client, faulty: FaultyTool
) -> None:
    faulty.gate.clear()
    ids = ["a", "b", "a", "c"]
    asking = asyncio.create_task(client.batch(ids, [hermes("faulty", mode="ok")] * 4))
    await async_until(lambda: faulty.running == 3)
    faulty.gate.set()

    answers = await asking

    assert [told["obs"] for told, _, _ in answers] == [said(text) for text in ("ok 1", "ok 1", "ok 2", "ok 1")]


async def test_the_rows_kwargs_make_the_instance(client: Client) -> None:
    fields = {"index": 3, "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}
    action = hermes("calc_gsm8k_reward", answer="72")

    answers = [await client.one("t", action, extra_fields=fields), await client.one("t", action)]
    without = await client.one("u", action)

    assert answers[0] == (said("Current parsed answer='72' reward=1.0"), False, True)
    assert answers[1][0]["reward"] == -0.05
    assert (without[2], "create_kwargs.ground_truth" in without[0]["obs"]) == (False, True)


@pytest.mark.parametrize("where", ["in its list", "in extra_fields"])
async def test_the_last_step_runs_and_then_ends_the_trajectory(client: Client, faulty: FaultyTool, where: str) -> None:
    last = {"is_last_step": True} if where == "in its list" else {"extra_fields": {"is_last_step": True}}

    told, done, valid = await client.one("t", hermes("faulty", mode="ok"), **last)

    assert (told["obs"], done, valid, faulty.calls) == (said("ok 1"), False, True, {})


async def test_finish_needs_no_extra_fields_and_no_trajectory(client: Client) -> None:
    assert await client.finish("never seen") == ("", True, True)
    assert await client.one("t", "x", extra_fields={"finish": True}) == ("", True, True)


async def test_several_calls_of_one_action_are_answered_together(client: Client) -> None:
    action = hermes("calculator", expression="1") + hermes("calculator", expression="2")

    assert await client.one("t", action) == (said("1") + said("2"), False, True)


async def test_an_abandoned_trajectory_expires_which_its_model_is_told_once(faulty: FaultyTool) -> None:
    async with served(app_of(faulty, instance_ttl_s=0.5, reap_interval_s=0.01)) as url:
        await Client(url).one("t", hermes("faulty", mode="ok"))
        await async_until(lambda: faulty.calls == {})
        told, _, valid = await Client(url).one("t", hermes("faulty", mode="ok"))
        assert (told["invalid_reason"], valid) == (GONE, False)
        anew, _, valid = await Client(url).one("t", hermes("faulty", mode="ok"))
        assert (anew["obs"], valid) == (said("ok 1"), True)


@pytest.mark.parametrize(
    "payload",
    [
        {"trajectory_ids": [], "actions": []},
        {"trajectory_ids": ["a"], "actions": []},
        {"trajectory_ids": ["a"], "actions": ["x", "y"]},
        {"trajectory_ids": ["a"], "actions": ["x"], "extra_fields": []},
        {"trajectory_ids": ["a"], "actions": ["x"], "finish": [True, False]},
        {"trajectory_ids": ["a"], "actions": [None]},
        {"trajectory_ids": "a", "actions": "x"},
        {"actions": ["x"]},
    ],
)
async def test_lists_that_do_not_fit_are_refused(client: Client, payload: dict[str, object]) -> None:
    status, body = await client.post(**payload)

    assert (status, body["error"]["code"]) == (422, "invalid_request")


async def test_trajectories_may_be_numbered_as_verl_tools_own_rollouts_do(client: Client) -> None:
    actions = [hermes("faulty", mode="ok"), hermes("calculator", expression="2+2")]

    status, body = await client.post(trajectory_ids=[3, 0], actions=actions)
    again = await client.one("3", hermes("faulty", mode="ok"))

    assert (status, [body["observations"][0]["obs"], body["observations"][1]]) == (200, [said("ok 1"), said("4")])
    assert again[0]["obs"] == said("ok 2")  # a number is its digits


@pytest.mark.parametrize("trajectory_id", [True, 1.5, None, ["a"], "x" * 513])
async def test_what_names_no_trajectory_is_refused(client: Client, trajectory_id: object) -> None:
    status, body = await client.post(trajectory_ids=[trajectory_id], actions=["x"])

    assert (status, body["error"]["code"]) == (422, "invalid_request")
    assert "body.trajectory_ids.0: " in body["error"]["message"]


async def test_unknown_fields_are_ignored(client: Client) -> None:
    answer = await client.one("t", hermes("calculator", expression="1"), workflow="w", images=[])

    assert answer == (said("1"), False, True)


@pytest.mark.program("bwrap")
@pytest.mark.usefixtures("isolation")
async def test_python_runs_as_verl_tools_models_write_it_and_keeps_its_variables() -> None:
    async with served(app_of(PythonTool.default())) as url:
        client = Client(url)
        answers = [
            await client.one("t", "<python>x = 20\nprint('Hello')</python> ..."),
            await client.one("t", "```python\nprint(x + 1)\n```"),
            await client.one("t", hermes("python", code="x + 2")),
            await client.one("u", "```python\nx\n```"),
        ]

    assert [told for told, _, _ in answers[:3]] == [
        "\n<result>\nHello\n</result>\n",
        "\n```result\n21\n```\n",
        said("22"),
    ]
    assert "NameError" in str(answers[3][0])
    assert [valid for _, _, valid in answers] == [True] * 4
