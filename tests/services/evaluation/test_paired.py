"""Two evaluations compared row by row."""

import math

import pytest

from tests.services.evaluation.rollouts import rollout
from trackway.evaluation.summary import paired
from trackway.wire.trajectory import Trajectory


def evaluated(*scores: tuple[float, ...]) -> list[Trajectory]:
    return [rollout(row, number, score) for row, each in enumerate(scores) for number, score in enumerate(each)]


def test_the_interval_is_of_the_rows_differences():
    found = paired(evaluated((1.0, 1.0), (1.0, 0.0), (0.0, 0.0)), evaluated((0.0, 1.0), (0.0, 0.0), (0.0, 0.0)))

    assert found is not None
    error = math.sqrt(sum((value - 1 / 3) ** 2 for value in (0.5, 0.5, 0.0)) / 2 / 3)
    assert (found.score.value, found.score.std_err) == pytest.approx((1 / 3, error))
    assert found.score.interval == pytest.approx((1 / 3 - 1.959964 * error, 1 / 3 + 1.959964 * error))
    assert (found.better, found.worse, found.left_out, found.score.tasks) == (2, 0, 0, 3)


def test_rows_difficulty_cancels_out():
    found = paired(evaluated((1.0,), (0.0,), (1.0,)), evaluated((1.0,), (0.0,), (1.0,)))

    assert found is not None and (found.score.value, found.score.std_err) == (0.0, 0.0)


def test_rows_of_one_side_other_prompts_and_failed_rows_are_left_out():
    first = [rollout(0, 0, 1.0), rollout(1, 0, 1.0), rollout(2, 0, 1.0), rollout(3, 0, None)]
    second = [rollout(0, 0, 0.0), rollout(1, 0, 0.0, prompt="another"), rollout(3, 0, 0.0)]

    found = paired(first, second)

    assert found is not None and (found.score.value, found.score.tasks, found.left_out) == (1.0, 1, 3)
    assert paired(first[:1], second[1:]) is None
