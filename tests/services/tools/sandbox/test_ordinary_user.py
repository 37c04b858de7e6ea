"""The sandbox of a service that does not run as root: bubblewrap makes a user namespace for it."""

import json
import os
import subprocess
import sys

import pytest

from tests.services.tools.python_server import leaving, processes_with

pytestmark = pytest.mark.slow

NOBODY = 65534
SERVICE = """
import asyncio, json, sys
from trackway.tools.sandbox import Interpreter, SandboxSettings, launcher_for
async def serve():
    interpreter = Interpreter(await launcher_for(SandboxSettings(memory_mb=256, processes=16, disk_mb=4)))
    texts = [(await interpreter.run(code, 10)).text for code in json.loads(sys.argv[1])]
    await interpreter.stop()
    print(json.dumps(texts))
asyncio.run(serve())
"""


def as_nobody(python: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [python, *arguments],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
    )


@pytest.fixture
def python() -> str:
    """An interpreter with our packages that a user without rights can start."""
    if os.geteuid() != 0:
        pytest.skip("already an ordinary user: every other test of the sandbox is this one")
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            tried = as_nobody(python, "-c", "import trackway.tools.sandbox")
        except OSError:
            continue
        if tried.returncode == 0:
            return python
    pytest.skip("no Python with our packages that an ordinary user may start")


@pytest.mark.program("bwrap")
@pytest.mark.usefixtures("isolation")
def test_the_layers_hold_for_an_ordinary_user(python: str) -> None:
    fork = """
import os, time
try:
    for count in range(100):
        if os.fork() == 0: time.sleep(60)
except OSError as error: print(error.strerror, 0 < count < 16)
"""
    codes = {
        "6 * 7": "42\n",
        "import os\nos.getuid(), os.getppid()": "(1000, 1)\n",
        "print(repr(open('/proc/1/environ').read()))": "''\n",
        "import sys\nos.listdir('/proc/1/root') == os.listdir('/'), os.path.exists('/etc/passwd')": "(True, False)\n",
        "os.kill(1, 9)\nprint('alive')": "alive\n",
        f"{leaving('left-by-nobody')}print('left')": "left\n",
        fork: "Resource temporarily unavailable True\n",
    }

    run = as_nobody(python, "-c", SERVICE, json.dumps([*codes]))

    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout) == [*codes.values()]
    assert processes_with("left-by-nobody") == []
