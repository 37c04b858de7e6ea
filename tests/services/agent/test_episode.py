import math
from typing import Any, Literal

import pytest
from agent_world import group

from trackway.agent.episode import Episode, cut_prompt
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import ChoiceLogprobs, GenerateChoice, TokenLogprob
from trackway.wire.trajectory import StopReason, WeightSpan


def episode(**changes: Any) -> Episode:
    return Episode.begin(group(**changes), 2, "tool_agent")


def choice(*ids: int, logprobs: int | None = None) -> GenerateChoice:
    count = len(ids) if logprobs is None else logprobs
    content = [TokenLogprob(token_id=0, logprob=-0.5)] * count
    spans = [WeightSpan(version=1, start=0, end=len(ids))]
    return GenerateChoice(
        finish_reason="stop", token_ids=list(ids), logprobs=ChoiceLogprobs(content=content), weight_versions=spans
    )


def test_the_id_names_run_step_sample_and_rollout() -> None:
    assert episode().id == "run-a/1/7/2"
    assert episode(validation=True).id == "run-a/val1/7/2"


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
    given = choice(5, 6)
    given.logprobs.content[1] = TokenLogprob(token_id=6, logprob=number)

    with pytest.raises(TrackwayError, match=r"expected the engine's logprobs to be finite and at most 3.4e\+38") as got:
        episode().add_generated(given)
    assert got.value.code is ErrorCode.NOT_FINITE
