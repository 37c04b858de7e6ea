"""Runs whose process is taken for dead though it lives, that cannot begin, or that two people want; real learners."""

import asyncio
import errno
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.services.trainer.real_runs import Pod, beat_of, ended, held_at, on_disk, pid_of, run_request
from tests.waiting import async_until
from trackway.clients.weights import WeightStore
from trackway.trainer.run_state.folder import Owner, RunFolder, this_machine
from trackway.trainer.run_state.heartbeat import DEAD_AFTER_S
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.supervisor import process
from trackway.trainer.supervisor.manager import RunManager, resume_interrupted
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Ready
from trackway.wire.trainer import RunRequest, RunState
from trackway.wire.trajectory import Reward, Trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("shared_http")]


@pytest.fixture
def services(agent_url: str, tmp_path: Path) -> ServiceUrls:
    """All of them are the scripted agent."""
    return ServiceUrls(agent_url=agent_url, tools_url=agent_url, weights_url=str(tmp_path / "weights"))


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.fixture
async def runs(services: ServiceUrls, agent, outputs: Path) -> AsyncIterator[RunManager]:
    """A manager that stops runs after 0.1 s."""
    runs = RunManager(outputs, services, stop_deadline_s=0.1)
    yield runs
    agent.released.set()
    await runs.close()


@pytest.fixture
def request_of(tiny_model: Path, sample, tmp_path: Path) -> Callable[..., RunRequest]:
    return lambda name, *overrides: run_request(tiny_model, tmp_path, sample, name, *overrides)


@pytest.mark.extended
async def test_a_run_that_waits_says_for_what_until_it_goes_on(runs: RunManager, agent, request_of):
    agent.holding_at = 2
    await runs.start(request_of("waiting"))
    await async_until(lambda: bool(runs.registry.info("waiting").waits))
    waiting = runs.registry.info("waiting")
    [wait] = waiting.waits
    agent.released.set()
    await ended(runs, "waiting")

    assert (wait.who, wait.waits_for) == ("the run", "the rollouts of step 2")
    assert {(group.who[:8], group.progress) for group in wait.because} == {("group 2/", "0 of 4 rollouts have ended")}
    assert (waiting.rollout_states.pop("submitted"), sum(waiting.rollout_states.values())) == (16, 16)
    assert (waiting.rollout_states["used"], waiting.rollout_states["running"]) == (8, 8)
    after = runs.registry.info("waiting")
    assert after.waits == [] and after.rollout_states["used"] == after.rollout_states["submitted"]


@pytest.fixture
async def frozen(runs: RunManager, agent, request_of, services: ServiceUrls, outputs: Path) -> AsyncIterator[int]:
    """The learner of `frozen`, which stands still in step 2 just after a beat, and was given up by another service."""
    agent.holding_at = 2
    await runs.start(request_of("frozen"))
    await async_until(lambda: runs.registry.info("frozen").step == 1 and held_at(agent, 2))
    folder, learner = RunFolder(outputs / "frozen"), pid_of(runs, "frozen")
    beat = beat_of(folder)
    await async_until(lambda: beat_of(folder) > beat)
    os.kill(learner, signal.SIGSTOP)
    pod = Pod(outputs, services)
    pod.runs.registry.info("frozen")
    pod.now += DEAD_AFTER_S
    assert pod.runs.registry.info("frozen").state is RunState.FAILED
    yield learner
    if lives(learner):
        os.kill(learner, signal.SIGKILL)


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def learners(folder: RunFolder) -> list[str]:
    """Processes of this machine that were started for a run."""
    found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder.path).encode() in read(path)]
    return [path.parent.name for path in found]


