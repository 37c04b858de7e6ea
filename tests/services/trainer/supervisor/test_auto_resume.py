"""Runs whose service or machine goes away, and two services on one folder; real services and learners."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.services.trainer.real_runs import Pod, beat_of, held_at, on_disk, pid_of, run_request
from tests.waiting import async_until
from trackway.clients import TrainerClient
from trackway.system.process import free_port
from trackway.trainer.run_state.folder import RunFolder, this_machine
from trackway.trainer.run_state.heartbeat import DEAD_AFTER_S
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.supervisor import process
from trackway.trainer.supervisor.manager import RunManager, resume_interrupted
from trackway.trainer.supervisor.process import Supervised
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import RunInfo, RunRequest, RunState

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("shared_http")]


@pytest.fixture
def services(agent_url: str, tmp_path: Path) -> ServiceUrls:
    """All of them are the scripted agent."""
    return ServiceUrls(agent_url=agent_url, tools_url=agent_url, weights_url=str(tmp_path / "weights"))


@pytest.fixture
async def runs(services: ServiceUrls, agent, tmp_path: Path) -> AsyncIterator[RunManager]:
    runs = RunManager(tmp_path / "outputs", services, stop_deadline_s=60)
    yield runs
    agent.released.set()
    await runs.close()


@pytest.fixture
async def pod(services: ServiceUrls, agent, tmp_path: Path) -> AsyncIterator[Pod]:
    pod = Pod(tmp_path / "outputs", services)
    yield pod
    agent.released.set()
    await pod.runs.close()


@pytest.fixture
def request_of(tiny_model: Path, sample, tmp_path: Path) -> Callable[..., RunRequest]:
    return lambda name, *overrides: run_request(tiny_model, tmp_path, sample, name, *overrides)


@contextlib.contextmanager
def service(port: int, services: ServiceUrls, outputs: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer service in a process of its own, which resumes interrupted runs."""
    settings = {
        "TRACKWAY_OUTPUTS_DIR": str(outputs),
        "TRACKWAY_WEIGHTS_URL": services.weights_url,
        "TRACKWAY_RESUME_INTERRUPTED": "true",
        **{f"TRACKWAY_{name}_URL": services.agent_url for name in ("AGENT", "TOOLS", "ROLLOUT", "REWARD")},
    }
    with log.open("ab") as out:
        command = [sys.executable, "-m", "uvicorn", "--factory", "trackway.trainer.app:create_app", "--port", str(port)]
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("state", "goes_on"),
    [
        ({"state": "stopped", "interrupted": True}, True),
        ({"state": "failed", "interrupted": True, "restarts": 1}, True),
        ({"state": "running", "restarts": 1}, True),  # its process is gone
        ({"state": "stopping", "interrupted": True}, True),
        ({"state": "stopping"}, False),  # somebody had asked for it
        ({"state": "stopped"}, False),
        ({"state": "failed"}, False),
        ({"state": "finished"}, False),
        ({"state": "stopped", "interrupted": True, "restarts": 2}, False),
    ],
)
async def test_only_a_run_that_neither_somebody_nor_an_error_ended_goes_on(
    runs: RunManager, tmp_path: Path, state, goes_on
):
    folder = on_disk(tmp_path / "outputs", "old", **state)

    assert runs.interrupted() == ([folder.name] if goes_on else [])
    assert (folder.info().interrupted, folder.info().state in ("stopped", "failed", "finished")) == (goes_on, True)


async def test_a_run_that_went_on_too_often_says_so_and_is_left_alone(runs: RunManager, tmp_path: Path):
    folder = on_disk(tmp_path / "outputs", "old", state="stopped", interrupted=True, restarts=2, message="interrupted")

    assert await resume_interrupted(runs) is None
    assert (folder.info().state, folder.info().interrupted) == (RunState.FAILED, False)
    assert (
        folder.info().message
        == "interrupted; it was resumed automatically 2 times, the most allowed; resume it by hand"
    )


@pytest.mark.parametrize(("by_itself", "options"), [(True, ["--skip-damaged"]), (False, [])])
async def test_only_a_run_that_goes_on_by_itself_skips_damaged_checkpoints(
    runs: RunManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_itself: bool, options: list[str]
):
    folder = on_disk(tmp_path / "outputs", "old", state="stopped", interrupted=True)
    given: list[str] = []

    async def refused(arguments: Sequence[str], *_: object) -> None:
        given.extend(arguments)
        raise OSError("no process")

    monkeypatch.setattr(process, "launch", refused)
    with pytest.raises(OSError, match="no process"):
        await runs.resume("old", by_itself=by_itself)

    assert given == [str(folder.path), "--lifeline", *options]


async def test_a_process_that_does_not_stop_is_killed_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = on_disk(tmp_path / "outputs", "deaf", state="running")
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"

    async def deaf(*_: object) -> asyncio.subprocess.Process:
        started = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        assert started.stdout is not None and await started.stdout.readline() == b"\n"
        return started

    monkeypatch.setattr(process, "launch", deaf)
    supervised = Supervised(folder, folder.config(), {}, stop_deadline_s=0.1)
    await supervised.start()
    owner = folder.owner()
    assert owner is not None
    supervised.stop()
    try:
        await asyncio.wait_for(supervised.run(), 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)

    info = folder.info()
    assert (info.state, info.message.partition(";")[0]) == (RunState.STOPPED, "its process ended by SIGKILL")


async def test_an_interrupted_run_that_somebody_stops_does_not_go_on(runs: RunManager, tmp_path: Path):
    on_disk(tmp_path / "outputs", "old", state="stopped", interrupted=True)

    stopped = await runs.stop("old")

    assert (stopped.state, stopped.interrupted, runs.interrupted()) == (RunState.STOPPED, False, [])


