"""A server beside us: healthy, late, dead, stubborn; and nothing of it outlives us."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.waiting import async_until
from trackway.rollout.engines.remote.server import SideProcess
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
print("child", child.pid, flush=True)
{then}
"""
SLEEP = "import time; time.sleep(600)"


def python(code: str, log: Path, **env: str) -> SideProcess:
    return SideProcess([sys.executable, "-c", code], env, log, "http://nowhere")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "server.log"


def says(log: Path, text: str) -> Callable[[], Awaitable[bool]]:
    """Healthy when its log has the text after the line of the command."""

    async def healthy() -> bool:
        return text in log.read_text().partition("\n")[2]

    return healthy


def pid_of_child(log: Path) -> int:
    return int(log.read_text().rpartition("child ")[2].split()[0])


def running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int, within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while running(pid) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return not running(pid)


async def test_a_server_is_started_and_stopped_and_its_output_is_in_the_log(log: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    process = SideProcess(command, {"PYTHONUNBUFFERED": "1"}, log, f"http://127.0.0.1:{port}")

    async def healthy() -> bool:
        async with httpx.AsyncClient() as client:
            return (await client.get(process.url)).status_code == 200

    await process.start(healthy, deadline_s=60)
    assert process.alive
    process.check()
    await process.stop()
    assert not process.alive
    assert log.read_text().startswith(f"$ {sys.executable} -m http.server {port}")
    assert "Serving HTTP" in log.read_text()


async def test_the_environment_is_ours_without_our_python_path_and_secrets_plus_the_given(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("TRACKWAY_TOKEN", "secret")
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("PATH", "/bin")
    names = ("PYTHONPATH", "TRACKWAY_TOKEN", "KEPT", "NEW", "PATH")
    code = f"import os, time; print([os.environ.get(n) for n in {names}], flush=True); "
    process = python(code + "time.sleep(600)", log, NEW="2")
    await process.start(says(log, f"[None, None, '1', '2', '{Path(sys.executable).parent}:/bin']"), deadline_s=60)
    await process.stop()


async def test_a_server_that_is_late_is_ended_and_the_error_shows_its_log(log: Path) -> None:
    process = python(f"print('child', __import__('os').getpid(), flush=True); {SLEEP}", log)
    with pytest.raises(
        TrackwayError, match=r"healthy server within 0\.5 s.*raise engine_start_s(.|\n)*child \d+"
    ) as raised:
        await process.start(says(log, "never"), deadline_s=0.5)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert not running(pid_of_child(log))


async def test_a_health_check_that_hangs_is_late_too(log: Path) -> None:
    async def hang() -> bool:
        return await asyncio.Future()

    with pytest.raises(TrackwayError, match=r"healthy server within 0\.3 s"):
        await python(SLEEP, log).start(hang, deadline_s=0.3)


async def test_a_server_that_dies_at_its_start_fails_at_once_with_status_and_log(log: Path) -> None:
    process = python("import sys; print('no GPU here', flush=True); sys.exit(3)", log)
    with pytest.raises(TrackwayError, match=r"got its exit.* with status 3(.|\n)*no GPU here") as raised:
        await process.start(says(log, "never"), deadline_s=60)
    assert raised.value.code is ErrorCode.ENGINE_FAILED


async def test_an_interpreter_that_is_not_there_fails_with_its_name(log: Path) -> None:
    process = SideProcess(["/no/such/python"], {}, log, "http://nowhere")
    with pytest.raises(TrackwayError, match=r"No such file or directory: '/no/such/python'"):
        await process.start(says(log, "never"), deadline_s=60)


async def test_a_server_killed_later_is_noticed_with_status_and_log(log: Path) -> None:
    process = python(f"print('child', __import__('os').getpid(), flush=True); {SLEEP}", log)
    await process.start(says(log, "child"), deadline_s=60)
    os.kill(pid_of_child(log), signal.SIGKILL)
    with pytest.raises(TrackwayError, match=r"with status -9(.|\n)*child \d+") as raised:
        await process.settle(within_s=5)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert not process.alive
    await process.stop()


async def test_only_the_end_of_a_long_log_is_shown(log: Path) -> None:
    process = python("print('first'); print('x' * 5000); print('last')", log)
    with pytest.raises(TrackwayError, match=r"x{900}\nlast$") as raised:
        await process.start(says(log, "never"), deadline_s=60)
    assert "first" not in raised.value.message


async def test_stop_kills_a_server_and_its_child_that_ignore_term(log: Path) -> None:
    code = PARENT.format(child=STUBBORN, then=f"time.sleep(1)\n{STUBBORN}")
    process = python(code, log)
    await process.start(says(log, "deaf\ndeaf"), deadline_s=60)
    began = time.monotonic()
    await process.stop(grace_s=0.3)
    assert 0.3 <= time.monotonic() - began < 60
    assert not running(pid_of_child(log))


async def test_stop_lets_a_server_end_by_itself_within_the_grace(log: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('bye', flush=True)));"
        "print('up', flush=True); time.sleep(600)"
    )
    process = python(code, log)
    await process.start(says(log, "up"), deadline_s=60)
    began = time.monotonic()
    await process.stop(grace_s=200)
    assert time.monotonic() - began < 60
    assert log.read_text().endswith("bye\n")


