"""The learning rate of each update, worked out by hand."""

import math

import pytest

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.optimizer import learning_rate


def rates(count: int, **given: object) -> list[float]:
    config = learner_config("m", lr=8.0, **given)
    return [learning_rate(config.actor.optim, config.total_steps, update) for update in range(count)]


def test_the_rate_climbs_in_equal_steps_and_then_stays() -> None:
    assert rates(6, lr_warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_a_warm_up_by_ratio_is_that_part_of_all_steps_unless_steps_are_given() -> None:
    assert rates(6, lr_warmup_steps_ratio=0.5, total_steps=9) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates(3, lr_warmup_steps_ratio=0.5, lr_warmup_steps=2, total_steps=9) == [4.0, 8.0, 8.0]


def test_without_a_warm_up_the_first_update_has_the_full_rate() -> None:
    assert rates(2) == [8.0, 8.0]


def test_a_cosine_falls_from_the_full_rate_to_its_floor_after_the_last_update() -> None:
    falling = rates(7, lr_warmup_steps=2, lr_scheduler_type="cosine", total_steps=6, min_lr_ratio=0.25)
    quarter = math.sqrt(0.5)  # cos(pi / 4)
    expected = [4.0, 8.0, 8.0, 2 + 6 * (1 + quarter) / 2, 5.0, 2 + 6 * (1 - quarter) / 2, 2.0]
    assert falling == pytest.approx(expected, abs=1e-12)


def test_a_cosine_of_a_whole_wave_rises_again() -> None:
    wave = rates(5, lr_scheduler_type="cosine", total_steps=4, min_lr_ratio=0.5, num_cycles=1.0)

    assert wave == pytest.approx([8.0, 6.0, 4.0, 6.0, 8.0], abs=1e-12)


def test_a_cosine_that_counts_from_one_reaches_its_floor_in_the_last_update() -> None:
    falling = rates(2, lr_scheduler_type="cosine", total_steps=2, min_lr_ratio=0.5, zero_indexed_step=False)

    assert falling == pytest.approx([6.0, 4.0], abs=1e-12)
