"""The tool agent against a scripted model and the real tool server and reward service."""

import logging

import pytest

from tests.services.agent.agent_services import AgentServices, call
from tests.services.agent.scripted_model import END
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import StopReason, WeightSpan

PROMPT = (
    "<|im_start|>system\nTools: counter, other, calculator, calc_gsm8k_reward<|im_end|>\n"
    "<|im_start|>user\n9+9?<|im_end|>\n<|im_start|>assistant\n"
)
FIRST = call("calc_gsm8k_reward", '{"answer": "18"}') + END
OBSERVATION = "\n<|im_start|>tool\nCurrent parsed answer='18' reward=1.0<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "#### 18" + END
COUNT = call("counter") + END


def observed(text: str) -> str:
    return f"\n<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.anyio
async def test_a_two_turn_trajectory_has_ids_mask_and_logprobs_at_exact_positions(services: AgentServices) -> None:
    trajectory = await services.say(FIRST, ANSWER)

    first, observation, answer = (services.model.encode(text) for text in (FIRST, OBSERVATION, ANSWER))
    assert trajectory.error is None
    assert trajectory.prompt_ids == services.model.encode(PROMPT)
    assert trajectory.response_ids == first + observation + answer
    assert trajectory.response_mask == [1] * len(first) + [0] * len(observation) + [1] * len(answer)
    assert trajectory.response_logprobs == [
        *(-(place + 1) / 8 for place in range(len(first))),
        *([0.0] * len(observation)),
        *(-(place + 1) / 8 for place in range(len(answer))),
    ]


@pytest.mark.anyio
async def test_weight_spans_and_turns_lie_in_response_positions(services: AgentServices) -> None:
    trajectory = await services.say(FIRST, ANSWER)

    end_of_first = len(services.model.encode(FIRST))
    start_of_answer, end = end_of_first + len(services.model.encode(OBSERVATION)), len(trajectory.response_ids)
    assert trajectory.weight_versions == [
        WeightSpan(version=3, start=0, end=end_of_first),
        WeightSpan(version=4, start=start_of_answer, end=end),
    ]
    assert [(turn.response_start, turn.response_end) for turn in trajectory.turns] == [
        (0, end_of_first),
        (start_of_answer, end),
    ]


@pytest.mark.anyio
async def test_rewards_come_from_the_reward_service_and_the_tool(services: AgentServices) -> None:
    trajectory = await services.say(FIRST, ANSWER)

    assert trajectory.reward is not None
    assert trajectory.reward.score == 1.0
    assert trajectory.reward.components == {"tool/calc_gsm8k_reward": 1.0, "correct": 1.0, "answered": 1.0}
    assert trajectory.tool_rewards == [0.0]
    assert (trajectory.num_turns, trajectory.stop_reason) == (4, StopReason.ANSWERED)


@pytest.mark.anyio
async def test_the_score_sees_the_models_own_text_only(services: AgentServices) -> None:
    services.counter.text = "#### 18"

    trajectory = await services.say(COUNT, "I give up" + END)

    assert trajectory.turns[0].messages[-1].content == "#### 18"
    assert trajectory.reward is not None
    assert trajectory.reward.components["answered"] == 0.0


@pytest.mark.anyio
async def test_turns_record_the_messages_that_were_appended(services: AgentServices) -> None:
    trajectory = await services.say("So: " + FIRST, ANSWER)

    [assistant, tool] = trajectory.turns[0].messages
    assert assistant.tool_calls is not None
    assert (assistant.content, assistant.tool_calls[0].id) == ("So:", "call00000")
    assert assistant.tool_calls[0].function.arguments == '{"answer": "18"}'
    assert (tool.role, tool.name, tool.tool_call_id) == ("tool", "calc_gsm8k_reward", "call00000")
    assert [message.content for message in trajectory.turns[1].messages] == ["#### 18"]


@pytest.mark.anyio
async def test_each_generation_carries_the_whole_context_and_says_what_is_new(services: AgentServices) -> None:
    trajectory = await services.say(FIRST, ANSWER, min_weight_version=3, sampling_params__seed=42)

    first, second = services.model.seen()
    shown = len(trajectory.prompt_ids) + trajectory.turns[0].response_end
    assert second.token_ids == (trajectory.prompt_ids + trajectory.response_ids)[: len(second.token_ids)]
    assert (first.context_start, second.context_start) == (0, shown)
    assert (first.min_weight_version, second.min_weight_version) == (3, 3)
    assert first.sampling_params.seed != second.sampling_params.seed
    assert trajectory.id == "run-a/1/7/0"
    assert {session for session, _ in services.model.requests} == {"exp/1/7"}  # the group's, which share the prompt


