"""The summary of an evaluation by value."""

import itertools
import random

import pytest

from tests.services.evaluation.rollouts import LOST, rollout
from trackway.evaluation.summary import by_data_source, summary, task_rows
from trackway.wire.trajectory import Reward, StopReason


def test_every_k_is_the_mean_over_rows_of_all_choices_of_k_rollouts():
    generator = random.Random(3)
    scores = [[float(generator.random() < row / 6) for _ in range(5)] for row in range(6)]

    found = summary(
        [rollout(row, number, score) for row, each in enumerate(scores) for number, score in enumerate(each)]
    )

    assert [*found.pass_at] == [*found.pass_all] == [*found.best_at] == [1, 2, 4, 5]
    for k in found.pass_at:
        chosen = [[*itertools.combinations(each, k)] for each in scores]
        drawn = [[*itertools.product(each, repeat=k)] for each in scores]
        assert found.pass_at[k].value == pytest.approx(_mean(_mean(map(max, each)) for each in chosen), abs=1e-12)
        assert found.pass_all[k].value == pytest.approx(_mean(_mean(map(min, each)) for each in chosen), abs=1e-12)
        assert found.best_at[k].value == pytest.approx(_mean(_mean(map(max, each)) for each in drawn), abs=1e-12)
    assert found.pass_at[1].value == pytest.approx(_mean(map(_mean, scores)), abs=1e-12)
    assert (found.tasks, found.rollouts, found.failed) == (6, 30, 0)


def test_rollouts_that_infrastructure_ended_leave_n_and_are_counted_apart():
    rollouts = [rollout(0, 0, 1.0), rollout(0, 1, None), rollout(1, 0, 0.0), rollout(1, 1, 0.0), rollout(2, 0, None)]

    found = summary(rollouts)

    assert (found.tasks, found.rollouts, found.failed, found.errors) == (3, 3, 2, {LOST.code.value: 2})
    assert found.score is not None and (found.score.value, found.score.tasks) == (0.5, 2)
    assert (found.pass_at[1].value, found.pass_at[2].value, found.pass_at[2].tasks) == (0.5, 0.0, 1)


def test_a_rollout_passes_with_a_score_over_the_bound_and_acc_is_the_score_that_counts():
    graded = [rollout(0, 0, 0.5), rollout(0, 1, 0.9)]
    accurate = rollout(1, 0, 5.0, reward=Reward(score=5.0, components={"acc": 0.0}))

    assert summary(graded, pass_above=0.5).pass_at[1].value == 0.5
    assert summary([accurate]).pass_at[1].value == 0.0


def test_votes_are_counted_where_the_scorer_names_answers():
    answers = [("18", 1.0), ("18", 1.0), ("7", 0.0), (None, 0.0)]

    found = summary([rollout(0, number, score, answer) for number, (answer, score) in enumerate(answers)])

    assert (found.majority_at[4].value, found.no_answer) == (1.0, 0.25)
    assert found.majority_at[2].value == pytest.approx((1 + 2 * 0.5 + 2 + 0) / 6)  # of six pairs
    assert summary([rollout(0, 0, 1.0)]).majority_at == {}


def test_lengths_turns_calls_and_limits_are_means_over_rollouts():
    found = summary([rollout(0, 0, 1.0), rollout(0, 1, 0.0, turns=[], stop_reason=StopReason.MAX_RESPONSE)])

    assert (found.response_tokens, found.tokens, found.cut) == (2.0, 8, 0.5)
    assert (found.turns, found.tool_calls, found.failed_calls) == (0.5, 1.0, 0.5)


def test_each_row_has_its_numbers():
    answers = [("18", 1.0), ("18", 1.0), ("7", 0.0)]
    rollouts = [rollout(0, number, score, answer) for number, (answer, score) in enumerate(answers)]

    first, lost = task_rows([*rollouts, rollout(0, 3, None), rollout(1, 0, None, data_source="other")])

    assert first == {
        "sample_index": 0,
        "data_source": "d",
        "n": 3,
        "c": 2,
        "failed": 1,
        "score": pytest.approx(2 / 3),
        "pass@1": pytest.approx(2 / 3),
        "pass@2": 1.0,
        "pass@3": 1.0,
        "pass_all@1": pytest.approx(2 / 3),
        "pass_all@2": pytest.approx(1 / 3),
        "pass_all@3": 0.0,
        "best@1": pytest.approx(2 / 3),
        "best@2": pytest.approx(1 - (1 / 3) ** 2),
        "best@3": pytest.approx(1 - (1 / 3) ** 3),
        "majority@1": pytest.approx(2 / 3),
        "majority@2": pytest.approx((1 + 0.5 + 0.5) / 3),
        "majority@3": 1.0,
        "no_answer": 0.0,
        "response_tokens": 2.0,
        "turns": 1.0,
        "tool_calls": 2.0,
        "failed_calls": 1.0,
        "cut": 0.0,
        "tokens": 12,
    }
    assert (lost["sample_index"], lost["data_source"], lost["n"], lost["c"], lost["failed"]) == (1, "other", 0, 0, 1)
    assert "score" not in lost


def test_data_sources_are_summed_up_alone():
    found = by_data_source([rollout(0, 0, 1.0), rollout(1, 0, 0.0, data_source="other")])

    assert {name: one.pass_at[1].value for name, one in found.items()} == {"d": 1.0, "other": 0.0}


def test_when_all_failed_there_is_no_score():
    found = summary([rollout(0, 0, None)])

    assert (found.score, found.pass_at, found.failed) == (None, {}, 1)


def _mean(values) -> float:
    listed = [*values]
    return sum(listed) / len(listed)