async def test_children_of_a_server_that_died_are_ended_though_they_ignore_term(log: Path) -> None:
    then = f"print('server', __import__('os').getpid(), flush=True)\n{SLEEP}"
    process = python(PARENT.format(child=STUBBORN, then=then), log)
    await process.start(says(log, "deaf"), deadline_s=60)
    await async_until(lambda: "server " in log.read_text().partition("\n")[2])
    os.kill(int(log.read_text().rpartition("server ")[2].split()[0]), signal.SIGKILL)
    with pytest.raises(TrackwayError):
        await process.settle(within_s=10)
    assert await gone(pid_of_child(log))
    await process.stop()


async def test_stop_may_be_called_twice_and_before_the_start(log: Path) -> None:
    process = python(SLEEP, log)
    await process.stop()
    await process.start(says(log, ""), deadline_s=60)
    await process.stop()
    await process.stop()
    assert not process.alive


async def test_a_cancelled_start_leaves_no_process(log: Path) -> None:
    process = python(f"print('child', __import__('os').getpid(), flush=True); {SLEEP}", log)
    start = asyncio.create_task(process.start(says(log, "never"), deadline_s=60))
    await async_until(lambda: log.exists() and "child " in log.read_text())
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not running(pid_of_child(log))


OWNER = """
import asyncio, sys
from pathlib import Path
from trackway.rollout.engines.remote.server import SideProcess
log = Path(sys.argv[1])
async def healthy(): return "deaf" in log.read_text().partition("\\n")[2]
async def main():
    process = SideProcess([sys.executable, "-c", sys.argv[2]], {}, log, "http://nowhere", Path(sys.argv[3]))
    await process.start(healthy, 20)
    print("up", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_stubborn_server_its_child_and_its_folder_end_when_their_owner_is_killed(
    log: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "file").touch()
    code = PARENT.format(child=SLEEP, then=f"print('server', __import__('os').getpid(), flush=True)\n{STUBBORN}")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log), code, str(folder)], stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout.readline() == b"up\n"
        server, child = int(log.read_text().rpartition("server ")[2].split()[0]), pid_of_child(log)
        assert running(server)
        assert running(child)
        assert folder.exists()
        owner.kill()
    assert await gone(server, within_s=60)
    assert await gone(child)
    await async_until(lambda: not folder.exists(), within_s=60)


async def test_a_server_ends_when_its_guard_is_killed(log: Path) -> None:
    process = python(f"print('child', __import__('os').getpid(), flush=True); {SLEEP}", log)
    await process.start(says(log, "child"), deadline_s=60)
    os.kill(_parent(pid_of_child(log)), signal.SIGKILL)
    assert await gone(pid_of_child(log))
    assert not process.alive
    await process.stop()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
