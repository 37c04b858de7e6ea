"""Pauses double up to the longest, each within its spread."""

import pytest

from trackway.system.waits import Backoff


def test_pauses_double_up_to_the_longest_and_there_is_none_without_a_failure() -> None:
    backoff = Backoff(0.5, 3.0, spread=(1.0, 1.0))

    assert [backoff.pause_s(failures) for failures in (0, 1, 2, 3, 4, 5000)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_pauses_are_spread_over_their_range() -> None:
    pauses = [Backoff(1.0, 8.0, spread=(0.5, 1.0)).pause_s(2) for _ in range(2000)]

    assert (min(pauses), max(pauses)) == (pytest.approx(1.0, abs=0.02), pytest.approx(2.0, abs=0.02))
    assert min(pauses) >= 1.0 and max(pauses) <= 2.0
