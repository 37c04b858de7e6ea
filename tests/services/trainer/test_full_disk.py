"""Runs whose outputs lie on a disk that is full or read-only: named to whoever looks, nothing lost, nothing left."""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.services.trainer.real_runs import Pod, ended, held_at, on_disk, pid_of, run_request, urls
from tests.waiting import async_until
from trackway.system import StorageError
from trackway.trainer.run_state.folder import Owner, RunFolder, this_machine
from trackway.trainer.run_state.heartbeat import DEAD_AFTER_S
from trackway.trainer.supervisor.manager import RunManager
from trackway.wire.errors import ErrorCode
from trackway.wire.trainer import RunInfo, RunRequest, RunState

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("shared_http")]

Start = Callable[..., RunRequest]


@pytest.fixture
def outputs(small_disk: Path, remount: Callable[[Path, str], None]) -> Path:
    """On a disk of its own, with room for the checkpoints of a run."""
    remount(small_disk, "size=16m")
    return small_disk / "outputs"


@pytest.fixture
async def runs(agent_url: str, agent, outputs: Path, tmp_path: Path) -> AsyncIterator[RunManager]:
    runs = RunManager(outputs, urls(agent_url, tmp_path), stop_deadline_s=60)
    yield runs
    agent.released.set()
    await runs.close()


@pytest.fixture
def request_of(tiny_model: Path, sample, tmp_path: Path) -> Start:
    # In the step, so that the test knows what has been written when the disk is full.
    waits = "actor_rollout_ref.actor.checkpoint.async_save=false"
    return lambda name, *overrides: run_request(tiny_model, tmp_path, sample, name, waits, *overrides)


