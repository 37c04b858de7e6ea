"""Those turned away are told to come back one after the other, at the pace at which places come free."""

import pytest

from trackway.rollout.engines.admission import RetryAfterEstimator


def test_each_is_told_one_pace_later_than_the_one_before() -> None:
    places = RetryAfterEstimator(slots=4, stay_s=8.0)
    assert [places.turn_away(waiting=2, now=100.0) for _ in range(3)] == [2.0, 4.0, 6.0]
    assert places.turn_away(waiting=2, now=110.0) == 2.0


def test_nobody_is_sent_away_for_more_than_a_minute() -> None:
    places = RetryAfterEstimator(slots=1, stay_s=50.0)
    assert [places.turn_away(waiting=0, now=0.0) for _ in range(3)] == [50.0, 60.0, 60.0]


@pytest.mark.parametrize(("stay_s", "in_flight"), [(18.0, 0), (18.0, 4), (72.0, 16)], ids=["slot", "no queue", "queue"])
def test_a_stay_with_time_in_the_queue_counts_as_its_time_in_a_slot(stay_s: float, in_flight: int) -> None:
    places = RetryAfterEstimator(slots=4, stay_s=8.0)
    places.left(stay_s, in_flight)
    assert places.turn_away(waiting=0, now=0.0) == pytest.approx(9.0 / 4)
