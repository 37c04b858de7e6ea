"""When a delivery is advanced, and when its thread ends."""

import threading
import time
from pathlib import Path

import pytest

from tests.waiting import until
from trackway.system.waits import Backoff
from trackway.trainer.delivery import jobs
from trackway.trainer.delivery.jobs import DeliveryThread, Later, only_sender
from trackway.wire.trainer import BackendSummary


class Counted:
    """What waits is a number of parts; while it is away none is taken."""

    name = "counted"

    def __init__(self, parts: int, away: bool = False) -> None:
        self.parts, self.away = parts, away
        self.tries: list[float] = []
        self.is_closed = threading.Event()

    def advance(self) -> bool:
        self.tries.append(time.monotonic())
        if self.away:
            raise Later("away")
        if self.parts:
            self.parts -= 1
            return True
        return False

    def summary(self) -> BackendSummary:
        return BackendSummary(backend=self.name, rows_waiting=self.parts)

    def close(self) -> None:
        self.is_closed.set()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BACKOFF", Backoff(0.05, 0.4, spread=(1.0, 1.0)))
    monkeypatch.setattr(jobs, "CLOSING_RETRY_S", 0.3)


def test_what_waits_is_sent_at_once_and_what_is_new_when_it_is_said():
    counted = Counted(3)
    thread = DeliveryThread(counted)
    until(lambda: counted.parts == 0)
    counted.parts = 2
    thread.wake()
    until(lambda: counted.parts == 0)
    thread.close(10)

    assert counted.is_closed.wait(60)


def test_a_backend_that_is_away_is_asked_again_after_growing_pauses_and_told_once(caplog):
    counted = Counted(1, away=True)
    thread = DeliveryThread(counted)
    assert thread.wait_for_first_attempt(10)
    until(lambda: len(counted.tries) == 6)
    counted.away = False
    until(lambda: counted.parts == 0)
    thread.close(10)

    pauses = [later - earlier for earlier, later in zip(counted.tries, counted.tries[1:], strict=False)][:5]
    assert all(pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.2, 0.4, 0.4), strict=True))
    assert [record.getMessage() for record in caplog.records] == [
        "counted: its data is kept on disk: away",
        "counted: available again, sending continues",
    ]


def test_a_backend_that_is_away_does_not_hold_up_the_end():
    counted = Counted(1, away=True)
    thread = DeliveryThread(counted)
    started = time.monotonic()
    thread.close(200)

    assert time.monotonic() - started < 60
    assert counted.is_closed.wait(60) and counted.parts == 1


def test_close_sends_what_waits_first():
    counted = Counted(0)
    thread = DeliveryThread(counted)
    assert thread.wait_for_first_attempt(10)
    counted.parts = 50
    thread.close(10)

    assert counted.parts == 0


def test_whatever_an_advance_raises_is_trouble_and_not_the_end(caplog):
    class Broken(Counted):
        def advance(self) -> bool:
            if len(self.tries) < 1:
                self.tries.append(0.0)
                raise ZeroDivisionError("oops")
            return super().advance()

    counted = Broken(2)
    thread = DeliveryThread(counted)
    until(lambda: counted.parts == 0)
    thread.close(10)

    assert "counted: its data is kept on disk: ZeroDivisionError: oops" in caplog.text


def test_one_process_sends_at_a_time(tmp_path: Path):
    lock = tmp_path / "tracking" / "x.lock"
    with only_sender(lock), pytest.raises(Later), only_sender(lock):
        pass
    with only_sender(lock):
        pass


def test_the_lock_of_a_run_that_was_removed_does_not_make_its_folder_again(tmp_path: Path):
    with pytest.raises(FileNotFoundError), only_sender(tmp_path / "run" / "tracking" / "x.lock"):
        pass
    assert not (tmp_path / "run").exists()