@pytest.mark.anyio
async def test_max_tokens_shrink_to_what_the_response_has_left(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, ANSWER, limits__max_response_length=150, sampling_params__max_tokens=100)

    first, second = services.model.seen()
    left = 150 - trajectory.turns[1].response_start
    assert left < 100
    assert (first.sampling_params.max_tokens, second.sampling_params.max_tokens) == (100, left)


@pytest.mark.anyio
async def test_a_plain_answer_counts_two_turns(services: AgentServices) -> None:
    trajectory = await services.say(ANSWER)

    assert (trajectory.num_turns, trajectory.stop_reason) == (2, StopReason.ANSWERED)


@pytest.mark.anyio
async def test_one_instance_serves_every_call_of_a_trajectory_and_is_released(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, COUNT, ANSWER)

    assert [turn.messages[-1].content for turn in trajectory.turns] == ["count 1", "count 2", "#### 18"]
    assert trajectory.tool_rewards == [0.25, 0.25]
    assert services.counter.released == list(services.counter.counts)
    assert len(services.counter.released) == 1


@pytest.mark.anyio
async def test_the_turn_limit_ends_a_trajectory_that_still_calls_tools(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, COUNT, limits__max_assistant_turns=2)

    assert (trajectory.stop_reason, trajectory.num_turns) == (StopReason.MAX_TURNS, 4)
    assert trajectory.tool_rewards == [0.25]


@pytest.mark.anyio
async def test_the_limit_of_user_turns_leaves_the_model_one_turn_after_the_last_observation(
    services: AgentServices,
) -> None:
    """verl/experimental/agent_loop/tool_agent_loop.py ends after a generation with so many user turns before it."""
    trajectory = await services.say(COUNT, COUNT, COUNT, limits__max_user_turns=2)

    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 3)
    assert trajectory.tool_rewards == [0.25, 0.25]


@pytest.mark.anyio
async def test_an_answer_at_the_turn_limit_is_an_answer(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, ANSWER, limits__max_assistant_turns=2)

    assert trajectory.stop_reason is StopReason.ANSWERED


@pytest.mark.anyio
async def test_a_full_response_ends_the_trajectory(services: AgentServices) -> None:
    trajectory = await services.say("#### 18 and more", limits__max_response_length=7)

    assert (trajectory.stop_reason, len(trajectory.response_ids)) == (StopReason.MAX_RESPONSE, 7)
    assert trajectory.reward is not None and trajectory.reward.score == 1.0


@pytest.mark.anyio
@pytest.mark.parametrize(("spare", "reason"), [(0, StopReason.MAX_RESPONSE), (1, StopReason.MAX_RESPONSE)])
async def test_an_observation_that_leaves_no_token_for_an_answer_is_discarded(
    services: AgentServices, spare: int, reason: StopReason
) -> None:
    said, seen = len(services.model.encode(COUNT)), len(services.model.encode(observed("count 1")))

    trajectory = await services.say(COUNT, "#", limits__max_response_length=said + seen + spare)

    assert trajectory.stop_reason is reason
    assert len(trajectory.response_ids) == (said if spare == 0 else said + seen + 1)
    assert trajectory.response_mask.count(0) == seen * spare
    assert trajectory.num_turns == 2 + 2 * spare
    assert trajectory.tool_rewards == [0.25]


