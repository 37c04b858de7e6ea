"""What the limits of a trajectory do to its tool calls: bad ones end it, long results are cut."""

import pytest

from tests.services.agent.agent_services import AgentServices, call
from tests.services.agent.scripted_model import END
from trackway.wire.trajectory import StopReason

ANSWER = "#### 18" + END
COUNT = call("counter") + END


@pytest.mark.anyio
@pytest.mark.parametrize(
    "bad", [call("abacus"), call("counter", '{"a": }'), "<tool_call>{"], ids=["unknown", "malformed", "unclosed"]
)
async def test_a_bad_call_can_end_the_trajectory_which_is_scored_as_it_stands(
    services: AgentServices, bad: str
) -> None:
    said = "#### 18 " + call("counter") + bad + END

    trajectory = await services.say(COUNT, said, limits__on_bad_call="end", limits__max_parallel_calls=2)

    assert (trajectory.stop_reason, trajectory.error) == (StopReason.BAD_CALL, None)
    assert trajectory.reward is not None and trajectory.reward.score == 1.0
    assert [len(turn.calls) for turn in trajectory.turns] == [1, 0]
    assert list(services.counter.counts.values()) == [1]
    assert trajectory.response_ids[-len(services.model.encode(said)) :] == services.model.encode(said)


@pytest.mark.anyio
async def test_a_call_that_its_tool_refuses_is_not_a_bad_one(services: AgentServices) -> None:
    trajectory = await services.say(call("counter", '{"refuse": true}') + END, ANSWER, limits__on_bad_call="end")

    assert trajectory.stop_reason is StopReason.ANSWERED


@pytest.mark.anyio
async def test_a_bad_call_in_the_last_turn_ends_at_the_turn_limit(services: AgentServices) -> None:
    trajectory = await services.say(call("abacus") + END, limits__on_bad_call="end", limits__max_assistant_turns=1)

    assert trajectory.stop_reason is StopReason.MAX_TURNS


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("side", "shown"),
    [
        ("left", "(truncated)...\u20acz"),
        ("right", "\u00e4\u00f6...(truncated)"),
        ("middle", "\u00e4...(truncated)...z"),
    ],
)
async def test_observations_are_cut_by_tokens_between_characters(
    services: AgentServices, side: str, shown: str
) -> None:
    services.counter.text = "\u00e4\u00f6\u00fc\u20acz"  # 2, 2, 2, 3 and 1 bytes, each a token

    trajectory = await services.say(
        COUNT, ANSWER, limits__max_tool_response_tokens=5, limits__tool_response_truncate_side=side
    )

    start, end = trajectory.turns[0].response_end, trajectory.turns[1].response_start
    observed = f"\n<|im_start|>tool\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    assert services.model.tokenizer.decode(trajectory.response_ids[start:end]) == observed
    assert trajectory.turns[0].messages[-1].content == shown
    assert trajectory.turns[0].calls[0].truncated


@pytest.mark.anyio
async def test_both_bounds_on_an_observation_hold(services: AgentServices) -> None:
    services.counter.text = "0123456789"
    cuts = {"limits__max_tool_response_length": 4, "limits__tool_response_truncate_side": "right"}

    fewer_tokens = await services.say(COUNT, ANSWER, limits__max_tool_response_tokens=3, **cuts)
    services.model.begin_again()
    fewer_characters = await services.say(COUNT, ANSWER, limits__max_tool_response_tokens=6, **cuts)

    assert fewer_tokens.turns[0].messages[-1].content == "012...(truncated)"
    assert fewer_characters.turns[0].messages[-1].content == "0123...(truncated)"
