"""The readiness probe of a pod asks each replica on it through the replica's own socket, as a process of its own."""

import os
import socket
import subprocess
import sys
import time
from asyncio import to_thread
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from trackway.deploy import probe
from trackway.deploy.graph import Replica
from trackway.serving import AuthSettings
from trackway.tools.settings import ToolsSettings
from trackway.wire.service import Ready

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.usefixtures("collector")]

READY, PAUSED = Ready(ready=True), Ready(ready=False, reason="the engine is paused")
TOKENS = AuthSettings.model_validate({"tokens": {"trainer": {"secret": "0123456789abcdef0123456789abcdef"}}})


class Pod:
    """Replicas that share a folder of sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = AsyncExitStack()

    async def start(self, ready: Ready | None = None, auth: AuthSettings | None = None) -> Replica:
        """A replica of the tool server; with `ready` it says that instead of what is true."""
        settings = ToolsSettings(probe_dir=str(self.folder), tools=["calculator"], auth=auth or AuthSettings())
        replica = Replica("tools", settings)
        app = replica._app
        if ready:
            replica._app = FastAPI()
            replica._app.add_api_route("/ready", lambda: JSONResponse(ready.model_dump()))
        await self.stack.enter_async_context(app.router.lifespan_context(app))
        return replica


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    with TemporaryDirectory() as folder:  # the path of a Unix socket is short
        pod = Pod(Path(folder) / "probe")
        async with pod.stack:
            yield pod


def ask(pod: Pod, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the probe; blocks the event loop unless it is called in a thread."""
    command = [sys.executable, "-m", "trackway.deploy.probe", *arguments]
    environment = {**os.environ, "TRACKWAY_PROBE_DIR": str(pod.folder)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout.strip() + ended.stderr.strip()


def names(pod: Pod) -> list[str]:
    return sorted(path.stem for path in pod.folder.glob("*.sock"))


async def test_a_ready_replica_passes_also_where_callers_need_tokens(pod: Pod) -> None:
    await pod.start(auth=TOKENS)
    assert await to_thread(ask, pod, "tools") == (0, "ready")


async def test_a_replica_tells_its_requests_in_flight_without_the_probe_itself(pod: Pod) -> None:
    replica = await pod.start()
    [path] = pod.folder.glob("*.sock")
    replica._app.state.metrics.in_flight.inc(2)
    told = await to_thread(probe.asked, path, time.monotonic() + 30)
    assert told == {**READY.model_dump(), "in_flight": 2}


async def test_one_paused_replica_fails_its_pod_although_its_sibling_is_ready(pod: Pod) -> None:
    await pod.start(READY)
    [ready] = names(pod)
    await pod.start(PAUSED)
    [paused] = set(names(pod)) - {ready}
    assert await to_thread(ask, pod) == (1, f"replica {paused}: the engine is paused")


async def test_a_replica_whose_event_loop_is_blocked_fails(pod: Pod) -> None:
    await pod.start(READY)
    assert ask(pod, "--timeout", "0.5") == (1, f"replica {names(pod)[0]} does not answer: timed out")


async def test_a_replica_that_cannot_answer_fails(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: Replica) -> Ready:
        raise ConnectionResetError

    monkeypatch.setattr(Replica, "_ready", broken)
    await pod.start()
    code, reason = await to_thread(ask, pod)
    assert (code, reason.partition(":")[0]) == (1, f"replica {names(pod)[0]} does not answer")


async def test_a_killed_replica_no_longer_counts(pod: Pod) -> None:
    await pod.start(READY)
    with socket.socket(socket.AF_UNIX) as listening:  # closed without its file, as by SIGKILL
        listening.bind(str(pod.folder / "reward-killed.sock"))
    assert await to_thread(ask, pod) == (0, "ready")
    assert [name.partition("-")[0] for name in names(pod)] == ["tools"]
    assert await to_thread(ask, pod, "tools", "reward") == (1, "no replica of reward runs here")


async def test_a_replica_that_drains_no_longer_counts(pod: Pod) -> None:
    replica = await pod.start(READY)
    assert replica._direct
    seen: list[list[str]] = []
    replica._direct._living = lambda: seen.append(names(pod)) or 0  # asked when the drain begins
    await pod.stack.aclose()
    assert seen == [[]]


async def test_a_pod_without_replicas_is_not_ready(pod: Pod) -> None:
    assert await to_thread(ask, pod) == (1, "no replica of any service runs here")


def test_a_probe_without_its_folder_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRACKWAY_PROBE_DIR", raising=False)
    assert probe.main([]) == 2
    assert capsys.readouterr().err.endswith("set TRACKWAY_PROBE_DIR\n")


def test_the_probe_imports_the_standard_library_only() -> None:
    code = "import sys; before = {*sys.modules}; import trackway.deploy.probe; print(*sys.modules.keys() - before)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in ended.stdout.split()} - sys.stdlib_module_names <= {"trackway"}
