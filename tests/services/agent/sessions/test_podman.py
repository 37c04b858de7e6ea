"""An external agent in a container that podman runs: an empty image, with this machine's Python mounted."""

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.agent.sessions.external_services import Serve
from tests.services.agent.sessions.test_session import ANSWER, COUNT
from tests.waiting import async_until
from trackway.agent.sessions.external import guarded, program_of
from trackway.agent.settings import ExternalSettings
from trackway.wire.errors import ErrorCode
from trackway.wire.sessions import SessionAccess
from trackway.wire.trajectory import StopReason

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "examples" / "agents" / "openai_script.py"
PODMAN = ROOT / "deploy" / "docker" / "podman.sh"
MOUNTED = ("/usr", "/bin", "/lib", "/lib64", "/etc/ssl", sys.prefix, sys.base_prefix, str(SCRIPT.parent))
STAYS = "trap '' TERM; echo begun; while :; do sleep 0.1; done"
"""A shell that SIGTERM does not end."""

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.pods,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("podman"), reason="containers need podman, as root"),
]


def podman(*arguments: str, stdin: bytes | None = None) -> str:
    done = subprocess.run([PODMAN, *arguments], input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    name, packed = f"trackway-empty-{uuid.uuid4().hex[:8]}", io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    podman("import", "-", name, stdin=packed.getvalue())
    yield name
    podman("rmi", name)


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that podman needs here, as `podman.sh` writes them."""
    shown = podman("info", "--format", "json")
    assert json.loads(shown)["host"]["os"] == "linux"
    own = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trackway" / "containers.conf"
    monkeypatch.setenv("CONTAINERS_CONF", os.environ.get("CONTAINERS_CONF", str(own)))


def container(image: str, command: list[str], **settings: object) -> ExternalSettings:
    mounts = [f"--volume={folder}:{folder}:ro" for folder in dict.fromkeys(MOUNTED) if Path(folder).exists()]
    body = {"image": image, "command": command, "engine": "podman", "options": mounts}
    return ExternalSettings.model_validate({"container": body, **settings})


def containers(image: str) -> list[str]:
    """The names of all containers of the image, also of those that have ended."""
    lines = podman("ps", "--all", "--format", "{{.Image}} {{.Names}}").splitlines()
    return [line.split()[1] for line in lines if image in line]


async def test_a_container_gets_its_row_and_its_calls_become_a_row(serving: Serve, image: str) -> None:
    async with serving(container(image, [sys.executable, str(SCRIPT)])) as services:
        trajectory = await services.say(COUNT, ANSWER, agent_name="external")

    assert trajectory.error is None, trajectory.error.message
    assert (trajectory.log, trajectory.stop_reason, len(trajectory.turns)) == ("", StopReason.ANSWERED, 2)
    assert containers(image) == []


async def test_a_container_past_the_time_limit_is_removed_though_it_ignores_sigterm(serving: Serve, image: str) -> None:
    async with serving(container(image, ["/bin/sh", "-c", STAYS])) as services, asyncio.timeout(30):
        trajectory = await services.say(agent_name="external", limits__timeout_s=3.0)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert trajectory.log == "begun\n" and containers(image) == []


async def test_a_container_is_removed_with_the_service_that_was_killed(image: str) -> None:
    access = SessionAccess(session_id=f"s-{uuid.uuid4().hex}", base_url="http://127.0.0.1:9/v1", api_key="k")
    guard = guarded(program_of(container(image, ["/bin/sh", "-c", STAYS]), access), 3)
    service = (
        "import os, signal, subprocess; held, holding = os.pipe(); os.dup2(held, 3);"
        f"guard = subprocess.Popen({guard!r}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=(3,));"
        "assert guard.stdout.readline() == b'begun\\n'; os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", service)
    assert await process.wait() == -9

    await async_until(lambda: containers(image) == [], 30.0)
