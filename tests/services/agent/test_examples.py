"""The agent loop and the scorer of examples/agents run as they stand."""

import importlib
from pathlib import Path

import pytest
from agent_world import World, group
from pydantic import JsonValue

from trackway.reward.scorers import load_scorers
from trackway.wire.reward import ScoreRequest

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module("reminder")


@pytest.mark.anyio
async def test_the_loop_reminds_the_model_of_the_format_and_runs_its_calls(world: World) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "9+9"}}</tool_call><|im_end|>'
    world.model.scripts[0] = [call, "It is 18.<|im_end|>", "#### 18<|im_end|>"]

    [trajectory] = await world.run(group(agent_name="reminder_agent"))

    assert trajectory.error is None
    shown = [(message.role, message.content) for turn in trajectory.turns for message in turn.messages]
    assert shown[1:] == [
        ("tool", "18"),
        ("assistant", "It is 18."),
        ("tool", "Write the answer after ####."),
        ("assistant", "#### 18"),
    ]
    assert trajectory.reward is not None
    assert trajectory.reward.score == 1.0


@pytest.mark.anyio
async def test_the_scorer_takes_a_tenth_for_a_failed_call() -> None:
    [_, scorer] = load_scorers(["reminder:CarefulScorer"])
    calls: dict[str, JsonValue] = {"tool_calls": [{"error": None}, {"error": "tool_failed"}]}
    request = ScoreRequest(data_source="me/sums", solution_str="#### 7", ground_truth="7", extra_info=calls)

    reward = await scorer.score(request, "strict")

    assert (reward.score, reward.components) == (0.9, {"correct": 1.0, "failed_calls": 1.0})