async def test_an_interrupted_run_waits_until_its_services_are_ready(tmp_path: Path):
    nobody = "http://127.0.0.1:9"
    folder = on_disk(tmp_path / "outputs", "old", state="stopped", interrupted=True)
    runs = RunManager(tmp_path / "outputs", ServiceUrls(agent_url=nobody, tools_url=nobody, weights_url="w"))

    with pytest.raises(TrackwayError, match="/ready: ") as caught:
        await resume_interrupted(runs)

    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert (folder.info().state, folder.info().interrupted) == (RunState.STOPPED, True)


async def test_a_run_whose_service_closes_is_interrupted_and_one_of_two_others_goes_on_with_it(
    runs: RunManager, pod: Pod, agent, request_of, tmp_path: Path
):
    agent.holding_at = 3
    await runs.start(request_of("moved", "trainer.save_freq=-1"))
    await async_until(lambda: runs.registry.info("moved").step == 2)
    await runs.close()
    closed = runs.registry.info("moved")

    third = RunManager(tmp_path / "outputs", runs.services)
    results = await asyncio.gather(*(resume_interrupted(runs) for runs in (pod.runs, third)), return_exceptions=True)
    [resumed] = [result for result in results if isinstance(result, RunInfo)]
    [refused] = [result for result in results if isinstance(result, TrackwayError)]
    agent.released.set()
    await async_until(lambda: RunFolder(Path(closed.folder)).ended())
    await third.close()

    assert (closed.state, closed.interrupted) == (RunState.STOPPED, True)
    assert closed.message == "interrupted after step 2; it can be resumed"
    assert (resumed.state, resumed.restarts, resumed.interrupted) == (RunState.STARTING, 1, False)
    assert refused.code is ErrorCode.CONFLICT
    info = pod.runs.registry.info("moved")
    assert (info.state, info.restarts, info.interrupted) == (RunState.FINISHED, 1, False)
    assert [row.step for row in RunFolder(Path(closed.folder)).rows()] == [0, 1, 2, 3, 4]


@pytest.mark.extended
async def test_another_pod_leaves_a_run_alone_as_long_as_its_process_beats(
    runs: RunManager, pod: Pod, agent, request_of
):
    agent.holding_at = 0
    await runs.start(request_of("live"))
    await async_until(lambda: held_at(agent, 0))
    folder = RunFolder(Path(runs.registry.info("live").folder))
    standing = (
        f"running in another trainer service, on {this_machine().host} (stop it there; if that host is lost, try again "
        "after 30 s without a heartbeat)"
    )

    for calls in (pod.runs.resume("live"), pod.runs.start(request_of("second"))):
        with pytest.raises(TrackwayError) as refused:
            await calls
        assert refused.value.message.startswith(f"run 'live' is {standing} and one run is active at a time")
    with pytest.raises(TrackwayError) as not_here:
        await pod.runs.stop("live")
    beat = beat_of(folder)
    await async_until(lambda: beat_of(folder) > beat)
    pod.now += 10 * DEAD_AFTER_S
    waits = await resume_interrupted(pod.runs)

    assert (refused.value.code, not_here.value.code) == (ErrorCode.CONFLICT, ErrorCode.CONFLICT)
    assert not_here.value.message == f"expected an active run to stop, got run 'live', which is {standing}"
    assert (waits, pod.runs.registry.info("live").state) == (None, RunState.RUNNING)


@pytest.mark.extended
async def test_a_killed_service_and_a_lost_machine_interrupt_a_run_that_then_goes_on_by_itself(
    services: ServiceUrls, pod: Pod, agent, request_of, tmp_path: Path
):
    agent.holding_at = 2
    folder, log = RunFolder(tmp_path / "outputs" / "killed"), tmp_path / "service.log"

    port = free_port()
    with service(port, services, folder.path.parent, log) as first:
        await async_until(lambda: "Uvicorn running" in log.read_text())
        await TrainerClient(f"http://127.0.0.1:{port}").start(request_of("killed"))
        await async_until(lambda: held_at(agent, 2))
        first.kill()
        await async_until(folder.ended)
    orphaned = folder.info()
    asked = len(agent.requests)
    with service(port, services, folder.path.parent, log) as second:
        await async_until(lambda: len(agent.requests) > asked)
        resumed = folder.info()
        learner = pid_of(pod.runs, "killed")
        try:
            os.kill(learner, signal.SIGSTOP)  # a machine takes both with it
            second.kill()
            second.wait()
        finally:
            os.kill(learner, signal.SIGKILL)

    first_look = pod.runs.registry.info("killed")
    pod.now += DEAD_AFTER_S
    lost = pod.runs.registry.info("killed")
    agent.released.set()
    await resume_interrupted(pod.runs)
    command = Path(f"/proc/{pid_of(pod.runs, 'killed')}/cmdline").read_text()
    await async_until(folder.ended)

    assert (orphaned.state, orphaned.interrupted, orphaned.step) == (RunState.STOPPED, True, 1)
    assert (resumed.state, resumed.restarts, resumed.interrupted) == (RunState.RUNNING, 1, False)
    assert first_look.state is RunState.RUNNING
    assert (lost.state, lost.interrupted, lost.restarts) == (RunState.FAILED, True, 1)
    assert (folder.info().state, folder.info().restarts) == (RunState.FINISHED, 2)
    assert "--skip-damaged" in command.split("\0")
    assert [row.step for row in folder.rows()] == [0, 1, 2, 3, 4]
