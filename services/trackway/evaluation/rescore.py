"""Stored rollouts as scoring requests, so that another reward can score them without a model."""

from collections.abc import Awaitable, Callable

from trackway.agent.toolbox import tool_facts
from trackway.wire.agent import Sample
from trackway.wire.reward import ScoreRequest
from trackway.wire.trajectory import Trajectory

TextOf = Callable[[list[int]], Awaitable[str]]


async def score_request(trajectory: Trajectory, sample: Sample, text_of: TextOf | None) -> ScoreRequest:
    """The request that the agent service sent for a rollout of this row. `text_of` leaves special tokens out.

    It may be None for a model that returned no token ids.
    """
    rows = trajectory.rows
    written = [row.response_ids[turn.response_start : turn.response_end] for row in rows for turn in row.turns]
    if text_of is None:
        turns = [turn.messages[0].content for turn in trajectory.turns]
    else:
        turns = [await text_of(ids) for ids in written]
    components = {} if trajectory.reward is None else trajectory.reward.components
    tool_rewards = {name.removeprefix("tool/"): value for name, value in components.items() if name.startswith("tool/")}
    records = [call for row in rows for turn in row.turns for call in turn.calls]
    said = [message for turn in trajectory.turns for message in turn.messages]
    return ScoreRequest(
        data_source=sample.data_source,
        solution_str="".join(turns),
        ground_truth=sample.reward_model.ground_truth,
        trajectory_id=trajectory.id,
        messages=[*trajectory.prompt_messages, *said],
        extra_info={
            **sample.extra_info,
            "tool_rewards": list(trajectory.tool_rewards),
            **tool_facts(records, tool_rewards),
            "num_turns": trajectory.num_turns,
            "turns": [*turns],
        },
    )
