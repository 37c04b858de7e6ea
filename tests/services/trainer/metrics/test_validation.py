"""Validation metrics by value: verl's names, its split into core and the rest, its best and worst of k."""

import math

import pytest

from trackway.evaluation.summary import summary
from trackway.trainer.metrics import validation_metrics
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory

GSM8K = "openai/gsm8k"
BROKEN = ErrorBody(code=ErrorCode.INTERNAL, message="m", retryable=False)


def trajectory(
    score: float, row: int = 0, source: str = GSM8K, components: dict[str, float] | None = None, **changes: object
) -> Trajectory:
    values = {
        "id": "i",
        "session_id": "s",
        "tags": Tags(experiment_name="e", step=1, sample_index=row, rollout_n=0),
        "agent_name": "a",
        "data_source": source,
        "reward": Reward(score=score, components=components or {}),
        "num_turns": 4,
        "stop_reason": StopReason.ANSWERED,
    }
    return Trajectory.model_validate({**values, **changes})


def test_one_rollout_of_each_row_gives_means_by_data_source_without_the_failed():
    rows = [trajectory(1.0), trajectory(0.0), trajectory(0.0, error=BROKEN), trajectory(0.5, 0, "other", {"acc": 1.0})]

    assert validation_metrics(rows, n=1) == {
        "val-core/openai/gsm8k/acc/mean@1": 0.5,
        "val-core/openai/gsm8k/reward/mean@1": 0.5,
        "val-aux/openai/gsm8k/reward/mean@1": 0.5,
        "val-core/other/acc/mean@1": 1.0,
        "val-core/other/reward/mean@1": 0.5,
        "val-aux/other/reward/mean@1": 0.5,
        "val-aux/num_turns/mean": 4.0,
        "val-aux/num_turns/max": 4.0,
        "val-aux/num_turns/min": 4.0,
        "val-aux/failed_trajectories": 1.0,
    }


def test_a_rewards_other_components_have_names_of_their_own_and_those_of_tools_do_not():
    metrics = validation_metrics([trajectory(0.0, components={"format": 0.25, "tool/search": 1.0})], n=1)

    assert metrics["val-aux/openai/gsm8k/format/mean@1"] == 0.25
    assert not any("tool/search" in name for name in metrics)


def test_several_rollouts_give_the_expected_best_and_worst_of_k_averaged_over_rows():
    """Row 0 has scores 0 0 0 1, row 1 has 1 1 1 1: the best of 2 of row 0 is 1 with 1 - (3/4)^2 = 7/16."""
    rows = [*(trajectory(float(place == 3), 0) for place in range(4)), *(trajectory(1.0, 1) for _ in range(4))]

    metrics = validation_metrics(rows, n=4)

    core = {name: value for name, value in metrics.items() if name.startswith("val-core/openai/gsm8k/acc")}
    best_of_4 = 1 - (3 / 4) ** 4
    assert core == {
        "val-core/openai/gsm8k/acc/mean@4": 0.625,
        "val-core/openai/gsm8k/acc/best@4/mean": pytest.approx((best_of_4 + 1) / 2),
        "val-core/openai/gsm8k/acc/best@4/std": pytest.approx((best_of_4 * (1 - best_of_4)) ** 0.5 / 2),
    }
    aux = "val-aux/openai/gsm8k/acc"
    assert metrics[f"{aux}/std@4"] == pytest.approx((3 / 16) ** 0.5 / 2)
    assert metrics[f"{aux}/best@2/mean"] == pytest.approx((7 / 16 + 1) / 2)
    assert metrics[f"{aux}/worst@2/mean"] == pytest.approx((1 / 16 + 1) / 2)
    assert metrics[f"{aux}/worst@4/mean"] == pytest.approx((1 / 256 + 1) / 2)
    assert (metrics[f"{aux}/pass@2"], metrics[f"{aux}/pass@4"]) == (pytest.approx((3 / 6 + 1) / 2), 1.0)
    assert (metrics[f"{aux}/pass_all@2"], metrics[f"{aux}/pass_all@4"]) == (0.5, 0.5)
    assert not any("majority" in name for name in metrics)


def test_a_validation_reports_the_rates_of_an_evaluation_with_their_errors():
    answers = [("a", 1.0), ("a", 1.0), ("b", 0.0), (None, 0.0)], [("c", 0.0), ("c", 0.0), ("c", 0.0), ("d", 1.0)]
    rollouts = [
        trajectory(score, row, reward=Reward(score=score, answer=answer))
        for row, each in enumerate(answers)
        for answer, score in each
    ]

    metrics = validation_metrics(rollouts, n=4)
    evaluated = summary(rollouts)

    aux = f"val-aux/{GSM8K}/acc"
    for k in (2, 4):
        for name, found in (
            ("pass", evaluated.pass_at),
            ("pass_all", evaluated.pass_all),
            ("majority", evaluated.majority_at),
        ):
            assert metrics[f"{aux}/{name}@{k}"] == found[k].value
            assert metrics[f"{aux}/{name}@{k}/std_err"] == found[k].std_err
    assert metrics[f"{aux}/majority@4"] == 0.5
    assert evaluated.score and metrics[f"{aux}/mean@4/std_err"] == evaluated.score.std_err == pytest.approx(0.125)
    assert len([name for name in metrics if name.startswith(f"{aux}/") and "std_err" in name]) == 1 + 3 * 2


@pytest.mark.parametrize(("n", "draws"), [(2, {2}), (3, {2, 3}), (4, {2, 4}), (5, {2, 4, 5}), (8, {2, 4, 8})])
def test_the_draws_are_powers_of_two_and_all(n: int, draws: set[int]):
    found = validation_metrics([trajectory(1.0) for _ in range(n)], n)

    assert {int(name.split("@")[1].split("/")[0]) for name in found if "worst@" in name} == draws


def test_values_whose_square_is_too_large_have_an_infinite_spread():
    """Python's ** raises OverflowError where multiplication gives infinity."""
    rollouts = [trajectory(score, components={"huge": huge}) for score, huge in ((0.0, 1e308), (1.0, -1e308))]

    metrics = validation_metrics(rollouts, 2)

    assert metrics[f"val-aux/{GSM8K}/huge/std@2"] == math.inf
    assert metrics[f"val-core/{GSM8K}/acc/mean@2"] == 0.5


def test_a_data_source_has_metrics_of_512_components():
    components = {f"c{number:05}": 1.0 for number in range(20_000)}

    metrics = validation_metrics([trajectory(1.0, components=components)], n=1)

    own = [name for name in metrics if name.startswith("val-aux/openai/gsm8k/c")]
    assert (len(own), own[-1], len(metrics)) == (512, "val-aux/openai/gsm8k/c00511/mean@1", 512 + 7)
