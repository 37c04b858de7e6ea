"""Exact positions of a batch, and what is left out of it."""

from collections.abc import Callable

import pytest
import torch

from trackway.trainer.batch import LeftOut, TrainingBatch, select
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trajectory import Trajectory

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


def test_what_cannot_be_trained_on_is_left_out_and_counted_by_reason(rollout: Rollout):
    error = ErrorBody(code=ErrorCode.UNAVAILABLE, message="gone", retryable=True)
    good, failed, unscored = rollout(), rollout(error=error), rollout(reward=None)
    silent = rollout(response_mask=[0] * 6)
    empty = rollout(response_ids=[], response_mask=[], response_logprobs=[])

    kept, left_out = select([failed, good, unscored, silent, empty])

    assert kept == [good]
    assert left_out == {LeftOut.ERROR: 1, LeftOut.NO_MODEL_TOKEN: 2, LeftOut.UNSCORED: 1}


def test_an_empty_prompt_is_refused_because_nothing_predicts_the_first_token(rollout: Rollout):
    with pytest.raises(ValueError, match="expected a prompt of at least one token, got none in r/1/0/0"):
        TrainingBatch.of([rollout(prompt_ids=[])], [0.0])


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="expected at least one trajectory"):
        TrainingBatch.of([], [])