@pytest.mark.anyio
async def test_a_prompt_that_is_too_long_is_an_error_of_the_trajectory(services: AgentServices) -> None:
    trajectory = await services.say(ANSWER, limits__max_prompt_length=10)

    assert trajectory.error is not None
    assert (trajectory.stop_reason, trajectory.error.code) == (StopReason.ERROR, ErrorCode.INVALID_REQUEST)
    assert "at most 10 tokens (max_prompt_length), got 85" in trajectory.error.message
    assert (services.model.requests, trajectory.reward) == ([], None)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            call("add"),
            "Unknown function 'add'. Available tools: ['counter', 'other', 'calculator', 'calc_gsm8k_reward']",
        ),
        (
            call("counter", '{"a": }'),
            "Invalid JSON in arguments for 'counter': Expecting value: line 2 column 40 (char 40)",
        ),
        (call("counter", '{"refuse": true}'), "Error executing tool 'counter': expected no refuse, got one"),
        (
            call("counter", '{"raise": true}'),
            "Error executing tool 'counter': tool 'counter' failed in execute: RuntimeError: out of order",
        ),
        ("<tool_call>{", "Invalid tool call: expected </tool_call> after <tool_call>, got the end of the turn."),
    ],
)
async def test_what_the_model_does_wrong_is_told_to_it_and_it_goes_on(
    services: AgentServices, said: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        trajectory = await services.say(said + END, ANSWER)

    assert trajectory.error is None
    assert trajectory.turns[0].messages[-1].content == told
    assert (trajectory.tool_rewards, trajectory.stop_reason) == ([0.0], StopReason.ANSWERED)


@pytest.mark.anyio
async def test_observations_are_cut_to_their_limit(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, ANSWER, limits__max_tool_response_length=4)

    assert trajectory.turns[0].messages[-1].content == "co...(truncated)... 1"


@pytest.mark.anyio
async def test_a_turn_that_was_cut_behind_its_call_is_ended_before_the_observation(services: AgentServices) -> None:
    said = call("counter")

    trajectory = await services.say(said, ANSWER)

    start, end = len(services.model.encode(said)), trajectory.turns[1].response_start
    assert trajectory.response_ids[start:end] == services.model.encode(END + observed("count 1"))
    assert trajectory.response_mask[start:end] == [0] * (end - start)


@pytest.mark.anyio
async def test_a_turn_cut_inside_its_call_ends_the_trajectory(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, sampling_params__max_tokens=20)

    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_RESPONSE, 1)


@pytest.mark.anyio
async def test_a_turn_that_the_engine_cut_is_continued(services: AgentServices) -> None:
    async def cut() -> str:
        services.model.finish_reason = "abort"
        return "#### "

    async def rest() -> str:
        services.model.finish_reason = None
        return "18" + END

    trajectory = await services.say(cut, rest)

    assert trajectory.response_ids == services.model.encode(ANSWER)
    assert [(span.version, span.start, span.end) for span in trajectory.weight_versions] == [(3, 0, 5), (4, 5, 8)]
    assert (trajectory.num_turns, trajectory.stop_reason) == (2, StopReason.ANSWERED)
    assert [request.context_start for request in services.model.seen()] == [0, len(trajectory.prompt_ids) + 5]


@pytest.mark.anyio
async def test_only_the_named_tools_are_offered(services: AgentServices) -> None:
    trajectory = await services.say(call("counter") + END, ANSWER, tools=["calculator"])

    assert services.model.encode("Tools: calculator<|im_end|>") == trajectory.prompt_ids[8:26]
    told = trajectory.turns[0].messages[-1].content
    assert told == "Unknown function 'counter'. Available tools: ['calculator']"


@pytest.mark.anyio
async def test_a_row_can_select_its_tools(services: AgentServices) -> None:
    trajectory = await services.say(call("add") + END, ANSWER, sample__extra_info__tool_selection=["other"])

    assert trajectory.turns[0].messages[-1].content == "Unknown function 'add'. Available tools: ['other']"


@pytest.mark.anyio
async def test_a_tool_that_the_server_lacks_is_an_error(services: AgentServices) -> None:
    trajectory = await services.say(ANSWER, tools=["calculator", "browser"])

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.UNKNOWN_TOOL


@pytest.mark.anyio
async def test_the_single_turn_agent_offers_no_tools_and_answers_once(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, agent_name=None)

    assert trajectory.agent_name == "single_turn_agent"
    assert trajectory.prompt_ids == services.model.encode("<|im_start|>user\n9+9?<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.response_mask == [1] * len(services.model.encode(COUNT))
    assert (trajectory.num_turns, trajectory.stop_reason) == (2, StopReason.ANSWERED)


@pytest.mark.anyio
async def test_a_turn_counts_the_calls_that_reached_their_tool(services: AgentServices) -> None:
    unknown, refused = call("abacus") + END, call("calculator", '{"expression": "3/0"}') + END
    trajectory = await services.say(unknown, refused, FIRST, ANSWER)
    assert [turn.calls_executed for turn in trajectory.turns] == [0, 1, 1, 0]
