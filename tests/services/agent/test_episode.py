import math
from typing import Any, Literal

import pytest

from tests.services.agent.agent_services import group
from trackway.agent.episode import Episode, TurnEpisode, cut_prompt
from trackway.agent.sessions.session import SessionEpisode
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import ChoiceLogprobs, GenerateChoice, SamplingParams, TokenLogprob
from trackway.wire.trajectory import Reward, StopReason, TokenRow, Turn, WeightSpan


def episode(**changes: Any) -> Episode:
    return Episode.begin(group(**changes), 2, "tool_agent")


def choice(*ids: int, logprobs: int | None = None, spans: list[WeightSpan] | None = None) -> GenerateChoice:
    count = len(ids) if logprobs is None else logprobs
    content = [TokenLogprob(token_id=0, logprob=-0.5)] * count
    return GenerateChoice(
        finish_reason="stop",
        token_ids=list(ids),
        logprobs=ChoiceLogprobs(content=content),
        weight_versions=[WeightSpan(version=1, start=0, end=len(ids))] if spans is None else spans,
    )


def said(by: Episode, *ids: int) -> None:
    """The model writes one turn."""
    start = len(by.response_ids)
    by.add_generated(choice(*ids))
    message = Message(role="assistant", content=str(ids))
    turn = Turn(
        index=len(by.turns), messages=[message], response_start=start, response_end=start + len(ids), finish_reason=""
    )
    by.turns.append(turn)


def observed(text: str) -> Message:
    return Message(role="tool", content=text)


