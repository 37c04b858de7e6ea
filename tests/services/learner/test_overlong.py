"""DAPO's penalty on long responses: the formula at its edges, and what becomes of the reward."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from trackway.learner.filtering import OverlongPenalty
from trackway.run_config import resolve
from trackway.trainer.loop.from_config import overlong_penalty
from trackway.trainer.metrics import update_metrics, validation_metrics
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import Reward, TokenRow, Trajectory

Rollout = Callable[..., Trajectory]
BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (15, 0.0), (16, 0.0), (17, -0.125), (18, -0.25), (20, -0.5), (22, -0.75)]
)
def test_the_penalty_rises_over_the_buffer_to_its_factor(length: int, penalty: float):
    assert OverlongPenalty(max_length=20, buffer=4, factor=0.5).penalty(length) == penalty


@pytest.mark.parametrize("log", [False, True])
def test_a_penalised_reward_keeps_the_score_as_a_component(rollout: Rollout, log: bool):
    trajectory = rollout(reward=Reward(score=1.0, components={"correct": 1.0}))  # a response of 6 tokens

    shaped = OverlongPenalty(8, 4, 1.0, log).applied(trajectory)

    more = {"overlong_reward": -0.5, "overlong": 1.0} if log else {}
    assert shaped.reward == Reward(score=0.5, components={"correct": 1.0, "score": 1.0, **more})
    assert shaped.model_copy(update={"reward": trajectory.reward}) == trajectory


def test_a_response_that_is_short_enough_has_a_penalty_of_0_which_is_logged_on_request(rollout: Rollout):
    trajectory = rollout(reward=Reward(score=1.0))  # a response of 6 tokens

    logged, plain = OverlongPenalty(10, 4, 1.0, log=True), OverlongPenalty(10, 4, 1.0)

    assert logged.applied(trajectory).reward == Reward(
        score=1.0, components={"score": 1.0, "overlong_reward": 0.0, "overlong": 0.0}
    )
    assert plain.applied(trajectory).reward == Reward(score=1.0, components={"score": 1.0})


def test_of_several_rows_the_last_counts_and_without_a_reward_nothing_changes(rollout: Rollout):
    row = TokenRow(prompt_ids=[1], response_ids=[1] * 7, response_mask=[1] * 7, response_logprobs=[0.0] * 7)
    penalty, unscored = OverlongPenalty(8, 4, 1.0), rollout(reward=None)

    shaped = penalty.applied(rollout(reward=Reward(score=1.0), further_rows=[row]))

    assert shaped.reward is not None
    assert shaped.reward.score == 0.25
    assert penalty.applied(unscored) == unscored


def test_the_accuracy_of_a_validation_stays_as_scored(rollout: Rollout):
    shaped = OverlongPenalty(8, 4, 1.0, log=True).applied(rollout(reward=Reward(score=1.0), data_source="d"))

    metrics = validation_metrics([shaped], 1)

    assert (metrics["val-core/d/acc/mean@1"], metrics["val-core/d/reward/mean@1"]) == (1.0, 0.5)
    assert metrics["val-aux/d/overlong_reward/mean@1"] == -0.5
    assert update_metrics([shaped], 0, 9)["critic/overlong_reward/mean"] == -0.5


@pytest.mark.parametrize("section", [BUFFER, "reward_model.overlong_buffer"])
def test_both_spellings_of_verl_set_it_and_the_longest_response_is_its_end(section: str):
    values = {"enable": True, "len": 64, "penalty_factor": 0.5, "log": True}
    keys = {f"{section}.{name}": value for name, value in values.items()}

    assert overlong_penalty(resolve({})) is None
    assert overlong_penalty(resolve({**keys})) == OverlongPenalty(512, 64, 0.5, log=True)
    own = {**keys, "reward.reward_kwargs.max_resp_len": 100}
    assert overlong_penalty(resolve(own)) == OverlongPenalty(100, 64, 0.5, log=True)


@pytest.mark.parametrize("length", [0, 513])
def test_a_buffer_that_does_not_fit_the_response_is_refused(length: int):
    with pytest.raises(TrackwayError, match=rf"overlong_buffer_cfg.len: expected 1 to 512 tokens.*got {length}"):
        resolve({f"{BUFFER}.enable": True, f"{BUFFER}.len": length})


def test_a_penalty_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        OverlongPenalty(20, 4, 0.5).factor = 1.0  # pyright: ignore[reportAttributeAccessIssue]
