"""The slopes of a long run's readings."""

import math

import pytest
from benchmarks.endurance import slope_of


def test_the_slope_of_a_straight_line_has_no_error():
    slope = slope_of([10, 20, 30, 40], [5.0, 5.5, 6.0, 6.5])

    assert (slope.start, slope.per_thousand) == (pytest.approx(5.0), pytest.approx(50.0))
    assert slope.half_width == pytest.approx(0.0, abs=1e-9)


def test_the_interval_is_that_of_the_differences_to_the_line():
    slope = slope_of([0, 1, 2], [0.0, 3.0, 0.0])  # the line is 1; the differences are -1, 2 and -1

    assert (slope.start, slope.per_thousand) == (pytest.approx(1.0), pytest.approx(0.0))
    assert slope.half_width == pytest.approx(1960 * math.sqrt(6 / 1 / 2))
