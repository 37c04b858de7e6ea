"""Pauses between tries: the service's word, and ours where it gave none."""

import httpx
import pytest
from tenacity import AsyncRetrying, RetryCallState

from trackway.clients.http_client import WholeResponse
from trackway.clients.retry import ForeignServerError, RetryState, error_of, retry_after_of
from trackway.wire.errors import ErrorCode, TrackwayError


def after(error: Exception, tries: int = 1, upcoming_s: float = 0.0, elapsed_s: float = 0.0) -> RetryCallState:
    """The state of a call whose last try raised this, so long after its start."""
    state = RetryCallState(AsyncRetrying(), None, (), {})
    state.set_exception((type(error), error, None))
    state.attempt_number, state.upcoming_sleep = tries, upcoming_s
    state.start_time, state.outcome_timestamp = 0.0, elapsed_s
    return state


def pauses(error: Exception, tries: int = 1) -> tuple[float, float]:
    """The shortest and the longest of many."""
    retry_state = RetryState(attempts=5, backoff_s=0.2, max_backoff_s=5.0, deadline_s=100.0)
    found = [retry_state.wait(after(error, tries)) for _ in range(3000)]
    return min(found), max(found)


@pytest.mark.parametrize(
    ("asked_s", "shortest", "longest"), [(4.0, 4.0, 6.0), (0, 0.2, 0.3)], ids=["four seconds", "at once"]
)
def test_a_pause_is_as_long_as_asked_for_and_up_to_half_as_long_again(
    asked_s: float, shortest: float, longest: float
) -> None:
    found = pauses(TrackwayError(ErrorCode.OVERLOADED, "full", retry_after_s=asked_s), tries=9)
    assert found == (pytest.approx(shortest, rel=0.01), pytest.approx(longest, rel=0.01))
    assert found[0] >= shortest


def test_without_a_word_of_the_service_pauses_grow_up_to_a_bound() -> None:
    full = TrackwayError(ErrorCode.OVERLOADED, "full")
    assert pauses(full, tries=1)[1] == pytest.approx(0.2, rel=0.01)
    assert pauses(full, tries=3)[1] == pytest.approx(0.8, rel=0.01)
    assert pauses(full, tries=99)[1] == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize(
    ("elapsed_s", "pause_s", "ends"),
    [(0.0, 8.9, False), (0.0, 9.0, True), (0.0, 10.5, True), (4.0, 4.9, False), (4.0, 5.0, True)],
)
def test_a_call_that_is_put_off_ends_when_its_next_try_would_come_too_late(
    elapsed_s: float, pause_s: float, ends: bool
) -> None:
    retry_state = RetryState(attempts=1, backoff_s=0.2, max_backoff_s=5.0, deadline_s=10.0)
    full = TrackwayError(ErrorCode.OVERLOADED, "full")
    assert retry_state.stop(after(full, upcoming_s=pause_s, elapsed_s=elapsed_s)) is ends


@pytest.mark.parametrize(("pause_s", "ends"), [(1.59, False), (1.6, True)])
def test_a_short_call_leaves_its_next_try_a_fifth_of_its_time(pause_s: float, ends: bool) -> None:
    retry_state = RetryState(attempts=1, backoff_s=0.2, max_backoff_s=5.0, deadline_s=2.0)
    full = TrackwayError(ErrorCode.OVERLOADED, "full")
    assert retry_state.stop(after(full, upcoming_s=pause_s)) is ends


def test_a_call_that_fails_ends_with_its_last_try() -> None:
    retry_state = RetryState(attempts=3, backoff_s=0.2, max_backoff_s=5.0, deadline_s=10.0)
    assert [retry_state.stop(after(httpx.ConnectError("refused"), tries=number)) for number in (1, 2, 3)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "unreached",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("silence"),
        ForeignServerError(404, "no route"),
        ForeignServerError(503, "none"),
    ],
)
def test_tries_that_reach_no_service_count_once_the_outage_is_longer_than_the_policy_waits(unreached) -> None:
    retry_state = RetryState(attempts=2, backoff_s=0.2, max_backoff_s=5.0, deadline_s=300.0, outage_s=60.0)

    stops = [retry_state.stop(after(unreached, elapsed_s=seconds)) for seconds in (1.0, 30.0, 60.9, 61.0, 66.0)]

    assert stops == [False, False, False, False, True]


def test_an_outage_may_begin_with_the_call() -> None:
    retry_state = RetryState(attempts=1, backoff_s=0.2, max_backoff_s=5.0, deadline_s=300.0, outage_s=60.0)
    away = httpx.ConnectError("refused")
    assert [retry_state.stop(after(away, elapsed_s=seconds)) for seconds in (0.0, 59.5, 60.5)] == [False, False, True]


def test_each_outage_of_a_call_is_waited_for_and_other_failures_count() -> None:
    retry_state = RetryState(attempts=2, backoff_s=0.2, max_backoff_s=5.0, deadline_s=300.0, outage_s=60.0)
    away, broken = httpx.ConnectError("refused"), httpx.ReadError("reset")

    failures = [(away, 1.0), (away, 59.0), (broken, 62.0), (away, 63.0), (away, 120.0), (broken, 121.0)]
    stops = [retry_state.stop(after(error, elapsed_s=seconds)) for error, seconds in failures]

    assert stops == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0", 0.0), ("", None), ("-1", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("1" * 400, None)],
)
def test_the_header_of_somebody_elses_answer_is_read(header: str, seconds: float | None) -> None:
    error = error_of(WholeResponse("GET", "http://service/", 429, {"retry-after": header}, b"slow down"))
    assert isinstance(error, ForeignServerError)
    assert retry_after_of(error) == seconds


@pytest.mark.parametrize("detail", ["soon", float("inf"), float("nan"), -1, None])
def test_a_detail_that_is_no_time_is_no_word(detail: object) -> None:
    error = TrackwayError(ErrorCode.OVERLOADED, "full", retry_after_s=detail)  # pyright: ignore[reportArgumentType]
    assert retry_after_of(error) is None
