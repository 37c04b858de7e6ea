"""The byte budget: a table of decisions, simulated days, and the ledger that runs share."""

import fcntl
import random
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from trackway.trainer.traces import run as budget_module
from trackway.trainer.traces.run import DailyTraceBytes, TraceBudget, affordable

pytestmark = pytest.mark.slow

DAY = date(2026, 11, 21)


@pytest.mark.parametrize(
    ("wanted", "left", "bytes_each", "expected"),
    [
        (8, 1_000_000, 0.0, 1),
        (8, 1, 0.0, 1),
        (0, 1_000_000, 0.0, 0),
        (8, 1_000_000, 10_000.0, 5),
        (8, 1_000_000, 1_000.0, 8),
        (8, 199_999, 10_000.0, 0),
        (8, 200_000, 10_000.0, 1),
        (8, 0, 10_000.0, 0),
        (8, -5, 0.0, 0),
    ],
)
def test_a_step_may_use_a_twentieth_of_what_is_left(wanted: int, left: int, bytes_each: float, expected: int):
    assert affordable(wanted, left, bytes_each) == expected


def budget(folder: Path, bytes_per_day: int | None, today: Callable[[], date] = lambda: DAY) -> TraceBudget:
    return TraceBudget(DailyTraceBytes(folder / "trace_bytes.json", today), bytes_per_day)


@pytest.mark.parametrize("seed", range(20))
def test_a_day_never_exceeds_its_budget_by_more_than_one_steps_error(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    per_day, rollouts = draw.randint(100_000, 30_000_000), draw.randint(1, 16)
    made = budget(tmp_path, per_day)
    worst_error, traced = 0.0, []
    for _ in range(600):
        prompts = made.prompts(8, rollouts)
        estimate = made.bytes / made.trajectories * rollouts * prompts if made.trajectories else 0.0
        size = sum(draw.randint(1_000, 60_000) for _ in range(prompts * rollouts))
        made.spend(size, prompts * rollouts)
        worst_error = max(worst_error, size - estimate)
        traced.append(prompts)

    assert made.bytes <= per_day + worst_error
    assert (traced[0], traced[-1]) == (1, 0)


def test_sampling_sinks_step_by_step_and_does_not_stop_at_once(tmp_path: Path):
    made = budget(tmp_path, 1_000_000)
    traced = []
    for _ in range(60):
        traced.append(made.prompts(8, 2))
        made.spend(traced[-1] * 10_000, traced[-1] * 2)

    assert traced[:4] == [1, 4, 4, 4]
    assert sorted(traced[1:], reverse=True) == traced[1:]
    assert set(traced) == {0, 1, 2, 3, 4}
    assert made.bytes == 810_000


def test_without_a_bound_everything_wanted_is_traced_and_still_counted(tmp_path: Path):
    made = budget(tmp_path, None)

    assert made.prompts(256, 16) == 256
    made.spend(70, 2)
    made.spend(5)

    assert made.take() == {"trace/prompts_traced": 256.0, "trace/bytes": 75.0, "trace/bytes_today": 75.0}
    assert (made.trajectories, made.bytes, made.take()) == (2, 75, {})


def test_runs_share_the_day_and_a_new_day_begins_at_zero(tmp_path: Path):
    days = [DAY]
    first, second = (budget(tmp_path, 1000, lambda: days[0]) for _ in range(2))

    first.spend(700, 1)
    second.spend(300, 1)
    exhausted = second.prompts(8, 1)
    days[0] = date(2026, 11, 22)

    assert (exhausted, second.take()["trace/bytes_today"]) == (0, 1000.0)
    assert first.prompts(8, 1) == 0  # a twentieth of the day is less than the 700 bytes that one cost
    assert budget(tmp_path, 1000, lambda: days[0]).prompts(8, 1) == 1
    assert DailyTraceBytes(tmp_path / "trace_bytes.json", lambda: days[0]).add(5) == 5


def test_lowered_sampling_is_told_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "trackway.trainer")
    made = budget(tmp_path, 1_000_000)

    for _ in range(3):
        made.prompts(8, 1)
    made.spend(25_000, 1)
    made.prompts(1, 1)

    told = [record.getMessage() for record in caplog.records]
    assert told == ["trackway.trace_bytes_per_day=1000000: 1 of 8 prompts are traced, with 0 bytes used today"]


@pytest.mark.parametrize("content", ["", "{broken", '{"day": 3}'])
def test_a_ledger_that_cannot_be_read_begins_at_zero(tmp_path: Path, content: str):
    (tmp_path / "trace_bytes.json").write_text(content)

    assert DailyTraceBytes(tmp_path / "trace_bytes.json", lambda: DAY).add(7) == 7


def test_a_ledger_that_stays_locked_costs_a_bounded_wait_and_nothing_else(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(budget_module, "LOCK_DEADLINE_S", 0.05)
    made = budget(tmp_path, 1_000_000)
    with (tmp_path / "trace_bytes.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        made.spend(40, 1)

    assert (made.bytes, made.take()["trace/bytes_today"]) == (40, 40.0)
