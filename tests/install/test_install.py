"""The wheel in fresh environments: each extra installs alone and starts what it is for, far from any clone."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tests.interpreters import python_of
from trackway.system import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"

SERVICES = {"tools", "reward", "agent", "rollout", "trainer"}
MODULES = {
    "service": ["trackway.serving"],
    "serve": ["ray.serve", "trackway.deploy.http_proxy"],
    "deploy": ["ray.serve", "trackway.deploy.runs.demo", "trackway.traces.page"],
    "console": ["duckdb", "trackway.console.app"],
    "mlflow": ["mlflow.tracking", "trackway.traces.mlflow_store"],
    "weave": ["weave", "trackway.traces.weave_store"],
    "wandb": ["wandb"],
    "tensorboard": ["tensorboard.compat.proto.event_pb2"],
    "tinker": ["tinker.proto.tinker_public_pb2"],
    "postgres": ["psycopg2"],
}
"""What extras that are no service are for."""
WITH_TORCH = {"rollout", "trainer", "cpu", "bench", "docs", "pictures", "dev", "stores"}
SIDE_PROCESSES = {"vllm", "sglang"}
"""Installed into environments of their own, of gigabytes."""
ALONE = sorted(SERVICES | MODULES.keys())
DATA = [
    f"trackway/deploy/bundled/{name}" for name in ("cpu.yaml", "tiny/model.safetensors", "tiny/chat_template.jinja")
]
DATA += ["trackway/traces/compare.html.j2", "trackway/console/page/index.html", "trackway/console/page/views/run.js"]
DATA += [f"trackway/run_config/presets/{name}.yaml" for name in ("default", "ppo_trainer", "tiny_demo")]


def _clean() -> dict[str, str]:
    """This process's environment without what would change an installation or a service."""
    ours = ("TRACKWAY_", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _run(
    command: list[str], cwd: Path, *, seconds: float = 300.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**_clean(), "COLUMNS": "100", "NO_COLOR": "1", **variables}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=seconds, check=False
    )


def _uv(*words: str, cwd: Path) -> str:
    ended = _run([UV, *words], cwd)
    assert ended.returncode == 0, f"uv {' '.join(words)}: {ended.stderr}"
    return ended.stdout


