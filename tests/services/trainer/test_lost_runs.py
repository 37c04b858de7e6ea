"""Runs whose process is taken for dead though it lives, that cannot begin, or that two people want; real learners."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from real_runs import Pod, beat_of, ended, held_at, on_disk, pid_of, run_request, until

from trackway.trainer.heartbeat import DEAD_AFTER_S
from trackway.trainer.interruptions import resume_interrupted
from trackway.trainer.owner import Owner, this_machine
from trackway.trainer.run_folder import RunFolder
from trackway.trainer.runs import Runs
from trackway.trainer.settings import ServiceUrls
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import Ready
from trackway.wire.trainer import RunRequest, RunState

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("shared_http")]


@pytest.fixture
def services(agent_url: str, tmp_path: Path) -> ServiceUrls:
    """All of them are the scripted agent."""
    return ServiceUrls(agent_url=agent_url, tools_url=agent_url, weights_url=str(tmp_path / "weights"))


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.fixture
async def runs(services: ServiceUrls, agent, outputs: Path) -> AsyncIterator[Runs]:
    """Of a service that is patient with a learner for a second only."""
    runs = Runs(outputs, services, stop_deadline_s=1)
    yield runs
    agent.released.set()
    await runs.close()


@pytest.fixture
def request_of(tiny_model: Path, sample, tmp_path: Path) -> Callable[..., RunRequest]:
    return lambda name, *overrides: run_request(tiny_model, tmp_path, sample, name, *overrides)


@pytest.fixture
async def frozen(runs: Runs, agent, request_of, services: ServiceUrls, outputs: Path) -> AsyncIterator[int]:
    """The learner of `frozen`, which stands still in step 2 just after a beat, and was given up by another service."""
    agent.holding_at = 2
    await runs.start(request_of("frozen"))
    await until(lambda: runs.info("frozen").step == 1 and held_at(agent, 2))
    folder, learner = RunFolder(outputs / "frozen"), pid_of(runs, "frozen")
    beat = beat_of(folder)
    await until(lambda: beat_of(folder) > beat)
    os.kill(learner, signal.SIGSTOP)
    pod = Pod(outputs, services)
    pod.runs.info("frozen")
    pod.now += DEAD_AFTER_S
    assert pod.runs.info("frozen").state is RunState.FAILED
    yield learner
    if lives(learner):
        os.kill(learner, signal.SIGKILL)


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def learners(folder: RunFolder) -> list[str]:
    """Processes of this machine that were started for a run."""
    found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder.path).encode() in read(path)]
    return [path.parent.name for path in found]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_a_learner_that_wakes_up_after_its_run_was_given_up_writes_nothing_and_the_run_goes_on(
    runs: Runs, agent, frozen: int, outputs: Path
):
    folder = RunFolder(outputs / "frozen")
    lost = folder.info()
    agent.released.set()

    os.kill(frozen, signal.SIGCONT)
    await until(lambda: not lives(frozen), 30)
    after, rows = folder.info(), [row.step for row in folder.rows()]
    await resume_interrupted(runs)
    info = await ended(runs, "frozen")

    assert (lost.state, lost.interrupted, after, rows) == (RunState.FAILED, True, lost, [0, 1])
    assert "this process was taken for dead and has the run no more" in folder.log.read_text()
    assert (info.state, info.restarts) == (RunState.FINISHED, 1)
    assert [row.step for row in folder.rows()] == [0, 1, 2, 3, 4]


async def test_a_resume_waits_for_a_learner_that_stands_still_only_so_long_and_then_has_it_killed(
    runs: Runs, agent, frozen: int, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await runs.resume("frozen")
    monkeypatch.setattr("trackway.trainer.runs.GONE_S", 0.2)
    with pytest.raises(TrackwayError, match="the last process of run 'frozen' has not ended yet; ask again") as caught:
        await runs.resume("frozen")
    await until(lambda: not lives(frozen), 30)
    agent.released.set()
    await runs.resume("frozen")

    assert caught.value.code is ErrorCode.CONFLICT
    assert (await ended(runs, "frozen")).state is RunState.FINISHED


async def test_a_stop_of_a_run_that_was_given_up_ends_its_learner_too(runs: Runs, frozen: int):
    stopped = await runs.stop("frozen")
    await until(lambda: not lives(frozen), 30)

    assert (stopped.state, stopped.interrupted, runs.interrupted()) == (RunState.FAILED, False, [])


async def test_a_run_that_another_service_trains_by_now_is_left_to_it(runs: Runs, agent, frozen: int, outputs: Path):
    folder = RunFolder(outputs / "frozen")
    machine = this_machine().model_copy(update={"host": "another-pod"})
    folder.move(RunState.STARTING)
    folder.write_owner(Owner(machine=machine, pid=7, started=7))
    taken = folder.move(RunState.RUNNING)
    agent.released.set()

    os.kill(frozen, signal.SIGCONT)
    await until(lambda: not lives(frozen), 30)
    await asyncio.wait_for(runs.close(), 60)

    assert folder.info() == taken
    assert learners(folder) == []


async def test_a_service_that_closes_ends_a_run_that_began_meanwhile(runs: Runs, agent, frozen: int, request_of):
    closing = asyncio.create_task(runs.close())
    await asyncio.sleep(0)
    await runs.start(request_of("meanwhile"))
    os.kill(frozen, signal.SIGKILL)
    await asyncio.wait_for(closing, 60)

    assert (runs.info("meanwhile").state, runs.info("meanwhile").interrupted) == (RunState.STOPPED, True)


async def test_a_run_that_somebody_stops_while_its_services_are_asked_does_not_go_on(
    serving, outputs: Path, tmp_path: Path
):
    app, asked, answer = FastAPI(), threading.Event(), threading.Event()

    @app.get("/ready")
    def ready() -> Ready:
        asked.set()
        answer.wait(60)
        return Ready(ready=True)

    on_disk(outputs, "old", state="stopped", interrupted=True)
    with serving(app) as url:
        runs = Runs(outputs, ServiceUrls(agent_url=url, tools_url=url, weights_url=str(tmp_path)))
        going_on = asyncio.create_task(resume_interrupted(runs))
        await until(asked.is_set)
        await runs.stop("old")
        answer.set()
        with pytest.raises(TrackwayError, match="expected an interrupted run to go on with") as caught:
            await going_on

    assert caught.value.code is ErrorCode.CONFLICT
    assert (runs.info("old").state, runs.info("old").interrupted) == (RunState.STOPPED, False)


async def test_a_run_whose_files_cannot_be_written_fails_and_is_as_interrupted_as_before(runs: Runs, outputs: Path):
    folder = on_disk(outputs, "old", state="stopped", interrupted=True)
    (folder.path / "services.json").unlink()
    (folder.path / "services.json").mkdir()

    with pytest.raises(IsADirectoryError):
        await runs.resume("old", by_itself=True)

    info = runs.info("old")
    assert (info.state, info.interrupted, info.restarts) == (RunState.FAILED, True, 1)
    assert info.message.startswith("its process could not be started: [Errno 21] Is a directory")


@pytest.mark.parametrize("is_writable", [True, False])
async def test_a_start_that_is_given_up_leaves_no_run_starting(runs: Runs, outputs: Path, is_writable: bool):
    folder = on_disk(outputs, "old", state="stopped")
    resuming = asyncio.create_task(runs.resume("old"))
    while folder.info().state is not RunState.STARTING:
        await asyncio.sleep(0)
    obstacle = folder.path / f".state.json.{socket.gethostname()}.{os.getpid()}"
    if not is_writable:
        obstacle.mkdir()

    resuming.cancel()
    await asyncio.wait({resuming})
    if not is_writable:
        obstacle.rmdir()

    said = "its process could not be started: CancelledError" if is_writable else "the trainer service went away"
    assert resuming.cancelled()
    assert runs.info("old").state is RunState.FAILED
    assert runs.info("old").message.startswith(said)
    assert learners(folder) == []


@pytest.mark.parametrize(
    "obstacle",
    ["worker.log", f".worker.json.{socket.gethostname()}.{os.getpid()}"],
    ids=["before it runs", "after it runs"],
)
async def test_a_learner_that_cannot_be_started_again_fails_the_run_with_the_reason(
    runs: Runs, agent, request_of, outputs: Path, obstacle: str
):
    agent.holding_at = 0
    await runs.start(request_of("dying"))
    await until(lambda: held_at(agent, 0))
    folder = RunFolder(outputs / "dying")
    (folder.path / obstacle).unlink(missing_ok=True)
    (folder.path / obstacle).mkdir()

    os.kill(pid_of(runs, "dying"), signal.SIGKILL)
    info = await ended(runs, "dying")
    await until(lambda: learners(folder) == [])

    assert (info.state, info.interrupted) == (RunState.FAILED, False)
    assert info.message.startswith("its process could not be started again: [Errno 21] Is a directory")
    assert runs.info("dying") == info


async def test_the_newest_interrupted_run_goes_on_and_when_it_cannot_the_next(
    runs: Runs, outputs: Path, caplog: pytest.LogCaptureFixture
):
    for seconds, name in enumerate(("a", "b")):
        folder = on_disk(outputs, name, state="stopped", interrupted=True)
        os.utime(folder.path / "state.json", (seconds, seconds))
    before = runs.interrupted()
    (outputs / "b" / "services.json").unlink()
    (outputs / "b" / "services.json").mkdir()

    resumed = await resume_interrupted(runs)

    assert before == ["b", "a"]
    assert resumed is not None and (resumed.run, resumed.restarts) == ("a", 1)
    assert runs.info("b").interrupted
    assert "run b was interrupted and cannot go on: [Errno 21] Is a directory" in caplog.text


async def test_whoever_starts_a_run_fails_an_interrupted_one_which_nobody_has_stopped(
    runs: Runs, request_of, outputs: Path
):
    for name in ("old", "older"):
        on_disk(outputs, name, state="stopped", interrupted=True, message="interrupted after step 2")

    await runs.resume("old")
    by_resume = runs.info("older")
    await runs.close()
    await runs.start(request_of("new"))
    by_start = runs.info("old")

    left = "interrupted after step 2; run 'old' was started instead of it: resume it"
    assert (by_resume.state, by_resume.interrupted, by_resume.message) == (RunState.FAILED, False, left)
    assert (by_start.state, by_start.interrupted) == (RunState.FAILED, False)


async def test_one_state_that_cannot_be_read_hides_no_other_run_and_is_named_once(
    runs: Runs, outputs: Path, caplog: pytest.LogCaptureFixture
):
    on_disk(outputs, "good", state="stopped", interrupted=True)
    (on_disk(outputs, "bad", state="stopped").path / "state.json").write_text("{")
    (on_disk(outputs, "no run's name", state="stopped").path / "config.json").write_text("{")

    newest, listed, going_on = runs.newest(), runs.list(), runs.interrupted()

    assert newest == runs.info("good")
    assert ([info.run for info in listed], going_on) == (["good"], ["good"])
    assert sorted(record.getMessage().partition(": ")[0] for record in caplog.records) == [
        "run bad is left out",
        "run no run's name is left out",
    ]


async def test_nothing_starts_beside_a_living_process_whose_state_cannot_be_read(runs: Runs, agent, request_of):
    agent.holding_at = 0
    await runs.start(request_of("unreadable"))
    folder = RunFolder(Path(runs.info("unreadable").folder))
    whole = (folder.path / "state.json").read_text()
    (folder.path / "state.json").write_text("{")

    with pytest.raises(TrackwayError, match="the state of run 'unreadable' cannot be read, and its process lives"):
        await runs.start(request_of("second"))
    (folder.path / "state.json").write_text(whole)
    assert [info.run for info in runs.list()] == ["unreadable"]
