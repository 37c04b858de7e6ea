"""Exact positions of a batch."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from trackway.learner.batch import (
    ResponseColumns,
    TokenRecord,
    TokenValues,
    TrainingBatch,
    mini_batches,
    placed_scores,
    token_versions,
)
from trackway.wire.trajectory import Reward, TokenRow, Trajectory, Turn, WeightSpan

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


def test_only_rows_with_a_token_to_train_on_are_trainable(rollout: Rollout):
    batch = TrainingBatch.of([rollout(), rollout(prompt_ids=[1]), rollout(prompt_ids=[2, 3])], [1.0, 2.0, 3.0])
    rejected = batch.response_mask.clone()
    rejected[0] = False

    assert batch.trainable() is batch
    trainable = replace(batch, response_mask=rejected).trainable()
    assert trainable.advantages.tolist() == [2.0, 3.0]
    assert trainable.input_ids.tolist() == [[1, 20, 21, 30, 31, 22, 23, 0], [2, 3, 20, 21, 30, 31, 22, 23]]


def test_a_mini_batch_has_trajectories_with_all_their_rows_in_each_epoch():
    owners = [0, 1, 0, 2, 2, 1]

    in_order = [index.tolist() for index in mini_batches(owners, 2, 2, None)]

    assert in_order == [[0, 2, 1, 5], [3, 4]] * 2
    assert [index.tolist() for index in mini_batches([0, 0], 1, 1, None)] == [[0, 1]]


def test_a_shuffler_orders_the_trajectories_of_each_epoch_anew():
    rows = [[0, 2], [1, 5], [3, 4]]
    drawn = torch.Generator().manual_seed(1)
    orders = [torch.randperm(3, generator=drawn).tolist() for _ in range(2)]

    shuffled = [index.tolist() for index in mini_batches([0, 1, 0, 2, 2, 1], 1, 2, torch.Generator().manual_seed(1))]

    assert shuffled == [rows[owner] for order in orders for owner in order]
    assert orders[0] != orders[1]


def test_the_version_of_a_token_lies_in_the_column_that_predicts_it(rollout: Rollout):
    spans = [WeightSpan(version=3, start=0, end=2), WeightSpan(version=5, start=3, end=5)]
    row = rollout(prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 1], response_logprobs=[-1.0, -1.0])

    versions = token_versions([rollout(weight_versions=spans), row], 8, 7.5)

    assert versions.tolist() == [[7.5, 7.5, 3, 3, 7.5, 5, 5, 7.5], [7.5] * 8]
    assert versions.dtype == torch.float64


@pytest.fixture
def of_two_rows(rollout: Rollout) -> list[Trajectory]:
    """Three response tokens in the columns 1 to 3, the second of a tool, and one in the column 0."""
    return [
        rollout(prompt_ids=[1, 2], response_ids=[3, 4, 5], response_mask=[1, 0, 1], response_logprobs=[-1.0, 0, -1.0]),
        rollout(prompt_ids=[6], response_ids=[7], response_mask=[1], response_logprobs=[-1.0]),
    ]


def told(values: TokenValues) -> dict[str, list[float | bool | None]]:
    """By name, with None for NaN."""
    names = ("logprobs", "entropies", "advantages", "clipped", "kept")
    return {name: [None if math.isnan(value) else value for value in getattr(values, name).tolist()] for name in names}


def test_each_token_has_the_values_of_its_first_step_and_is_clipped_or_kept_by_any(of_two_rows: list[Trajectory]):
    record = TokenRecord(TrainingBatch.of(of_two_rows, [1.5, -2.0]), None)
    no, yes = [False] * 4, [True]
    second = torch.tensor([1])
    record.add(second, torch.tensor([[-0.5]]), torch.tensor([[0.25]]), torch.tensor([yes]), torch.tensor([yes]))
    record.add(
        torch.tensor([0, 1]),
        torch.tensor([[-9, -0.125, -9, -0.75], [-8, -8, -8, -8]]),
        torch.tensor([[9, 0.5, 9, 0.75], [8, 8, 8, 8]]),
        torch.tensor([[False, True, False, False], no]),
        torch.tensor([[False, True, False, False], no]),
    )

    values = record.of(of_two_rows)

    assert values.lengths == [3, 1]
    assert told(values) == {
        "logprobs": [-0.125, None, -0.75, -0.5],
        "entropies": [0.5, None, None, 0.25],
        "advantages": [1.5, None, 1.5, -2.0],
        "clipped": [True, False, False, True],
        "kept": [True, False, False, True],
    }
    with pytest.raises(FrozenInstanceError):
        values.lengths = []  # pyright: ignore[reportAttributeAccessIssue]


def test_logprobs_and_advantages_of_tokens_are_those_given_whatever_a_step_has(of_two_rows: list[Trajectory]):
    batch = TrainingBatch.of(of_two_rows, [0.0, 0.0])
    by_token = torch.tensor([[9, 1.0, 9, 2.0], [3.0, 9, 9, 9]])
    record = TokenRecord(replace(batch, advantages=by_token), -by_token / 4)
    step = torch.tensor([[-8.0, -8.0, -8.0, -8.0]])
    record.add(torch.tensor([0]), step, -step, step > 0, step < 0)

    assert told(record.of(of_two_rows)) == {
        "logprobs": [-0.25, None, -0.5, -0.75],
        "entropies": [8.0, None, 8.0, None],  # no step trained the second row
        "advantages": [1.0, None, 2.0, 3.0],
        "clipped": [False] * 4,
        "kept": [True, True, True, False],
    }


def test_each_row_has_an_owner(rollout: Rollout):
    with pytest.raises(ValueError, match="zip"):
        ResponseColumns([rollout(), rollout()], owners=[0], width=8)