def full(*given: object, **named: object) -> None:
    """What writing a file does on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_a_run_that_is_given_up_loses_its_owner_so_that_a_process_that_wakes_up_ends(
    runs: RunManager, outputs: Path
):
    folder = on_disk(outputs, "lost", state="running")
    folder.write_owner(Owner.of(os.getpid()).model_copy(update={"started": 1}))  # a process that has ended

    info = runs.registry.info("lost")

    assert (info.state, info.interrupted, folder.owner()) == (RunState.FAILED, True, None)


@pytest.mark.extended
async def test_a_learner_that_wakes_up_after_its_run_was_given_up_writes_nothing_and_the_run_goes_on(
    runs: RunManager, agent, frozen: int, outputs: Path
):
    folder = RunFolder(outputs / "frozen")
    lost = folder.info()
    agent.released.set()

    os.kill(frozen, signal.SIGCONT)
    await async_until(lambda: not lives(frozen), 30)
    after, rows = folder.info(), [row.step for row in folder.rows()]
    await resume_interrupted(runs)
    info = await ended(runs, "frozen")

    assert (lost.state, lost.interrupted, after, rows) == (RunState.FAILED, True, lost, [0, 1])
    assert "this process was marked dead and lost ownership of the run" in folder.log.read_text()
    assert (info.state, info.restarts) == (RunState.FINISHED, 1)
    assert [row.step for row in folder.rows()] == [0, 1, 2, 3, 4]


@pytest.mark.extended
async def test_a_resume_waits_for_a_learner_that_stands_still_only_so_long_and_then_has_it_killed(
    runs: RunManager, agent, frozen: int, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await runs.resume("frozen")
    monkeypatch.setattr("trackway.trainer.supervisor.manager.EXIT_WAIT_S", 0.2)
    with pytest.raises(TrackwayError, match="the last process of run 'frozen' has not exited yet; try again") as caught:
        await runs.resume("frozen")
    await async_until(lambda: not lives(frozen), 30)
    agent.released.set()
    await runs.resume("frozen")

    assert caught.value.code is ErrorCode.CONFLICT
    assert (await ended(runs, "frozen")).state is RunState.FINISHED


@pytest.mark.extended
async def test_a_stop_of_a_run_that_was_given_up_ends_its_learner_too(runs: RunManager, frozen: int):
    stopped = await runs.stop("frozen")
    await async_until(lambda: not lives(frozen), 30)

    assert (stopped.state, stopped.interrupted, runs.interrupted()) == (RunState.FAILED, False, [])


async def test_a_run_that_another_service_trains_by_now_is_left_to_it(
    runs: RunManager, agent, frozen: int, outputs: Path
):
    folder = RunFolder(outputs / "frozen")
    machine = this_machine().model_copy(update={"host": "another-pod"})
    folder.move(RunState.STARTING)
    folder.write_owner(Owner(machine=machine, pid=7, started=7))
    taken = folder.move(RunState.RUNNING)
    agent.released.set()

    os.kill(frozen, signal.SIGCONT)
    await async_until(lambda: not lives(frozen), 30)
    await asyncio.wait_for(runs.close(), 60)

    assert folder.info() == taken
    assert learners(folder) == []


async def test_a_service_that_closes_ends_a_run_that_began_meanwhile(runs: RunManager, agent, frozen: int, request_of):
    closing = asyncio.create_task(runs.close())
    await asyncio.sleep(0)
    await runs.start(request_of("meanwhile"))
    os.kill(frozen, signal.SIGKILL)
    await asyncio.wait_for(closing, 60)

    assert (runs.registry.info("meanwhile").state, runs.registry.info("meanwhile").interrupted) == (
        RunState.STOPPED,
        True,
    )


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
        runs = RunManager(outputs, ServiceUrls(agent_url=url, tools_url=url, weights_url=str(tmp_path)))
        going_on = asyncio.create_task(resume_interrupted(runs))
        await async_until(asked.is_set)
        await runs.stop("old")
        answer.set()
        with pytest.raises(TrackwayError, match="expected an interrupted run to resume") as caught:
            await going_on

    assert caught.value.code is ErrorCode.CONFLICT
    assert (runs.registry.info("old").state, runs.registry.info("old").interrupted) == (RunState.STOPPED, False)


async def test_a_run_whose_files_cannot_be_written_fails_and_is_as_interrupted_as_before(
    runs: RunManager, outputs: Path
):
    folder = on_disk(outputs, "old", state="stopped", interrupted=True)
    (folder.path / "services.json").unlink()
    (folder.path / "services.json").mkdir()

    with pytest.raises(IsADirectoryError):
        await runs.resume("old", by_itself=True)

    info = runs.registry.info("old")
    assert (info.state, info.interrupted, info.restarts) == (RunState.FAILED, True, 1)
    assert info.message.startswith("its process could not be started: [Errno 21] Is a directory")


@pytest.mark.parametrize("is_writable", [True, False])
async def test_a_start_that_is_given_up_leaves_no_run_starting(
    runs: RunManager, outputs: Path, is_writable: bool, monkeypatch: pytest.MonkeyPatch
):
    folder = on_disk(outputs, "old", state="stopped")
    start, begun = process._start, asyncio.Event()

    async def noted(*given: Any) -> asyncio.subprocess.Process:
        begun.set()
        return await start(*given)

    monkeypatch.setattr(process, "_start", noted)
    resuming = asyncio.create_task(runs.resume("old"))
    await asyncio.wait_for(begun.wait(), 30)
    with monkeypatch.context() as disk:
        if not is_writable:
            disk.setattr(RunFolder, "move", full)
        resuming.cancel()
        await asyncio.wait({resuming})

    said = "its process could not be started: CancelledError" if is_writable else "the trainer service was lost"
    assert resuming.cancelled()
    assert runs.registry.info("old").state is RunState.FAILED
    assert runs.registry.info("old").message.startswith(said)
    assert learners(folder) == []


@pytest.mark.extended
@pytest.mark.parametrize("is_started", [False, True], ids=["before it runs", "after it runs"])
async def test_a_learner_that_cannot_be_started_again_fails_the_run_with_the_reason(
    runs: RunManager, agent, request_of, outputs: Path, is_started: bool, monkeypatch: pytest.MonkeyPatch
):
    agent.holding_at = 0
    await runs.start(request_of("dying"))
    await async_until(lambda: held_at(agent, 0))
    folder = RunFolder(outputs / "dying")
    if is_started:
        monkeypatch.setattr(RunFolder, "write_owner", full)
    else:
        folder.log.unlink()
        folder.log.mkdir()

    os.kill(pid_of(runs, "dying"), signal.SIGKILL)
    info = await ended(runs, "dying")
    await async_until(lambda: learners(folder) == [])

    assert (info.state, info.interrupted) == (RunState.FAILED, False)
    said = "[Errno 28] No space left on device" if is_started else "[Errno 21] Is a directory"
    assert info.message.startswith(f"its process could not be restarted: {said}")
    assert runs.registry.info("dying") == info


async def test_the_newest_interrupted_run_goes_on_and_when_it_cannot_the_next(
    runs: RunManager, outputs: Path, caplog: pytest.LogCaptureFixture
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
    assert runs.registry.info("b").interrupted
    assert "run b was interrupted and cannot be resumed: [Errno 21] Is a directory" in caplog.text


async def test_whoever_starts_a_run_fails_an_interrupted_one_which_nobody_has_stopped(
    runs: RunManager, request_of, outputs: Path
):
    for name in ("old", "older"):
        on_disk(outputs, name, state="stopped", interrupted=True, message="interrupted after step 2")

    await runs.resume("old")
    by_resume = runs.registry.info("older")
    await runs.close()
    await runs.start(request_of("new"))
    by_start = runs.registry.info("old")

    left = "interrupted after step 2; run 'old' was started instead; resume this run by hand"
    assert (by_resume.state, by_resume.interrupted, by_resume.message) == (RunState.FAILED, False, left)
    assert (by_start.state, by_start.interrupted) == (RunState.FAILED, False)


async def test_one_state_that_cannot_be_read_hides_no_run_and_stands_in_the_way_of_none(
    runs: RunManager, outputs: Path, caplog: pytest.LogCaptureFixture
):
    (on_disk(outputs, "bad", state="stopped").path / "state.json").write_text("{")
    on_disk(outputs, "good", state="stopped", interrupted=True)
    on_disk(outputs, "no run's name", state="stopped")

    newest, listed, going_on = runs.registry.active_or_newest(), runs.registry.list(), runs.interrupted()

    assert newest == [runs.registry.info("good")]
    assert [(info.run, info.state) for info in listed] == [("bad", RunState.UNREADABLE), ("good", RunState.STOPPED)]
    assert going_on == ["good"]
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == ["run no run's name is left out"]


async def test_nothing_starts_beside_a_living_process_whose_state_cannot_be_read(runs: RunManager, agent, request_of):
    agent.holding_at = 0
    await runs.start(request_of("unreadable"))
    (Path(runs.registry.info("unreadable").folder) / "state.json").write_text("{")

    with pytest.raises(TrackwayError, match="run 'unreadable' is running and one run is active at a time"):
        await runs.start(request_of("second"))
    assert [(info.run, info.state) for info in runs.registry.list()] == [("unreadable", RunState.RUNNING)]


async def test_a_run_that_could_not_be_read_once_and_has_ended_keeps_no_other_from_starting(
    runs: RunManager, agent, request_of, outputs: Path
):
    agent.holding_at = 0
    folder = on_disk(outputs, "ended", state="stopped")
    whole = (folder.path / "state.json").read_text()
    (folder.path / "state.json").write_text("{")
    runs.registry.list()
    (folder.path / "state.json").write_text(whole)
    folder.write_owner(Owner.of(os.getpid()))  # its process is at its last words

    assert (await runs.start(request_of("next"))).run == "next"


async def test_a_learning_rate_that_destroys_the_weights_fails_the_run_by_name_with_its_last_checkpoint_kept(
    runs: RunManager, request_of, services: ServiceUrls, outputs: Path
):
    await runs.start(request_of("good", "trainer.total_training_steps=1"))
    good = await ended(runs, "good")
    latest = WeightStore(services.weights_url).latest()
    checkpoint = outputs / "good" / "checkpoints" / "global_step_1"
    begin = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]

    await runs.start(request_of("diverging", "actor_rollout_ref.actor.optim.lr=3e38", *begin))
    info = await ended(runs, "diverging")
    after = WeightStore(services.weights_url).latest()

    assert (good.state, info.state) == (RunState.FINISHED, RunState.FAILED)
    assert "not_finite: the weights after step 2 are neither published nor saved: expected finite" in info.message
    assert latest is not None and after is not None and after.version == latest.version + 1
    assert checkpoint.is_dir()
    assert list((outputs / "diverging" / "checkpoints").glob("*")) == []


async def test_numbers_that_are_not_finite_leave_a_run_readable_and_cost_only_their_trajectories(
    runs: RunManager, agent, request_of, outputs: Path
):
    def spoiled(trajectory: Trajectory) -> Trajectory:
        """In step 2 a score, a huge score and a logprob; in each step what a scorer adds."""
        step, n, reward = trajectory.tags.step, trajectory.tags.rollout_n, trajectory.reward
        assert reward is not None
        score = {0: math.nan, 1: 1e308}.get(n, reward.score) if step == 2 else reward.score
        logprobs = [-math.inf, -3.0, 0.0, -3.0] if (step, n) == (2, 2) else trajectory.response_logprobs
        reward = Reward(score=score, components={"extra": math.nan, "huge": 1e308})
        return trajectory.model_copy(update={"reward": reward, "response_logprobs": logprobs})

    agent.change = spoiled
    await runs.start(request_of("run"))
    info = await ended(runs, "run")
    rows = [row async for row in runs.registry.rows("run", follow=False)]
    second = read_trajectories(outputs / "run" / "trajectories" / "step_2.parquet")

    assert (info.state, info.step, info.restarts) == (RunState.FINISHED, 4, 0)
    assert [row.data.get("training/left_out/error") for row in rows] == [None, 0.0, 6.0, 0.0, 0.0]
    assert [trajectory.error.code for trajectory in second if trajectory.error] == [ErrorCode.NOT_FINITE] * 6
    assert [repr(trajectory.reward.score) for trajectory in second[:3] if trajectory.reward] == ["nan", "1e+308", "0.0"]
    assert math.isnan(rows[0].data["val-aux/openai/gsm8k/extra/mean@1"])
    assert repr(info.metrics["val-aux/openai/gsm8k/extra/mean@1"]) == "nan"


FILES = ("state.json", "worker.json", "heartbeat.json")


@pytest.mark.parametrize(
    "is_killed",
    [
        pytest.param(False, id="and its process lives", marks=pytest.mark.extended),  # the other reads it alive too
        pytest.param(True, id="and its process is killed"),
    ],
)
async def test_a_run_whose_files_are_damaged_while_it_trains_goes_on_to_its_end(
    runs: RunManager, agent, request_of, is_killed: bool
):
    agent.holding_at = 2
    await runs.start(request_of("damaged"))
    await async_until(lambda: runs.registry.info("damaged").step == 1 and held_at(agent, 2))
    folder, uid = RunFolder(Path(runs.registry.info("damaged").folder)), runs.registry.info("damaged").uid
    learner = pid_of(runs, "damaged")

    for name in FILES:
        (folder.path / name).write_bytes(b"\x00\xff{")
    shown = runs.registry.info("damaged")
    if is_killed:
        os.kill(learner, signal.SIGKILL)
    agent.holding_at = None
    agent.released.set()
    info = await ended(runs, "damaged")

    assert (shown.state, "its state file cannot be read" in shown.message) == (RunState.RUNNING, True)
    assert (info.state, info.step, info.restarts, info.uid) == (RunState.FINISHED, 4, int(is_killed), uid)