def asked(agent) -> dict[int, int]:
    """How often each step was rolled out, of two prompts a step."""
    counts = Counter(request.step for request in agent.requests if not request.validation)
    return {step: count // 2 for step, count in sorted(counts.items())}


def temporary(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name.startswith(".") or path.name.endswith(".tmp"))


def told(runs: RunManager, name: str) -> RunInfo:
    """As `GET /runs` says it."""
    [info] = [info for info in runs.registry.list() if info.run == name]
    return info


async def reach_step_2(runs: RunManager, agent, request: RunRequest) -> RunFolder:
    """A run that has done its first step and waits for the rollouts of the second."""
    agent.holding_at = 2
    info = await runs.start(request)
    await async_until(lambda: runs.registry.info(info.run).step == 1 and held_at(agent, 2))
    return RunFolder(Path(info.folder))


async def test_a_run_without_room_for_its_checkpoint_waits_says_so_and_trains_each_step_once(
    runs: RunManager, agent, request_of: Start, small_disk: Path, fill
):
    folder = await reach_step_2(runs, agent, request_of("waits"))
    filler = fill(small_disk, leave=250_000)

    agent.released.set()
    await async_until(lambda: told(runs, "waits").message.startswith("waits up to "))
    waiting, left = told(runs, "waits"), temporary(folder.path)
    await async_until(lambda: any("its disk" in wait.waits_for for wait in runs.registry.info("waits").waits))
    named = [wait for wait in runs.registry.info("waits").waits if "its disk" in wait.waits_for]
    filler.unlink()
    info = await ended(runs, "waits")

    assert [(wait.until or 0) - wait.since for wait in named] == [600_000]
    assert named[0].waits_for.startswith("its disk: expected to write the checkpoint of step 2 to ")
    assert (waiting.state, waiting.restarts) == (RunState.RUNNING, 0)
    assert f"bytes free on the disk at {small_disk}; free space there" in waiting.message
    assert "for its disk: expected to write the checkpoint of step 2 to " in waiting.message
    assert left == []
    assert (info.state, info.message, info.restarts) == (RunState.FINISHED, "", 0)
    assert [row.step for row in folder.rows()] == [0, 1, 2, 3, 4]
    assert asked(agent) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert temporary(folder.path) == []


@pytest.mark.extended
async def test_a_run_that_waited_too_long_fails_with_its_last_checkpoint_and_is_not_started_again(
    runs: RunManager, agent, request_of: Start, small_disk: Path, fill
):
    folder = await reach_step_2(runs, agent, request_of("failed", "trackway.storage_wait_s=0.5"))
    filler = fill(small_disk, leave=250_000)

    agent.released.set()
    failed = await ended(runs, "failed")
    before, left = asked(agent), temporary(folder.path)
    filler.unlink()
    await runs.resume("failed")
    info = await ended(runs, "failed")

    assert (failed.state, failed.restarts, before) == (RunState.FAILED, 0, {1: 1, 2: 1})
    assert failed.message.startswith("disk_full: expected to write the checkpoint of step 2 to ")
    assert failed.message.endswith("; then `trackway train --resume failed` continues from its last checkpoint")
    assert left == []
    assert info.state is RunState.FINISHED
    assert [row.step for row in folder.rows()] == [0, 1, 2, 3, 4]


@pytest.mark.extended
async def test_without_room_for_a_state_runs_are_listed_and_a_stop_and_a_resume_name_the_disk(
    runs: RunManager, agent, request_of: Start, small_disk: Path, fill
):
    folder = await reach_step_2(runs, agent, request_of("full"))
    filler = fill(small_disk)
    alive = told(runs, "full")

    os.kill(pid_of(runs, "full"), signal.SIGKILL)
    await async_until(
        lambda: told(runs, "full").message.startswith("its process has exited and its state cannot be written: ")
    )
    dead, left = told(runs, "full"), temporary(folder.path)
    refusals = []
    for call in (runs.resume("full"), runs.start(request_of("other")), runs.stop("full")):
        with pytest.raises(StorageError) as caught:
            await call
        refusals.append((caught.value.code, caught.value.detail["disk"]))
    filler.unlink()
    stopped = await ended(runs, "full")
    agent.released.set()
    await runs.resume("full")
    info = await ended(runs, "full")

    assert (alive.state, dead.state, left) == (RunState.RUNNING, RunState.RUNNING, [])
    assert alive.message.startswith("its disk is full: expected to write the run's state to ")
    assert f"bytes free on the disk at {small_disk}; free space there" in dead.message
    assert refusals == [(ErrorCode.DISK_FULL, str(small_disk))] * 3
    assert not (folder.path.parent / "other").exists()
    assert (stopped.state, stopped.restarts) == (RunState.STOPPED, 0)
    assert info.state is RunState.FINISHED
    assert asked(agent) == {1: 1, 2: 2, 3: 1, 4: 1}


@pytest.mark.extended
async def test_a_process_that_can_write_nothing_more_is_not_started_again(
    runs: RunManager, agent, request_of: Start, small_disk: Path, fill
):
    folder = await reach_step_2(runs, agent, request_of("silent", "trackway.storage_wait_s=0.5"))
    filler = fill(small_disk)

    agent.released.set()
    await async_until(
        lambda: told(runs, "silent").message.startswith("its process has exited and its state cannot be written: ")
    )
    before = asked(agent)
    filler.unlink()
    failed = await ended(runs, "silent")
    await runs.resume("silent")
    info = await ended(runs, "silent")

    assert (failed.state, failed.restarts, before) == (RunState.FAILED, 0, {1: 1, 2: 1})
    assert failed.message.startswith(
        "its files could not be written to its disk: expected to write state.json of run 'silent' to "
    )
    assert info.state is RunState.FINISHED
    assert [row.step for row in folder.rows()] == [0, 1, 2, 3, 4]
    assert temporary(folder.path) == []


@pytest.mark.parametrize(("options", "code"), [("size=16m", ErrorCode.DISK_FULL), ("ro", ErrorCode.NOT_WRITABLE)])
async def test_a_service_that_finds_a_dead_run_on_such_a_disk_lists_it_and_settles_it_later(
    runs: RunManager, request_of: Start, outputs: Path, small_disk: Path, fill, remount, options: str, code: ErrorCode
):
    on_disk(outputs, "dead", state="running")
    (outputs / ".runs.lock").touch()
    filler = fill(small_disk)
    remount(small_disk, options)

    listed = told(runs, "dead")
    refused = []
    for call in (runs.stop("dead"), runs.resume("dead"), runs.start(request_of("new"))):
        with pytest.raises(StorageError) as caught:
            await call
        refused.append(caught.value.code)
    remount(small_disk, "rw,size=16m")
    filler.unlink()

    assert listed.state is RunState.RUNNING
    assert listed.message.startswith("its process has exited and its state cannot be written: expected to write ")
    assert refused == [code] * 3
    assert (told(runs, "dead").state, told(runs, "dead").interrupted) == (RunState.FAILED, True)


async def test_a_process_elsewhere_that_cannot_write_its_beat_is_not_taken_for_dead(
    outputs: Path, small_disk: Path, fill, agent_url: str, tmp_path: Path
):
    folder = on_disk(outputs, "far", state="running")
    owner = Owner(machine=this_machine(), pid=7, started=7)
    folder.write_owner(owner)
    (outputs / ".runs.lock").touch()
    pod = Pod(outputs, urls(agent_url, tmp_path))
    pod.runs.registry.info("far")
    filler = fill(small_disk)

    pod.now += DEAD_AFTER_S
    silent, kept = pod.runs.registry.info("far"), folder.owner()
    filler.unlink()

    assert (silent.state, kept) == (RunState.RUNNING, owner)
    assert f"bytes free on the disk at {small_disk}" in silent.message
    assert pod.runs.registry.info("far").state is RunState.FAILED


async def test_a_log_without_room_does_not_become_the_exit_status(small_disk: Path, fill):
    program = "from trackway.trainer.worker import flush_or_drop; print(0); flush_or_drop(); raise SystemExit(5)"
    with (small_disk / "worker.log").open("wb") as log:
        fill(small_disk)
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        ended = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=log, env=buffered)
        status = await asyncio.wait_for(ended.wait(), 60)

    assert status == 5


async def test_a_run_cannot_begin_on_a_full_disk_and_leaves_no_folder(
    runs: RunManager, request_of: Start, outputs: Path, small_disk: Path, fill
):
    outputs.mkdir()
    (outputs / ".runs.lock").touch()
    filler = fill(small_disk)

    with pytest.raises(StorageError, match="No space left on device") as caught:
        await runs.start(request_of("new"))
    left = sorted(path.name for path in outputs.iterdir())
    filler.unlink()

    assert (caught.value.status, left, runs.registry.list()) == (507, [".runs.lock"], [])
    await runs.start(request_of("new"))
    await asyncio.wait_for(runs.close(), 60)
