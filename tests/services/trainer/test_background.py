import itertools
import threading
import time
from collections.abc import Callable

import pytest

from trackway.trainer.background import Background, NotYet


def test_jobs_run_in_order_and_close_waits_for_them():
    done: list[int] = []
    background = Background("test")

    for number in range(20):
        background.submit(lambda number=number: done.append(number))
    background.close(10)

    assert done == list(range(20))
    assert (background.failed, background.dropped) == (0, 0)


def test_a_job_that_fails_is_counted_and_the_next_one_runs():
    done: list[str] = []
    background = Background("test")

    background.submit(lambda: 1 / 0)
    background.submit(lambda: done.append("after"))
    background.close(10)

    assert (done, background.failed) == (["after"], 1)


def test_a_job_that_is_not_possible_yet_is_tried_until_it_is():
    tries: list[int] = []

    def third_time() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise NotYet("later")

    background = Background("test")
    background.submit(third_time, patience_s=10)
    background.close(10)

    assert (len(tries), background.failed) == (3, 0)


def test_patience_ends():
    def never() -> None:
        raise NotYet("later")

    background = Background("test")
    background.submit(never, patience_s=0.0)
    background.close(10)

    assert background.failed == 1


def test_a_full_queue_drops_instead_of_blocking():
    gate = threading.Event()
    background = Background("test", capacity=1)
    background.submit(lambda: gate.wait(10))

    for _ in range(5):
        background.submit(lambda: None)
    gate.set()
    background.close(10)

    assert background.dropped >= 3


def test_close_gives_up_at_its_deadline():
    gate = threading.Event()
    background = Background("test")
    background.submit(lambda: gate.wait(10))
    background.submit(lambda: None)

    background.close(0.1)

    assert background.dropped >= 1
    gate.set()


def test_the_pauses_between_tries_grow():
    tries: list[float] = []

    def never() -> None:
        tries.append(time.monotonic())
        raise NotYet("later")

    background = Background("test")
    background.submit(never, patience_s=4.0)
    background.close(10)

    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert [round(pause, 1) for pause in pauses[:3]] == pytest.approx([0.5, 1.0, 2.0], abs=0.2)
    assert (len(tries), background.failed) == (5, 1)  # the last one when its patience ends


def test_no_more_jobs_wait_for_their_next_try_than_the_queue_holds():
    def never() -> None:
        raise NotYet("later")

    background = Background("test", capacity=2)
    for _ in range(2):
        background.submit(never, patience_s=1.0)
    wait_until(lambda: background.waiting == 2)
    background.submit(never, patience_s=1.0)
    wait_until(lambda: background.dropped == 1)
    background.close(10)

    assert (background.failed, background.dropped) == (2, 1)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)


def test_what_is_not_possible_yet_does_not_hold_up_the_end_for_long(monkeypatch):
    monkeypatch.setattr("trackway.trainer.background.CLOSING_PATIENCE_S", 0.2)

    def never() -> None:
        raise NotYet("later")

    background = Background("test")
    background.submit(never, patience_s=3600)
    started = time.monotonic()
    background.close(30)

    assert time.monotonic() - started < 5
    assert (background.failed, background.dropped) == (1, 0)