def _index() -> list[str]:
    """This machine's own wheels."""
    return [word for place in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", place)]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    _uv("build", "--quiet", "--python", sys.executable, "--out-dir", str(folder), str(ROOT), cwd=folder)
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


class Installed:
    """An environment that has the wheel with some extras."""

    def __init__(self, folder: Path, python: str, wheel: Path, extras: str) -> None:
        self.bin, self.folder = folder / "venv" / "bin", folder
        _uv("venv", "--quiet", "--python", python, str(folder / "venv"), cwd=folder)
        target = f"trackway{f'[{extras}]' if extras else ''} @ {wheel.as_uri()}"
        words = [
            "--quiet",
            "--python",
            str(self.bin / "python"),
            *_index(),
            "--constraint",
            str(ROOT / "constraints.txt"),
        ]
        _uv("pip", "install", *words, target, cwd=folder)

    def run(self, *words: str, seconds: float = 300.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """The end of a command of this environment, in an empty folder."""
        return _run([str(self.bin / words[0]), *words[1:]], self.folder, seconds=seconds, **variables)

    def out(self, *words: str, **variables: str) -> str:
        """The output of a command that must succeed."""
        ended = self.run(*words, seconds=300.0, **variables)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def answers(self, service: str) -> dict[str, object]:
        """What a service alone answers at /health, once it is ready."""
        port = free_port()
        tiny = self.out("python", "-c", "from trackway.deploy.bundled import TINY_MODEL; print(TINY_MODEL)").strip()
        settings = {
            "TRACKWAY_WEIGHTS_URL": str(self.folder / "weights"),
            "TRACKWAY_OUTPUTS_DIR": str(self.folder / "outputs"),
            "TRACKWAY_MODEL_PATH": tiny,
            "OMP_NUM_THREADS": "1",
        }
        command = [str(self.bin / "trackway"), "serve", service, "--port", str(port)]
        with (self.folder / "server.log").open("w+") as log:
            server = subprocess.Popen(command, cwd=self.folder, env={**_clean(), **settings}, stdout=log, stderr=log)
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                    _ready(client, server, log.name)
                    assert client.get("/metrics").status_code == 200
                    return client.get("/health").raise_for_status().json()
            finally:
                server.terminate()
                server.wait(30)


@retry(stop=stop_after_delay(120), wait=wait_fixed(0.2), retry=retry_if_exception_type(httpx.HTTPError), reraise=True)
def _ready(client: httpx.Client, server: subprocess.Popen[bytes], log: str) -> None:
    assert server.poll() is None, Path(log).read_text()
    client.get("/ready").raise_for_status()


Install = Callable[[str, str], Installed]


@pytest.fixture
def install(wheel: Path, tmp_path: Path) -> Iterator[Install]:
    """Installs extras for a version of Python; the environment is removed after the test."""

    def installed(extras: str, version: str) -> Installed:
        python = python_of(version)
        if python is None:
            pytest.skip(f"Python {version} is not installed")
        folder = tmp_path / "installed"
        folder.mkdir()
        return Installed(folder, python, wheel, extras)

    yield installed
    shutil.rmtree(tmp_path / "installed", ignore_errors=True)


def _check(installed: Installed, extra: str) -> None:
    """What the extra is for starts."""
    assert installed.out("trackway", "--version") == f"trackway {PROJECT['version']}\n"
    assert "Train tool-using agents" in installed.out("trackway", "--help")
    if extra in SERVICES:
        versions = installed.answers(extra)["versions"]
        assert isinstance(versions, dict) and versions["trackway"] == PROJECT["version"]
        assert ("torch" in versions) == (extra in WITH_TORCH)
    else:
        installed.out("python", "-c", f"import {', '.join(MODULES[extra])}")


def test_the_wheel_made_from_the_sdist_has_the_data_files(built: Path, wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        sources = {name.partition("/")[2].partition("/")[2] for name in sdist.getnames()}

    assert [name for name in DATA if name not in packed] == []
    assert [name for name in DATA if name not in sources] == []


def test_every_extra_is_tried_or_resolved() -> None:
    assert {*ALONE, *WITH_TORCH, *SIDE_PROCESSES} == PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("version", ["3.11", *(pytest.param(v, marks=pytest.mark.install) for v in ("3.12", "3.13"))])
def test_the_base_has_clients_and_a_command_that_says_what_it_lacks(version: str, install: Install) -> None:
    base = install("", version)

    assert base.out("trackway", "--version") == f"trackway {PROJECT['version']}\n"
    assert "_TRACKWAY_COMPLETE=complete_bash" in base.out("trackway", _TRACKWAY_COMPLETE="source_bash")
    for group in ("config", "data", "traces"):
        base.out("trackway", group, "--help")
    base.out("python", "-c", "import trackway.clients, trackway.tracing, trackway.wire.openai")
    lacking = base.run("trackway", "doctor", "--json")
    examination = json.loads(lacking.stdout)
    assert (lacking.returncode, examination["demo"]) == (1, False)
    remedies = {finding["name"]: finding["remedy"] for finding in examination["findings"]}
    assert (remedies["Python"], remedies["trackway[tools]"]) == ("", "pip install 'trackway[tools]'")
    found = {finding["name"]: finding["found"] for finding in examination["findings"]}
    assert found["chat template"] == "not read: needs trackway[trainer]"
    for command, extra in (
        ("up", "cpu"),
        ("demo", "cpu"),
        ("train", "cpu"),
        ("config explain", "trainer"),
        ("serve tools", "tools"),
    ):
        ended = base.run("trackway", *command.split())
        assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1)
        assert re.search(
            rf"got no module '\w+'; install them: pip install 'trackway\[{extra}\]'$", ended.stderr.strip()
        )


def test_the_tool_server_starts_alone(install: Install) -> None:
    _check(install("tools", "3.11"), "tools")


@pytest.mark.install
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("extra", ALONE)
def test_each_extra_starts_what_it_is_for(extra: str, version: str, install: Install) -> None:
    if extra in WITH_TORCH and version != "3.11":
        pytest.skip("resolved in test_what_needs_torch_resolves")
    _check(install(extra, version), extra)


@pytest.mark.install
def test_the_image_of_the_tool_server_can_import_the_applications_without_torch(install: Install) -> None:
    image = install("tools,reward,serve", "3.11")

    image.out("python", "-c", "import trackway.deploy.graph, trackway.tools.app, trackway.reward.app")
    assert image.run("python", "-c", "import torch").returncode == 1


@pytest.mark.install
@pytest.mark.parametrize("version", ["3.12", "3.13"])
@pytest.mark.parametrize("extra", sorted(WITH_TORCH | SIDE_PROCESSES))
def test_what_needs_torch_resolves(extra: str, version: str, wheel: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "wanted.in"
    wanted.write_text(f"trackway[{extra}] @ {wheel.as_uri()}\n")

    pins = _uv("pip", "compile", "--quiet", "--python-version", version, *_index(), str(wanted), cwd=tmp_path)

    assert re.search(r"^torch==", pins, flags=re.MULTILINE)


@pytest.mark.install
def test_the_demo_trains_far_from_a_clone(install: Install) -> None:
    whole = install("cpu", "3.11")
    ports = {f"TRACKWAY_UP_{name}PORT": "0" for name in ("", "DASHBOARD_", "RAY_", "MLFLOW_")}

    words = ("trainer.total_training_steps=2", "data.val_max_samples=8", "--json")

    try:
        ended = whole.run("trackway", "demo", *words, seconds=700.0, **ports)
    finally:
        whole.run("trackway", "down")  # what a demo that took too long left running

    assert ended.returncode == 0, ended.stderr
    assert '"steps": 2' in ended.stdout
