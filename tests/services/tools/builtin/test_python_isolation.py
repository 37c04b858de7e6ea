"""Whether the tool starts at all, and what `allow_unsandboxed` does where code cannot be isolated."""

import logging
from pathlib import Path

import pytest

from tests.services.tools.python_server import LOST, Run, processes_with, served
from tests.waiting import async_until
from trackway.tools.sandbox import SandboxUnavailableError

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder where programs are looked for; empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def powerless(programs: Path) -> None:
    """A bubblewrap that may make no namespace."""
    script = programs / "bwrap"
    script.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    script.chmod(0o755)


@pytest.mark.usefixtures("programs")
async def test_without_bubblewrap_the_server_does_not_start_and_says_what_to_do(running: Run) -> None:
    with pytest.raises(SandboxUnavailableError) as caught:
        async with served(running):
            raise AssertionError("expected no server")

    message = str(caught.value)
    assert message.startswith("code cannot be isolated: expected bubblewrap (`bwrap`) on PATH, got none; ")
    assert "`apt-get install bubblewrap`" in message and "allow_unsandboxed=true" in message


@pytest.mark.usefixtures("powerless")
async def test_without_namespaces_the_server_does_not_start_and_repeats_what_bubblewrap_said(running: Run) -> None:
    with pytest.raises(SandboxUnavailableError) as caught:
        async with served(running):
            raise AssertionError("expected no server")

    assert "bwrap: No permissions to create new namespace" in str(caught.value)
    assert "user.max_user_namespaces" in str(caught.value)


@pytest.mark.program("bwrap")
async def test_a_python_that_is_none_is_named(running: Run) -> None:
    with pytest.raises(ValueError, match="expected `python` to be the path of a Python interpreter, got '/bin/false'"):
        async with served(running, python="/bin/false"):
            raise AssertionError("expected no server")


@pytest.mark.usefixtures("powerless")
async def test_unsandboxed_code_runs_where_that_is_allowed_and_the_log_says_so(
    running: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trackway.tools"):
        async with served(running, allow_unsandboxed=True, timeout_s=3.0) as server:
            session = await server.session()
            texts = [await session(code) for code in ("x = 6", "x * 7", "while True: pass", "1 + 1")]
            folder = await session("import os\nprint(os.getcwd(), end='')")
            existed = Path(folder).is_dir()

    assert texts == ["[no output]", "42\n", f"[the interpreter ended: the call ran longer than 3 s; {LOST}", "2\n"]
    assert (existed, Path(folder).exists()) == (True, False)
    warnings = [record.message for record in caplog.records if record.name == "trackway.tools"]
    assert len(warnings) == 1
    assert warnings[0].startswith("code runs with this service's own rights to files, network and processes: ")


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("hoard = bytearray(1 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(8 << 20))", "OSError: [Errno 27] File too large"),
        ("import os\n'TRACKWAY_SECRET' in os.environ", "False"),
    ],
)
async def test_unsandboxed_code_has_limits_and_an_environment_of_its_own(
    running: Run, monkeypatch: pytest.MonkeyPatch, code: str, last_line: str
) -> None:
    monkeypatch.setenv("TRACKWAY_SECRET", "hunter2")
    async with served(running, allow_unsandboxed=True) as server:
        text = await (await server.session())(code)

    assert text.splitlines()[-1] == last_line


@pytest.mark.usefixtures("programs")
async def test_unsandboxed_processes_end_with_the_instance(running: Run) -> None:
    code = (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', 'left-bare'])"
    )
    async with served(running, allow_unsandboxed=True) as server:
        session = await server.session()
        await session(code)
        await async_until(lambda: len(processes_with("left-bare")) == 1)
        await session.release()
    await async_until(lambda: processes_with("left-bare") == [])


@pytest.mark.usefixtures("programs")
async def test_an_unsandboxed_interpreter_s_end_is_seen_though_a_daemon_holds_its_channel(running: Run) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(8)\n    os._exit(0)\nos._exit(5)"
    async with served(running, allow_unsandboxed=True, timeout_s=4.0) as server:
        text = await (await server.session())(code)

    assert text == f"[the interpreter ended: it exited with status 5; {LOST}"