def test_the_id_names_run_step_sample_and_rollout() -> None:
    assert episode().id == "run-a/1/7/2"
    assert episode(validation=True).id == "run-a/val1/7/2"
    assert episode().turn == 0


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [
        ("left", 3, [5, 6, 7]),
        ("right", 3, [1, 2, 3]),
        ("middle", 3, [1, 6, 7]),
        ("middle", 4, [1, 2, 6, 7]),
        ("left", 1, [7]),
        ("right", 1, [1]),
        ("middle", 1, [7]),
        ("middle", 7, [1, 2, 3, 4, 5, 6, 7]),
        ("left", 8, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_prompt_is_cut_at_the_side_that_verl_cuts(
    side: Literal["left", "right", "middle"], limit: int, kept: list[int]
) -> None:
    assert cut_prompt([1, 2, 3, 4, 5, 6, 7], limit, side) == kept


@pytest.mark.parametrize(("ids", "logprobs"), [([1, 2, 3], 3), ([1, 2], 1), ([1], 2)])
def test_an_answer_that_is_too_long_or_lacks_logprobs_is_refused(ids: list[int], logprobs: int) -> None:
    small = episode(limits__max_response_length=2)

    with pytest.raises(TrackwayError) as caught:
        small.add_generated(choice(*ids, logprobs=logprobs))

    assert caught.value.code is ErrorCode.INTERNAL
    assert small.response_ids == []


def test_what_the_model_wrote_has_mask_1_and_its_logprobs_and_an_observation_has_neither() -> None:
    grown = episode()

    said(grown, 1, 2)
    assert grown.add_observation([3, 4, 5], [observed("a")]) is True
    said(grown, 6)

    assert grown.response_ids == [1, 2, 3, 4, 5, 6]
    assert grown.response_mask == [1, 1, 0, 0, 0, 1]
    assert grown.response_logprobs == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    assert grown.written() == [[1, 2], [6]]


def test_the_context_grows_and_the_room_shrinks_by_each_token() -> None:
    grown = episode(limits__max_response_length=9)
    assert (grown.shown, grown.room, grown.num_turns) == (0, 9, 1)

    grown.add_prompt([10, 11, 12])
    said(grown, 1, 2)
    assert (grown.context, grown.shown, grown.room, grown.num_turns) == ([10, 11, 12, 1, 2], 5, 7, 2)

    grown.add_observation([3], [observed("a")])
    assert (grown.context, grown.shown, grown.room, grown.num_turns) == ([10, 11, 12, 1, 2, 3], 5, 6, 3)

    said(grown, 4, 5)
    assert (grown.context, grown.shown, grown.room, grown.num_turns) == ([10, 11, 12, 1, 2, 3, 4, 5], 8, 4, 4)


def test_the_turns_of_further_rows_count_too() -> None:
    grown = SessionEpisode.begin(group(), 2, "external")
    said(grown, 1)
    row = TokenRow(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-0.5])
    grown.further_rows = [row.model_copy(update={"turns": grown.turns * 2}), row]

    assert grown.num_turns == 4


def test_a_conversation_is_the_prompt_and_the_turns_unless_a_session_says_another() -> None:
    grown = SessionEpisode.begin(group(), 2, "external")
    said(grown, 1)
    told = [Message(role="user", content="told")]

    assert [message.content for message in grown.conversation] == ["9+9?", "(1,)"]
    grown.said = told
    assert grown.conversation == told


@pytest.mark.parametrize(
    ("last", "text", "messages"),
    [
        ("user", "more", [("system", "one"), ("user", "two\n\nmore")]),
        ("assistant", "more", [("system", "one"), ("assistant", "two"), ("user", "more")]),
        ("user", "", [("system", "one"), ("user", "two")]),
    ],
)
def test_a_text_extends_the_users_last_message_or_is_one(last: str, text: str, messages: list[tuple[str, str]]) -> None:
    extended = episode(sample__prompt=[{"role": "system", "content": "one"}, {"role": last, "content": "two"}])
    extended.extend_prompt(text)

    assert [(message.role, message.content) for message in extended.sample.prompt] == messages


@pytest.mark.parametrize("asked", [0, 2])
def test_the_most_likely_tokens_are_kept_where_they_were_asked_for(asked: int) -> None:
    ranked = TokenLogprob(
        token_id=1, logprob=-0.5, top_logprobs=[TokenLogprob(token_id=number, logprob=-number) for number in (1, 3)]
    )
    answered = choice(1).model_copy(update={"logprobs": ChoiceLogprobs(content=[ranked])})
    grown = TurnEpisode.of(episode(), 0, [], SamplingParams(logprobs=asked))
    grown.add_generated(answered)

    assert grown.top_logprobs == ([[(1, -1.0), (3, -3.0)]] if asked else [])


def test_weight_spans_are_counted_from_the_first_token_of_the_response() -> None:
    grown = episode()
    said(grown, 1, 2)
    grown.add_observation([3], [observed("a")])

    two = [WeightSpan(version=1, start=0, end=1), WeightSpan(version=2, start=1, end=4, kv_version=1)]
    grown.add_generated(choice(4, 5, 6, 7, spans=two))

    assert grown.weight_versions == [
        WeightSpan(version=1, start=0, end=2),
        WeightSpan(version=1, start=3, end=4),
        WeightSpan(version=2, start=4, end=7, kv_version=1),
    ]


def test_an_observation_belongs_to_the_turn_before_it() -> None:
    grown = episode()
    for number in range(3):
        said(grown, number)

    grown.add_observation([3, 4], [observed("a"), observed("b")])

    assert [[message.content for message in turn.messages] for turn in grown.turns] == [
        ["(0,)"],
        ["(1,)"],
        ["(2,)", "a", "b"],
    ]


@pytest.mark.parametrize(("tokens", "fits"), [(1, True), (2, True), (3, False), (4, False)])
def test_an_observation_must_leave_room_for_an_answer(tokens: int, fits: bool) -> None:
    small = episode(limits__max_response_length=5)
    said(small, 1, 2)

    assert small.add_observation([3] * tokens, [observed("a")]) is fits

    assert len(small.response_ids) == (2 + tokens if fits else 2)
    assert (len(small.turns[0].messages), small.user_turns) == ((2, 1) if fits else (1, 0))


def test_the_model_may_fill_the_response_to_its_last_token() -> None:
    small = episode(limits__max_response_length=5)
    said(small, 1, 2)
    said(small, 3, 4, 5)
    assert (small.response_ids, small.room) == ([1, 2, 3, 4, 5], 0)


def test_a_prompt_may_be_as_long_as_its_limit() -> None:
    full = episode(limits__max_prompt_length=3)
    full.add_prompt([1, 2, 3])
    assert full.prompt_ids == [1, 2, 3]


def test_a_longer_prompt_is_refused_with_what_can_be_done() -> None:
    with pytest.raises(TrackwayError) as caught:
        episode(limits__max_prompt_length=3).add_prompt([1, 2, 3, 4])
    assert (caught.value.code, caught.value.message) == (
        ErrorCode.INVALID_REQUEST,
        "expected a prompt of at most 3 tokens (max_prompt_length), got 4; "
        "raise the limit, filter the row out, or let the prompt be cut (prompt_truncation)",
    )


def test_a_longer_prompt_that_may_be_cut_is_cut() -> None:
    cut = episode(limits__max_prompt_length=3, limits__prompt_truncation="left")
    cut.add_prompt([1, 2, 3, 4])
    assert cut.prompt_ids == [2, 3, 4]


def test_a_prompt_that_is_too_long_to_be_cut_is_refused_without_that_advice() -> None:
    error = episode(limits__max_prompt_length=3, limits__prompt_truncation="left").prompt_too_long(70_000)
    assert error.message == (
        "expected a prompt of at most 65536 tokens (max_prompt_length), got 70000; "
        "raise the limit or filter the row out"
    )


@pytest.mark.parametrize(
    ("chars", "ids", "sent"), [(16_384, [], True), (16_385, [], False), (16_385, [1], True), (5, [1], True)]
)
def test_a_long_prompt_that_was_refused_is_not_sent_back(chars: int, ids: list[int], sent: bool) -> None:
    prompt = [{"role": "system", "content": "x"}, {"role": "user", "content": "x" * (chars - 1)}]
    asked = episode(sample__prompt=prompt)
    asked.add_prompt(ids)
    assert asked.trajectory().prompt_messages == (asked.sample.prompt if sent else [])
    assert asked.trajectory().ground_truth == asked.sample.reward_model.ground_truth


def test_a_loop_may_score_its_trajectory_and_place_parts_of_the_score() -> None:
    scored = episode()
    scored.set_reward(1.5, turn_scores=[0.5, 1.0])

    assert scored.trajectory().reward == Reward(score=1.5, turn_scores=[0.5, 1.0])
    with pytest.raises(TypeError, match="positional"):
        scored.set_reward(1.5, [0.5, 1.0])  # pyright: ignore[reportCallIssue]
    for parts in ({"turn_scores": [math.nan]}, {"token_scores": [math.inf]}):
        with pytest.raises(TrackwayError, match="expected the loop's reward_score to be finite"):
            scored.set_reward(1.0, **parts)


def test_a_failed_episode_keeps_its_tokens_and_loses_its_reward() -> None:
    failed = episode()
    failed.add_generated(choice(1, 2))
    failed.fail(TrackwayError(ErrorCode.UNAVAILABLE, "gone"))

    trajectory = failed.trajectory()

    assert (trajectory.response_ids, trajectory.response_mask) == ([1, 2], [1, 1])
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ERROR, None)
    assert trajectory.error is not None and trajectory.error.retryable


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1e300])
def test_a_logprob_that_float32_does_not_hold_is_refused_by_name(number: float) -> None:
    content = [TokenLogprob(token_id=5, logprob=-0.5), TokenLogprob(token_id=6, logprob=number)]
    given = choice(5, 6).model_copy(update={"logprobs": ChoiceLogprobs(content=content)})

    with pytest.raises(TrackwayError, match=r"expected the engine's logprobs to be finite and at most 3.4e\+38") as got:
        episode().add_generated(given)
    assert got.value.code is ErrorCode.NOT_FINITE
