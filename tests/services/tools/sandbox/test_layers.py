"""The layers one by one: what holds when the one above it is gone."""

import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from trackway.tools.sandbox import Interpreter, Launcher, SandboxSettings, launcher_for

pytestmark = [pytest.mark.anyio, pytest.mark.program("bwrap"), pytest.mark.usefixtures("isolation")]


@pytest.fixture
async def launcher() -> Launcher:
    return await launcher_for(SandboxSettings(memory_mb=256, processes=16, disk_mb=4))


@pytest.fixture
async def interpreter(launcher: Launcher) -> AsyncIterator[Interpreter]:
    interpreter = Interpreter(launcher)
    yield interpreter
    await interpreter.stop()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


async def test_without_the_filter_the_network_namespace_has_nobody_to_connect_to(
    launcher: Launcher, interpreter: Interpreter, listener: socket.socket
) -> None:
    launcher._rules = None  # as on a machine whose call numbers are not known
    port = listener.getsockname()[1]
    near = await interpreter.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)", 10)
    far = await interpreter.run("socket.create_connection(('192.0.2.1', 80), 1)", 10)

    assert near.text.splitlines()[-1] == "ConnectionRefusedError: [Errno 111] Connection refused"
    assert far.text.splitlines()[-1] == "OSError: [Errno 101] Network is unreachable"
    with pytest.raises(BlockingIOError):
        listener.accept()


async def test_the_code_has_no_right_beyond_an_ordinary_user_s(interpreter: Interpreter) -> None:
    code = """
lines = {line.split(":")[0]: line.split()[-1] for line in open("/proc/self/status")}
[lines[name] for name in ("CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp")]
"""
    outcome = await interpreter.run(code, 10)

    assert outcome.text == f"['{'0' * 16}', '{'0' * 16}', '{'0' * 16}', '1', '2']\n"


async def test_the_kernel_ends_the_sandbox_first_when_memory_runs_out(interpreter: Interpreter) -> None:
    outcome = await interpreter.run("print(open('/proc/self/oom_score_adj').read())", 10)

    assert outcome.text == "1000\n\n"


async def test_as_root_each_sandbox_has_a_user_of_its_own(launcher: Launcher, interpreter: Interpreter) -> None:
    other_interpreter = Interpreter(launcher)
    users = [
        int((await started.run("import os\nos.getuid()", 10)).text) for started in (interpreter, other_interpreter)
    ]
    await other_interpreter.stop()

    if os.geteuid() == 0:
        assert users[0] != users[1] and all(61184 <= user < 65520 for user in users)
    else:
        assert users == [1000, 1000]


async def test_bubblewrap_itself_has_no_environment(interpreter: Interpreter) -> None:
    await interpreter.run("1", 10)
    assert interpreter._process is not None

    assert Path(f"/proc/{interpreter._process.popen.pid}/environ").read_bytes() == b""


async def test_a_python_with_packages_brings_them_and_further_paths_can_be_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("72")
    launcher = await launcher_for(SandboxSettings(python=sys.executable, read_only_paths=[str(data)]))
    interpreter = Interpreter(launcher)
    texts = [
        (await interpreter.run(code, 10)).text.splitlines()[-1]
        for code in (
            "import pydantic\npydantic.BaseModel.__name__",
            f"open({str(data)!r}).read()",
            f"import os\nos.unlink({str(data)!r})",
            f"os.listdir({str(tmp_path)!r})",
        )
    ]
    await interpreter.stop()

    assert texts[:2] == ["'BaseModel'", "'72'"]
    assert texts[2].startswith(("OSError: [Errno 16]", "OSError: [Errno 30]", "PermissionError: [Errno 13]"))
    assert texts[3] == "['data']"
    assert data.read_text() == "72"
