"""Fixtures that the whole suite shares."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch or numpy is imported: oversubscription costs up to 50x

import atexit
import contextlib
import gc
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import httpx
import pytest
from fastapi import FastAPI

from trackway.system.process import free_port

# Where spans and runs go, and who may call, must not depend on the shell that runs the tests.
for _name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"):
    os.environ.pop(_name, None)
for _name in [name for name in os.environ if name.startswith(("TRACKWAY_TOKEN", "TRACKWAY_AUTH__"))]:
    del os.environ[_name]


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job, whose children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


atexit.register(gc.unfreeze)  # or extension modules report what is frozen as leaks


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector: what tests import is no garbage, and looking for some doubles the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After each file: what it imported is no garbage either, and a learner looks for some after every step."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


class Running(Protocol):
    """Starts an app in this process and gives a client for it."""

    def __call__(self, app: FastAPI) -> AbstractAsyncContextManager[httpx.AsyncClient]: ...


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def running() -> Running:
    """`async with running(app) as client`: the app over ASGI, its lifespan included."""

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                yield client

    return run


@pytest.fixture(scope="session")
def object_store() -> Iterator[str]:
    """URL of a bucket of a real S3 server, for tests marked `stores`."""
    pytest.importorskip("moto", reason="`make test-stores` installs the S3 server")
    from tests.stores import s3_bucket

    with s3_bucket() as url:
        yield url


@pytest.fixture(scope="session")
def mlflow_stores(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Stores of the MLflow server: sqlite in WAL mode and a folder, or PostgreSQL and S3 under `make test-stores`."""
    if os.environ.get("TRACKWAY_TEST_STORES"):
        from benchmarks.tracing_postgres import postgres_store

        artifacts = f"{request.getfixturevalue('object_store')}/artifacts"
        with postgres_store() as url:
            yield ["--backend-store-uri", url, "--artifacts-destination", artifacts]
        return
    folder = tmp_path_factory.mktemp("mlflow-stores")
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
    yield ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, mlflow_stores: list[str]) -> Iterator[str]:
    """URI of a real MLflow server on a free port; slow to start, so one per session."""
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *mlflow_stores],
            cwd=folder,
            stdout=log,
            stderr=log,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )
    try:
        uri = f"http://127.0.0.1:{port}"
        _wait_until_healthy(uri, server, folder / "server.log", deadline_s=240.0)
        yield uri
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def _wait_until_healthy(uri: str, server: "subprocess.Popen[bytes]", log: Path, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{uri}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"MLflow was not healthy within {deadline_s} s: {log.read_text()[-2000:]}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system needs the right to mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def fill() -> Callable[..., Path]:
    """`fill(small_disk, leave=0)`: take all but `leave` bytes; the file that has them."""

    def filled(folder: Path, leave: int = 0) -> Path:
        filler, status = folder / "filler", os.statvfs(folder)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - leave)
        return filler

    return filled


@pytest.fixture
def remount() -> Callable[[Path, str], None]:
    """`remount(small_disk, "ro")`: the same file system with other options, such as `ro` or `size=4m`."""

    def remounted(folder: Path, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, capture_output=True)

    return remounted


@pytest.fixture
def other_environment(tmp_path: Path) -> Path:
    """The interpreter of a second environment that has all our packages, but says another version of pydantic."""
    folder = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    added = "; ".join(f"site.addsitedir({path!r})" for path in ours)
    (packages / "ours.pth").write_text(f"import site; {added}\n")
    metadata = packages / "pydantic-2.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: pydantic\nVersion: 2.0.1\n")
    return folder / "bin" / "python"
