"""What a run's process waits for, named while it lasts and in its folder once it has lasted, and its rollouts."""

import pytest

from tests.waiting import async_until
from trackway.system.waits import MOST, Waits
from trackway.trainer import worker as module
from trackway.trainer.run_state.folder import Activity, RunFolder
from trackway.trainer.worker import reported
from trackway.wire.service import Wait

pytestmark = pytest.mark.anyio


class Time:
    """A clock that stands until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def test_a_wait_is_named_while_it_lasts_with_what_causes_it(time: Time):
    run, groups = Waits(time), Waits(time)
    with run("the run", "the rollouts of step 1") as waiting:
        waiting.progress, waiting.because = lambda: "0 of 2 groups have finished", groups.current
        time.now += 0.5
        with groups("group 1/7", "the agent service", timeout_s=60.0):
            during = run.current()

    assert during == [
        Wait(
            who="the run",
            waits_for="the rollouts of step 1",
            since=100_000,
            progress="0 of 2 groups have finished",
            because=[Wait(who="group 1/7", waits_for="the agent service", since=100_500, until=160_500)],
        )
    ]
    assert run.current() == groups.current() == []


def test_the_longest_waits_are_listed_below_another_first(time: Time):
    run = Waits(time)
    causes = [Wait(who=f"group {number}", waits_for="it", since=number) for number in range(2 * MOST)]
    with run("the run", "groups") as waiting:
        waiting.because = lambda: causes[::-1]
        [wait] = run.current()

    assert wait.because == causes[:MOST]


def test_short_waits_are_left_out(time: Time):
    run = Waits(time)
    with run("the run", "one"):
        time.now += 2.0
        with run("the run", "another"):
            assert [wait.waits_for for wait in run.current(patience_s=2.0)] == ["one"]


async def test_the_folder_has_the_waits_that_last_and_none_once_the_run_has_ended(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, time: Time
):
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.01)
    run = Waits(time)

    async def written(count: int) -> list[Wait]:
        await async_until(lambda: len(folder.activity().waits) == count)
        return folder.activity().waits

    async with reported(folder) as report:
        report.waits = run
        with run("the run", "the update of step 1"):
            before = folder.activity().waits
            time.now += 60.0
            lasting = await written(1)
        await written(0)
        with run("the run", "the update of step 2"):
            time.now += 60.0
            await written(1)

    assert (before, folder.activity().waits) == ([], [])
    assert [(wait.waits_for, wait.since) for wait in lasting] == [("the update of step 1", 100_000)]


async def test_the_folder_has_the_rollouts_by_state_and_keeps_them_when_the_run_has_ended(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.01)
    account = {"submitted": 4, "running": 4}

    async with reported(folder) as report:
        report.account = account.copy
        await async_until(lambda: folder.activity().rollouts)
        during = folder.activity().rollouts
        account |= {"running": 0, "cancelled": 4}

    assert during == {"submitted": 4, "running": 4}
    assert folder.activity() == Activity(rollouts={"submitted": 4, "running": 0, "cancelled": 4})


def test_a_damaged_file_names_no_wait_and_no_rollout(folder: RunFolder):
    (folder.path / "activity.json").write_text("[{")

    assert folder.activity() == Activity()
