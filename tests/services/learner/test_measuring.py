"""Seconds of activities and of idleness, on a clock that the test sets."""

import pytest

from trackway.learner.measuring import ActiveTime, Clock


class Time:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


def idle(active: float, elapsed: float, ratio: float) -> dict[str, float]:
    return {
        "fully_async/rollouter/active_time": active,
        "fully_async/rollouter/version_time": elapsed,
        "fully_async/rollouter/idle_ratio": ratio,
    }


def test_the_parts_of_an_activity_are_activities_of_their_own(time: Time):
    clock = Clock(time)
    with clock("update_actor"):
        time.passes(3.0)
    clock.split("update_actor", {"values": 0.5, "update_critic": 1.0})
    clock.split("update_actor", {})

    assert clock.take() == {"timing_s/update_actor": 1.5, "timing_s/values": 0.5, "timing_s/update_critic": 1.0}
    assert clock.take() == {}


def test_the_clock_adds_up_one_activity_and_forgets_what_was_taken(time: Time):
    clock = Clock(time)
    with clock("gen"):
        time.passes(2.0)
    with clock("gen"), clock("step"):
        time.passes(0.5)

    assert clock.take() == {"timing_s/gen": 2.5, "timing_s/step": 0.5}
    assert clock.take() == {}


def test_a_block_that_fails_is_timed_too(time: Time):
    clock, active = Clock(time), ActiveTime(time)
    with pytest.raises(OSError), clock("gen"), active():
        time.passes(2.0)
        raise OSError

    time.passes(6.0)
    assert (clock.take(), active.take()) == ({"timing_s/gen": 2.0}, idle(2.0, 8.0, 0.75))


def test_time_in_overlapping_blocks_counts_once(time: Time):
    active = ActiveTime(time)
    time.passes(1.0)
    with active():
        time.passes(2.0)
        with active():
            time.passes(4.0)
        time.passes(1.0)
    time.passes(6.0)

    assert active.take() == idle(7.0, 14.0, 0.5)
    assert active.take() == idle(0.0, 0.0, 0.0)


def test_a_block_that_goes_on_counts_on_both_sides_of_a_take(time: Time):
    active = ActiveTime(time)
    with active():
        time.passes(3.0)
        first = active.take()
        time.passes(1.0)
    time.passes(3.0)

    assert (first, active.take()) == (idle(3.0, 3.0, 0.0), idle(1.0, 4.0, 0.75))
