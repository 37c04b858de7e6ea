"""The agent loop that `trackway init` writes, as it stands."""

import importlib.util

import pytest

from tests.services.agent.agent_services import AgentServices, group
from trackway.deploy.bundled import PROJECTS

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "9+9"}}</tool_call><|im_end|>'

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def registered() -> None:
    """The loop under its name, `my_agent`."""
    spec = importlib.util.spec_from_file_location("my_agent", PROJECTS / "calculator" / "my_agent.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


async def test_it_runs_calls_and_reminds_the_model_of_the_format(services: AgentServices) -> None:
    services.model.scripts[0] = [CALL, "It is 18.<|im_end|>", "#### 18<|im_end|>"]

    [trajectory] = await services.run(group(agent_name="my_agent"))

    assert trajectory.error is None
    shown = [(message.role, message.content) for turn in trajectory.turns for message in turn.messages]
    assert shown[1:] == [
        ("tool", "18"),
        ("assistant", "It is 18."),
        ("tool", "Write the answer after ####."),
        ("assistant", "#### 18"),
    ]
    assert [(call.tool, call.error) for turn in trajectory.turns for call in turn.calls] == [("calculator", None)]
    assert trajectory.reward is not None
    assert (trajectory.reward.score, trajectory.stop_reason) == (1.0, "answered")
    assert trajectory.num_turns == 6  # three of the model, two answered, and verl's one


async def test_it_ends_after_three_turns(services: AgentServices) -> None:
    services.model.scripts[0] = ["It is 18.<|im_end|>"] * 4

    [trajectory] = await services.run(group(agent_name="my_agent"))

    assert (len(trajectory.turns), trajectory.stop_reason) == (3, "max_turns")


async def test_it_ends_when_a_reminder_does_not_fit(services: AgentServices) -> None:
    services.model.scripts[0] = ["It is 18.<|im_end|>"] * 2

    [trajectory] = await services.run(group(agent_name="my_agent", limits__max_response_length=16))

    assert (len(trajectory.turns), trajectory.stop_reason) == (1, "max_response")
    assert all(trajectory.response_mask)
