"""Processes that code leaves behind: none lives longer than the instance, the call or the server they belong to."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.services.tools.python_server import Run, leaving, processes_with, served
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.tools.builtin.python import PythonTool
from trackway.tools.sandbox.process import SandboxedProcess
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.program("bwrap"), pytest.mark.usefixtures("isolation")]


async def test_they_end_with_the_instance(running: Run) -> None:
    async with served(running) as server:
        session = await server.session()
        await session(leaving("left-by-release"))
        await async_until(lambda: len(processes_with("left-by-release")) == 1)
        await session.release()
        assert processes_with("left-by-release") == []


COUNTING = """
import os, threading
def count(name):
    with open(name, "w") as file:
        while True:
            file.write(".")
            file.flush()
threading.Thread(target=count, args=("thread",), daemon=True).start()
if os.fork() == 0: count("process")
def sizes(): return [os.path.getsize(name) for name in ("thread", "process")]
while min(sizes() if os.path.exists("process") and os.path.exists("thread") else [0]) == 0: pass
"""


async def test_they_have_no_time_between_two_calls(running: Run) -> None:
    async with served(running) as server:
        session = await server.session()
        await session(COUNTING)
        [interpreter] = [pid for pid in processes_with("answer_for_ever") if _threads(pid) > 1]
        await async_until(lambda: _states(interpreter) == {"T"})
        before = _ticks(interpreter)
        await asyncio.to_thread(_burn, 0.5)
        after = _ticks(interpreter)
        grown = await session("import time\nsmall = sizes()\ntime.sleep(0.3)\n[a < b for a, b in zip(small, sizes())]")

    assert after == before
    assert grown == "[True, True]\n"


def _burn(cpu_s: float) -> None:
    """Takes that much of this thread's CPU time, in which others could run as well."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def _states(pid: int) -> set[str]:
    """The states of the process's threads; ``T`` is stopped, which a thread is a moment after it was told to."""
    return {_stat(f"{pid}/task/{thread}")[0] for thread in os.listdir(f"/proc/{pid}/task")}


def _ticks(pid: int) -> int:
    """Clock ticks of CPU time that the process has used."""
    return sum(map(int, _stat(str(pid))[11:13]))


def _stat(process: str) -> list[str]:
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(") ")[2].split()


async def test_they_end_with_a_one_shot_call(running: Run) -> None:
    async with served(running, stateful=False) as server:
        await server.once(leaving("left-by-one-shot"))
        assert processes_with("left-by-one-shot") == []


@ENDS_SOON
async def test_they_end_with_a_call_beyond_its_deadline(running: Run) -> None:
    async with served(running, timeout_s=1.0) as server:
        session = await server.session()
        await session(leaving("left-by-deadline") + "while True: pass")
        assert processes_with("left-by-deadline") == []


@ENDS_SOON
async def test_they_end_when_the_server_cuts_the_call_off(running: Run) -> None:
    async with served(running, call_timeout_s=1.0) as server:
        session = await server.session()
        with pytest.raises(TrackwayError) as caught:
            await session(leaving("left-by-cut") + "while True: pass")
        assert caught.value.code is ErrorCode.TOOL_TIMEOUT
        assert processes_with("left-by-cut") == []


async def test_they_end_with_the_interpreter(running: Run) -> None:
    async with served(running) as server:
        session = await server.session()
        await session(leaving("left-by-exit") + "os._exit(0)")
        assert processes_with("left-by-exit") == []


def test_a_sandbox_has_ended_when_its_first_process_has_and_not_when_bubblewrap_has() -> None:
    bwrap, first = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "600"])
    bwrap.wait(60)
    info, info_end = os.pipe()
    os.write(info_end, json.dumps({"child-pid": first.pid}).encode())
    os.close(info_end)
    ours, theirs = socket.socketpair()
    process = SandboxedProcess(bwrap, ours, os.fdopen(info, "rb", buffering=0))
    process.ready()

    before = process.ended
    process.kill()
    first.wait(60)

    assert (before, process.ended) == (False, True)
    process.close()
    theirs.close()


async def test_they_end_with_an_abandoned_instance(running: Run) -> None:
    async with served(running, {"instance_ttl_s": 0.2, "reap_interval_s": 0.1}) as server:
        await (await server.session())(leaving("left-by-idling"))
        await async_until(lambda: processes_with("left-by-idling") == [])


async def test_they_end_with_the_server(running: Run) -> None:
    async with served(running) as server:
        await (await server.session())(leaving("left-by-server"))
        await async_until(lambda: len(processes_with("left-by-server")) == 1)
    assert processes_with("left-by-server") == []


async def test_they_end_before_the_tool_is_closed_when_their_release_was_cancelled() -> None:
    tool = PythonTool.default()
    await tool.start()
    await tool.execute("instance", {"code": leaving("left-by-cancelled-release")})
    release = asyncio.create_task(tool.release("instance"))
    await asyncio.sleep(0)  # it has killed them, and waits for their end
    release.cancel()
    await asyncio.wait([release])
    await tool.close()

    assert processes_with("left-by-cancelled-release") == []
    assert tool._launcher is not None and not tool._launcher._living


SERVICE = """
import asyncio, sys
from trackway.tools.builtin.python import PythonTool
async def serve():
    tool = PythonTool.default()
    await tool.start()
    await tool.execute("instance", {"code": sys.argv[1]})
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(serve())
"""


async def test_they_end_with_a_service_that_is_killed() -> None:
    command = [sys.executable, "-c", SERVICE, leaving("left-by-kill")]
    service = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert service.stdout is not None
        with service.stdout as words:
            assert await asyncio.to_thread(words.readline) == b"ready\n"
        # The service's own command line has the marker too.
        await async_until(lambda: len(processes_with("left-by-kill")) == 2)
    finally:
        service.send_signal(signal.SIGKILL)
        service.wait(60)
    await async_until(lambda: processes_with("left-by-kill") == [])
