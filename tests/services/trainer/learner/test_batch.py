"""Exact positions of a batch."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch

from trackway.trainer.learner.batch import ResponseColumns, TrainingBatch, placed_scores
from trackway.wire.trajectory import Reward, TokenRow, Trajectory, Turn

Rollout = Callable[..., Trajectory]


def two_rows(rollout: Rollout) -> TrainingBatch:
    short = rollout(prompt_ids=[1, 2], response_ids=[3], response_mask=[1], response_logprobs=[-0.5])
    return TrainingBatch.of([rollout(), short], [1.5, -1.5])


def test_rows_are_prompt_and_response_padded_on_the_right(rollout: Rollout):
    batch = two_rows(rollout)

    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 30, 31, 22, 23], [1, 2, 3, 0, 0, 0, 0, 0, 0]]
    assert batch.attention_mask.int().tolist() == [[1] * 9, [1, 1, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.lengths.tolist() == [9, 3]
    assert batch.advantages.tolist() == [1.5, -1.5]


def test_response_mask_lies_one_before_each_model_token_of_both_turns(rollout: Rollout):
    batch = two_rows(rollout)

    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0]]
    predicted = batch.input_ids[:, 1:][batch.response_mask]
    assert predicted.tolist() == [20, 21, 22, 23, 3]


def test_old_logprobs_are_the_samplers_where_the_mask_is_set_and_zero_elsewhere(rollout: Rollout):
    dirty = rollout(response_logprobs=[-4.0, -4.1, -9.0, -9.0, -4.2, -4.3])

    batch = TrainingBatch.of([dirty], [0.0], torch.float64)

    assert batch.old_logprobs.tolist() == [[0, 0, -4.0, -4.1, 0, 0, -4.2, -4.3]]


def test_chosen_rows_are_cut_to_the_longest_of_them(rollout: Rollout):
    batch = two_rows(rollout).rows(torch.tensor([1]))

    assert batch.input_ids.tolist() == [[1, 2, 3]]
    assert batch.attention_mask.tolist() == [[True, True, True]]
    assert batch.response_mask.tolist() == [[False, True]]
    assert batch.old_logprobs.tolist() == [[0.0, -0.5]]
    assert batch.advantages.tolist() == [-1.5]


def test_an_empty_prompt_is_refused_because_nothing_predicts_the_first_token(rollout: Rollout):
    with pytest.raises(ValueError, match="expected a prompt of at least one token, got none in r/1/0/0"):
        TrainingBatch.of([rollout(prompt_ids=[])], [0.0])


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="expected at least one trajectory"):
        TrainingBatch.of([], [])


def test_rows_are_cut_to_the_longest_of_them(rollout: Rollout):
    def row(*prompt_ids: int) -> Trajectory:
        return rollout(prompt_ids=list(prompt_ids), response_ids=[9], response_mask=[1], response_logprobs=[-0.5])

    batch = TrainingBatch.of([row(1, 1, 1), row(2), row(3, 3), row(4)], [0.0, 1.0, 2.0, 3.0])

    parts = [batch.rows(torch.tensor(index)) for index in ([1, 3], [2, 0])]

    assert [part.input_ids.tolist() for part in parts] == [[[2, 9], [4, 9]], [[3, 3, 9, 0], [1, 1, 1, 9]]]
    assert [part.advantages.tolist() for part in parts] == [[1.0, 3.0], [2.0, 0.0]]
    assert [part.ref_logprobs.shape for part in parts] == [(2, 1), (2, 3)]


def test_a_batch_cannot_be_changed(rollout: Rollout):
    batch = two_rows(rollout)

    with pytest.raises(FrozenInstanceError):
        batch.lengths = batch.lengths + 1  # pyright: ignore[reportAttributeAccessIssue]


def test_an_advantage_is_needed_for_each_trajectory(rollout: Rollout):
    with pytest.raises(ValueError, match="expected one advantage per trajectory, 1, got 2"):
        TrainingBatch.of([rollout()], [0.0, 1.0])


def test_the_responses_of_a_trajectorys_rows_lie_one_after_another(rollout: Rollout):
    rows = [
        rollout(prompt_ids=[1] * prompt, response_ids=[2] * n, response_mask=[1] * n, response_logprobs=[-1.0] * n)
        for prompt, n in ((2, 3), (1, 2), (3, 1))
    ]
    columns = ResponseColumns(rows, owners=[0, 1, 0], width=4)
    values = torch.tensor([[9, 1, 2, 3], [4, 5, 9, 9], [9, 9, 6, 9]])

    response = columns.response(values)

    assert response.tolist() == [[1, 2, 3, 6], [4, 5, 0, 0]]
    assert columns.columns(response).tolist() == [[0, 1, 2, 3], [4, 5, 0, 0], [0, 0, 6, 0]]


def turn(start: int, end: int) -> Turn:
    return Turn(index=0, messages=[], response_start=start, response_end=end, finish_reason="stop")


def test_scores_of_turns_and_tokens_stand_at_their_tokens_of_all_rows(rollout: Rollout):
    row = TokenRow(prompt_ids=[1], response_ids=[2, 3], response_mask=[0, 1], response_logprobs=[0.0, -1.0])
    two_turns = [turn(0, 2), turn(4, 6)]
    of_turns = rollout(
        reward=Reward(score=1.0, turn_scores=[0.5, -0.25, 2.0]),
        turns=two_turns,
        further_rows=[row.model_copy(update={"turns": [turn(1, 2)]})],
    )
    of_tokens = rollout(reward=Reward(score=1.0, token_scores=[float(place) for place in range(6)]), turns=two_turns)

    placed = placed_scores([of_turns, rollout(turns=two_turns), of_tokens, rollout(reward=None)], 9)

    assert placed.tolist() == [
        [0, 0.5, 0, 0, 0, -0.25, 0, 2, 0],
        [0] * 9,
        [0, 1, 2, 3, 4, 5, 0, 0, 0],
        [0] * 9,
    ]


def test_scores_of_turns_without_a_token_add_up_with_those_before_them(rollout: Rollout):
    reward = Reward(score=1.0, turn_scores=[1.0, 2.0, 4.0])

    placed = placed_scores([rollout(reward=reward, turns=[turn(0, 0), turn(0, 1), turn(1, 1)])], 6)

    assert placed.tolist() == [[7, 0, 0, 0, 0, 0]]
