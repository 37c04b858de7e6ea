import pytest

from tests.services.tools.tool_harness import ToolHarness
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import CreateInstance, ExecuteRequest, ToolResult

NAME = "calc_gsm8k_reward"


async def answered(harness: ToolHarness, instance_id: str, answer: str | float) -> ToolResult:
    return await harness.server.execute(instance_id, ExecuteRequest(arguments={"answer": answer}))


def test_the_model_sees_verls_schema() -> None:
    function = Gsm8kTool.default().tool_schema.function

    assert function.name == NAME
    assert function.description == (
        "A tool for calculating the reward of gsm8k. "
        "(1.0 if parsed answer is correct, 0.0 if parsed answer is incorrect or not correctly parsed)"
    )
    words = "The model's answer to the GSM8K math problem, must be a digits"
    assert function.parameters == {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": words}},
        "required": ["answer"],
    }


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("72", "Current parsed answer='72' reward=1.0", 0.0),
        ("#### 72", "Current parsed answer='#### 72' reward=1.0", 0.0),
        ("the answer is 72", "Current parsed answer='the answer is 72' reward=1.0", 0.0),
        ("71", "Current parsed answer='71' reward=0.0", -0.05),
        ("72.0", "Current parsed answer='72.0' reward=0.0", -0.05),
        ("none", "Current parsed answer='none' reward=0.0", -0.05),
        (72, "Current parsed answer='72' reward=1.0", 0.0),
    ],
)
async def test_text_and_step_reward_are_verls(
    harness: ToolHarness, answer: str | int, text: str, reward: float
) -> None:
    instance_id = await harness.made(NAME, ground_truth="72")

    assert await answered(harness, instance_id, answer) == ToolResult(text=text, reward=reward)


@pytest.mark.anyio
async def test_the_state_lives_for_the_whole_trajectory(harness: ToolHarness) -> None:
    instance_id = await harness.made(NAME, ground_truth="72")

    steps = [(await answered(harness, instance_id, answer)).reward for answer in ("71", "72", "72")]

    assert steps == [-0.05, 0.0, -0.05]
    assert await harness.server.reward(instance_id) == 1.0


@pytest.mark.anyio
async def test_the_last_answer_counts_as_verls_does(harness: ToolHarness) -> None:
    instance_id = await harness.made(NAME, ground_truth="72")

    steps = [(await answered(harness, instance_id, answer)).reward for answer in ("72", "73", "72", "73")]

    assert steps == [0.0, -0.05, 0.0, -0.05]
    assert await harness.server.reward(instance_id) == 0.0


@pytest.mark.anyio
async def test_two_trajectories_do_not_share_state(harness: ToolHarness) -> None:
    first, second = await harness.made(NAME, ground_truth="72"), await harness.made(NAME, ground_truth="5")

    await answered(harness, first, "72")

    assert (await answered(harness, second, "5")).reward == 0.0
    await harness.server.release(first)
    assert await harness.server.reward(second) == 1.0


@pytest.mark.anyio
@pytest.mark.parametrize("create_kwargs", [{}, {"ground_truth": 72}, {"ground_truth": None}])
async def test_creation_needs_a_ground_truth(harness: ToolHarness, create_kwargs: dict[str, int | None]) -> None:
    with pytest.raises(TrackwayError, match=r"create_kwargs\.ground_truth") as caught:
        await harness.server.create(CreateInstance(tool=NAME, create_kwargs={**create_kwargs}))

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert len(harness.table) == 0
