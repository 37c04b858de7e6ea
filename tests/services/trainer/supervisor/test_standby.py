"""The process that waits for the first run; runs that take it are in test_manager.py."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.services.trainer.real_runs import until
from trackway.trainer.app import create_app
from trackway.trainer.settings import TrainerSettings, names_handed_over
from trackway.trainer.supervisor.standby import Standby

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

SECRETS = dict.fromkeys(names_handed_over(), "s3cret")


@pytest.fixture
async def standby() -> AsyncIterator[Standby]:
    standby = Standby(wait_s=60)
    yield standby
    await standby.close()


async def prepared(standby: Standby) -> int:
    """The process, started by the test itself: pytest changes the environment between a fixture and its test."""
    await standby.prepare()
    assert standby.pid is not None
    return standby.pid


def waiting_processes() -> list[psutil.Process]:
    """The children of this process that wait for a run."""
    alive = (process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE)
    return [process for process in alive if "--standby" in process.cmdline()]


async def test_an_unused_process_ends_by_its_deadline():
    standby = Standby(wait_s=0.5)
    pid = await prepared(standby)

    await until(lambda: not psutil.pid_exists(pid), 20)

    assert standby.pid is None


async def test_close_ends_it(standby: Standby):
    pid = await prepared(standby)

    await standby.close()

    assert (psutil.pid_exists(pid), standby.pid) == (False, None)


async def test_without_a_time_to_wait_there_is_no_process():
    standby = Standby(wait_s=0)
    await standby.prepare()

    assert (standby.pid, waiting_processes()) == (None, [])
    await standby.close()


async def test_it_is_out_of_reach_of_ctrl_c_and_has_no_secret(standby: Standby, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    process = psutil.Process(await prepared(standby))
    await until(lambda: bool(process.environ()), 20)  # empty for an instant while the program replaces its parent's

    environment, command = process.environ(), process.cmdline()

    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    names = names_handed_over()
    assert {name: environment[name] for name in names} == dict.fromkeys(names, "")
    assert "s3cret" not in (*environment.values(), *command)


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
async def test_a_dead_process_is_not_taken(standby: Standby, tmp_path: Path, signal_: signal.Signals):
    pid = await prepared(standby)
    os.kill(pid, signal_)
    await until(lambda: not psutil.pid_exists(pid), 20)

    assert await standby.take(["run"], tmp_path / "log", SECRETS) is None


async def test_a_process_with_another_environment_than_the_run_would_get_is_not_taken_and_ends(
    standby: Standby, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pid = await prepared(standby)
    monkeypatch.setenv("OF_THE_RUN", "1")

    assert await standby.take(["run"], tmp_path / "log", SECRETS) is None
    await until(lambda: not psutil.pid_exists(pid), 20)


async def test_it_is_taken_once_and_writes_to_the_runs_log(standby: Standby, tmp_path: Path):
    await prepared(standby)

    process = await standby.take(["--no-such-option"], tmp_path / "log", SECRETS)
    again = await standby.take(["--no-such-option"], tmp_path / "log", SECRETS)

    assert process is not None and again is None
    assert await asyncio.wait_for(process.wait(), 60) == 2
    assert "trackway.trainer.worker: error: " in (tmp_path / "log").read_text()


async def test_a_service_has_one_as_long_as_its_setting_says(running, tmp_path: Path):
    settings = TrainerSettings(outputs_dir=str(tmp_path / "outputs"), weights_url=str(tmp_path), standby_s=60)
    async with running(create_app(settings)):
        [process] = waiting_processes()
        command = process.cmdline()

    assert command[-4:] == ["-m", "trackway.trainer.worker", "--standby", "90.0"]
    assert not process.is_running()
