"""Trajectories of several token rows: one advantage each, every model token trained once, whole in a mini-batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.services.learner.test_learner import gradients
from tests.services.trainer.learner_settings import learner_config
from trackway.learner.config import LearnerConfig
from trackway.learner.filtering import TrainStatus, train_status
from trackway.learner.learner import Learner
from trackway.trainer.loop.schedule import Republication, WeightVersions
from trackway.trainer.run_state.trajectories import read_trajectories, write_trajectories
from trackway.wire.trajectory import Reward, TokenRow, Trajectory, Turn, WeightSpan

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]

SECOND_ROW = TokenRow(
    prompt_ids=[13, 14],
    response_ids=[24, 32, 25],
    response_mask=[1, 0, 1],
    response_logprobs=[-4.4, 0.0, -4.5],
    weight_versions=[WeightSpan(version=2, start=0, end=1), WeightSpan(version=5, start=2, end=3)],
)


@pytest.fixture
def session(rollout: Rollout) -> Trajectory:
    """Scored 1, of two rows."""
    return rollout(score=1.0, further_rows=[SECOND_ROW])


@pytest.fixture
def other(rollout: Rollout) -> Trajectory:
    """Scored 0, in the same group."""
    return rollout(rollout_n=1, response_ids=[1, 2, 30, 31, 3, 4])


def test_the_gradient_is_that_of_all_rows_with_the_advantage_of_the_session(
    tiny_model: Path, rollout: Rollout, session: Trajectory, other: Trajectory
) -> None:
    config = learner_config(tiny_model, dtype="float64", clip_grad=1e9)
    algorithm = config.algorithm.model_copy(update={"norm_adv_by_std_in_grpo": False})
    config = replace(config, algorithm=algorithm)
    # The advantage of a group of one is its score.
    first = rollout(0, score=0.5)
    second = rollout(1, score=0.5, **SECOND_ROW.model_dump())
    third = other.model_copy(update={"reward": rollout(score=-0.5).reward, "tags": rollout(2).tags})

    whole = gradients(config, [session, other])

    assert max(float(g.abs().max()) for g in whole) > 0.01
    torch.testing.assert_close(whole, gradients(config, [first, second, third]), rtol=0, atol=1e-12)


def test_scores_of_turns_are_the_rewards_of_the_tokens_before_their_ends(tiny_model: Path, session: Trajectory) -> None:
    turns = [Turn(index=0, messages=[], response_start=0, response_end=2, finish_reason="stop")]
    row = SECOND_ROW.model_copy(update={"turns": [turns[0].model_copy(update={"response_end": 1})]})
    reward = Reward(score=1.0, turn_scores=[0.5, 0.25])
    placed = session.model_copy(update={"reward": reward, "turns": turns, "further_rows": [row]})
    keys = {"algorithm.adv_estimator": "reinforce_plus_plus"}

    found = Learner(learner_config(tiny_model, **keys)).update([placed])
    grouped = Learner(learner_config(tiny_model, **{"algorithm.adv_estimator": "grpo"})).update([placed])

    # Six model tokens: 1/2 after the second, 1/4 after the fifth, and the rest, 1/4, after the sixth.
    to_go = [1, 1, 1 / 2, 1 / 2, 1 / 2, 1 / 4]
    assert found.metrics["critic/returns/mean"] == pytest.approx(sum(to_go) / 6, rel=1e-12)
    assert [found.metrics[f"critic/returns/{name}"] for name in ("max", "min")] == [1.0, 0.25]
    assert found.metrics["critic/score/mean"] == grouped.metrics["critic/score/mean"] == 1.0
    assert grouped.advantages == pytest.approx([1.0], rel=1e-5)


@pytest.mark.parametrize("loss_mode", ["vanilla", "geo_mean"])
def test_a_session_is_one_sequence_however_its_rows_are_computed(
    tiny_model: Path, session: Trajectory, other: Trajectory, loss_mode: str
) -> None:
    keys = {"dtype": "float64", "clip_grad": 1e9, "bypass_mode": False, "loss_mode": loss_mode}
    config = learner_config(tiny_model, loss_agg_mode="seq-mean-token-mean", **keys)
    by_row = replace(config, actor=config.actor.model_copy(update={"ppo_micro_batch_size_per_gpu": 1}))
    silent = replace_row(session, response_mask=[0, 0, 0])

    whole = gradients(config, [session, other])

    torch.testing.assert_close(whole, gradients(by_row, [session, other]), rtol=0, atol=1e-12)
    # A row without a token of the model changes nothing, and one with tokens does.
    alone = gradients(config, [session.model_copy(update={"further_rows": []}), other])
    torch.testing.assert_close(gradients(config, [silent, other]), alone, rtol=0, atol=1e-12)
    assert max(float((a - b).abs().max()) for a, b in zip(whole, alone, strict=True)) > 1e-4


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_guided_row_leaves_the_correction_as_it_is(
    tiny_model: Path, session: Trajectory, other: Trajectory, level: str
) -> None:
    keys = {"rollout_is": level, "rollout_is_batch_normalize": True, "rollout_rs": "seq_mean_k1"}
    config = learner_config(
        tiny_model, **{"dtype": "float64", "bypass_mode": False, "rollout_rs_threshold": "1e-9_1e9", **keys}
    )
    alone = session.model_copy(update={"further_rows": []})
    guided = replace_row(session, response_mask=[0, 0, 0])

    expected = Learner(config).update([alone, other]).metrics
    found = Learner(config).update([guided, other]).metrics

    names = {name for name in expected if name.startswith(("rollout_corr/", "actor/"))}
    assert len(names) > 30
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-9)


def test_the_mean_of_a_session_is_over_the_tokens_of_all_its_rows(
    tiny_model: Path, rollout: Rollout, session: Trajectory, other: Trajectory
) -> None:
    def config(mode: str) -> LearnerConfig:
        made = learner_config(tiny_model, dtype="float64", clip_grad=1e9, loss_agg_mode=mode)
        algorithm = made.algorithm.model_copy(update={"norm_adv_by_std_in_grpo": False})
        return replace(made, algorithm=algorithm)

    # The advantage of a group of one is its score.
    rows = [rollout(score=0.5), rollout(score=0.5, **SECOND_ROW.model_dump())]
    last = other.model_copy(update={"reward": rollout(score=-0.5).reward})
    first, second, third = (gradients(config("token-sum"), [row]) for row in [*rows, last])

    whole = gradients(config("seq-mean-token-mean"), [session, other])

    expected = [((a + b) / (4 + 2) + c / 4) / 2 for a, b, c in zip(first, second, third, strict=True)]
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-6)  # the model's norms compute in float32


def replace_row(session: Trajectory, **changes: object) -> Trajectory:
    """The session with another second row."""
    return session.model_copy(update={"further_rows": [SECOND_ROW.model_copy(update=changes)]})


def test_scores_count_sessions_and_lengths_count_rows(tiny_model: Path, session: Trajectory, other: Trajectory) -> None:
    result = Learner(learner_config(tiny_model)).update([session, other])

    assert result.advantages == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert result.metrics["critic/score/mean"] == 0.5
    assert result.metrics["training/trajectories"] == 2
    assert result.metrics["training/trained_tokens"] == 4 + 2 + 4
    assert result.metrics["response_length/mean"] == (6 + 3 + 6) / 3


def test_the_rows_of_a_session_are_in_one_mini_batch(tiny_model: Path, session: Trajectory, other: Trajectory) -> None:
    seen: list[list[str]] = []

    @contextmanager
    def observe(used: Sequence[Trajectory]) -> Iterator[Callable[[dict[str, float]], None]]:
        seen.append([trajectory.id for trajectory in used])
        yield lambda metrics: None

    Learner(learner_config(tiny_model, ppo_mini_batch_size=1, shuffle=False)).update([session, other], observe=observe)

    assert seen == [[session.id], [other.id]]


def test_a_session_is_as_stale_as_the_oldest_token_of_its_rows(session: Trajectory) -> None:
    assert train_status(session, 5, max_staleness=3) is TrainStatus.USED
    assert train_status(session, 6, max_staleness=3) is TrainStatus.STALE


def test_a_session_trains_if_only_a_further_row_has_a_token_of_the_model(session: Trajectory) -> None:
    silent = session.model_copy(update={"response_mask": [0] * 6})

    assert train_status(silent, 5, max_staleness=None) is TrainStatus.USED


def test_a_resumed_run_counts_the_versions_of_all_rows(session: Trajectory) -> None:
    versions = WeightVersions(newest=9, republications=(Republication(saved=4, version=9),))

    [row] = versions.renumbered(session).further_rows

    assert [span.version for span in row.weight_versions] == [7, 5]


def test_the_rows_are_dumped_and_read_back(session: Trajectory, tmp_path: Path) -> None:
    write_trajectories(tmp_path / "step_1.parquet", [session])

    assert read_trajectories(tmp_path / "step_1.parquet") == [session]
