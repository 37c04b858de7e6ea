"""One local MLflow server per database, whoever comes first and whoever dies; each start costs seconds."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from mlflow import MlflowClient

from tests.waiting import until
from trackway.deploy.deployment import processes
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.deploy.local import mlflow_server
from trackway.system import free_port
from trackway.system.process import UserError
from trackway.tracing.local_mlflow import client as local_mlflow
from trackway.tracing.local_mlflow import mlflow_server as keeper
from trackway.tracing.local_mlflow.mlflow_server import ServerFiles

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORKERS = 6
WORKER = """
import os, sys
from trackway.tracing import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from trackway.tracing.local_mlflow import client as local_mlflow
from trackway.tracing.local_mlflow import mlflow_server as keeper

local_mlflow.LINGER_S = float(os.environ.get("LINGER_S", "60"))

@rollout_trace_op
def rollout(n):
    return n

RolloutTraceConfig.init("shared", "exp", "mlflow")
for line in sys.stdin:
    with rollout_trace_attr(step=1, sample_index=int(line), rollout_n=0):
        rollout(int(line))
    if sys.argv[1:] == ["--tell"]:
        while not RolloutTraceConfig.get_client().flush(60):
            pass
        print(local_mlflow.server_uri("sqlite:///mlflow.db"), flush=True)
"""


def worker(folder: Path, uri: str | None, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """A process that traces a trajectory for each number it reads."""
    environment |= {} if uri is None else {"MLFLOW_TRACKING_URI": uri}
    inherited = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments],
        env={**inherited, "XDG_STATE_HOME": str(folder / "state"), "HTTP_PROXY": "http://127.0.0.1:9", **environment},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ask(process: "subprocess.Popen[str]", number: int) -> str:
    """Have it trace a trajectory; where its server is once that one has arrived."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def servers(folder: Path) -> list[psutil.Process]:
    """The `mlflow server` processes of the folder's database."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "server" in command and f"sqlite:///{folder / 'mlflow.db'}" in command:
                found.append(process)
    return found


def remains(folder: Path) -> list[psutil.Process]:
    """Whatever a server of the folder's database started and left behind."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TRACKWAY_MLFLOW_DATABASE") == str(folder / "mlflow.db"):
                found.append(process)
    return found


def stored(uri: str) -> dict[str, int]:
    """Each trajectory's sample index, and the number of its spans."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("shared")
    assert experiment is not None
    traces = client.search_traces(locations=[experiment.experiment_id])
    return {trace.info.tags["sample_index"]: len(trace.data.spans) for trace in traces}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("local")
    yield folder
    local_mlflow.stop_shared_server(folder / "mlflow.db")


@pytest.fixture(scope="module")
def shared(folder: Path) -> str:
    """Six processes at once on a database that does not exist yet, each with another of its names."""
    names = [None, ".", "sqlite:///mlflow.db", f"sqlite:///{folder}/mlflow.db", f"file://{folder}", str(folder)]
    workers = [worker(folder, name, TRACKWAY_TOKEN="secret") for name in names]
    ended = [process.communicate(str(number), timeout=300) for number, process in enumerate(workers)]
    assert [(process.returncode, *streams) for process, streams in zip(workers, ended, strict=True)] == [
        (0, "", "")
    ] * WORKERS
    return json.loads((folder / "mlflow.db.server" / "address.json").read_text())["uri"]


@pytest.fixture(scope="module")
def deployed(shared: str, folder: Path) -> Iterator[tuple[str, ProcessRecord]]:
    """A server as `trackway up` starts it, on the database that has a shared one."""
    port = free_port()
    record = mlflow_server.start(folder / "mlflow.db", port)
    until(lambda: local_mlflow.answers(f"sqlite:///{folder}/mlflow.db"))
    yield f"http://127.0.0.1:{port}", record
    processes.stop_tree(record)
    for child in processes._children:
        child.poll()  # its server was killed by a test, and nothing else asks what became of it


@pytest.fixture(scope="module")
def user(deployed: tuple[str, ProcessRecord], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    process = worker(folder, None, "--tell", LINGER_S="1")
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_six_processes_share_one_server_and_every_span_arrives(shared: str, folder: Path) -> None:
    [server] = servers(folder)
    assert "TRACKWAY_TOKEN" not in server.environ()
    assert stored(shared) == {str(number): 2 for number in range(WORKERS)}
    assert (folder / "mlflow.db.server" / "address.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("shared")
def test_the_server_is_one_process_that_gives_way_to_others(folder: Path) -> None:
    [server] = servers(folder)
    assert (server.nice(), server.children(recursive=True)) == (keeper.NICENESS, [])


def test_the_server_refuses_the_name_of_another_host(shared: str) -> None:
    url = f"{shared}/api/2.0/mlflow/experiments/get-by-name?experiment_name=shared"
    assert httpx.get(url, headers={"host": "elsewhere.example"}).status_code == 403
    assert httpx.get(url).status_code == 200


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel does not share cores out by session")
@pytest.mark.usefixtures("shared")
def test_the_servers_session_of_its_own_gives_way_to_other_sessions(folder: Path) -> None:
    [server] = servers(folder)
    session, nice = Path(f"/proc/{server.pid}/autogroup").read_text().split(maxsplit=1)
    assert nice == f"nice {keeper.NICENESS}\n"
    assert [session] != Path("/proc/self/autogroup").read_text().split()[:1]  # empty: of no session's group


def test_the_server_of_a_deployment_takes_the_place_of_a_shared_one_and_of_no_other(
    deployed: tuple[str, ProcessRecord], shared: str, folder: Path
) -> None:
    uri, record = deployed
    assert uri != shared and len(servers(folder)) == 1
    with pytest.raises(UserError, match=f"is already running at {uri}: process [0-9]+; use it, or stop the program"):
        mlflow_server.start(folder / "mlflow.db", free_port())
    processes.check_alive(record)


def test_a_process_that_traces_finds_the_server_of_the_deployment(
    user: "subprocess.Popen[str]", deployed: tuple[str, ProcessRecord], folder: Path
) -> None:
    assert ask(user, 10) == deployed[0]
    assert len(servers(folder)) == 1


@pytest.mark.parametrize(
    ("end", "number"), [(signal.SIGKILL, 11), pytest.param(signal.SIGTERM, 12, marks=pytest.mark.extended)]
)
def test_the_server_of_a_deployment_that_is_killed_is_started_again_at_its_address_and_its_users_spans_arrive(
    user: "subprocess.Popen[str]", deployed: tuple[str, ProcessRecord], folder: Path, end, number: int
) -> None:
    [server] = servers(folder)
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(end)
    until(lambda: server not in servers(folder))
    assert ask(user, number) == deployed[0]
    assert len(servers(folder)) == 1 and servers(folder) != [server]
    assert stored(deployed[0]) == dict.fromkeys([*map(str, range(WORKERS)), *map(str, range(10, number + 1))], 2)
    said = [line for line in ServerFiles(folder / "mlflow.db").log.read_text().splitlines() if "restart" in line]
    assert len(said) == number - 10
    assert said[-1].startswith("the MLflow server ended with status ")
    assert said[-1].endswith(f"; restart {number - 10} of 6 in a row in {number - 10} s")


def test_a_server_whose_keeper_is_killed_makes_room_for_the_next_one(
    user: "subprocess.Popen[str]", folder: Path
) -> None:
    before = ask(user, 13)
    keeper = json.loads((folder / "mlflow.db.server" / "lock").read_text())["pid"]
    os.kill(keeper, signal.SIGKILL)
    assert ask(user, 14) != before
    assert len(servers(folder)) == 1


def test_the_server_ends_after_its_last_user_was_killed(user: "subprocess.Popen[str]", folder: Path) -> None:
    assert ask(user, 15)
    assert len(servers(folder)) == len(remains(folder)) == 1
    user.kill()
    until(lambda: not remains(folder))
    files = ServerFiles(folder / "mlflow.db")
    until(lambda: not files.address.exists())


def test_a_database_that_is_none_is_told_with_the_log_and_not_tried_again_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database " * 100)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for _ in range(2):
        with pytest.raises(local_mlflow.LocalMlflowError, match="did not start: DatabaseError: file is not a database"):
            local_mlflow.server_uri(uri, deadline_s=60)
    files = ServerFiles(tmp_path / "mlflow.db")
    written = files.log.stat().st_mtime_ns
    with pytest.raises(local_mlflow.LocalMlflowError):
        local_mlflow.server_uri(uri)
    assert files.log.stat().st_mtime_ns == written


def test_a_server_that_cannot_be_kept_up_is_given_up_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server of the standard library stands in for MLflow's, as each of seven starts would take seconds."""
    stand_in = """
import http.server, os, sys, threading
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        threading.Timer(0.1, os._exit, [3]).start()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
    started: list[list[str]] = []
    pauses: list[float] = []
    popen = subprocess.Popen

    def start(command: list[str], **options) -> subprocess.Popen:
        started.append(command)
        return popen([sys.executable, "-c", stand_in, command[command.index("--port") + 1]], **options)

    monkeypatch.setattr(keeper.subprocess, "Popen", start)
    monkeypatch.setattr(keeper, "_pause_before_restart", lambda server, failures: pauses.append(failures))
    monkeypatch.setattr(keeper, "_on_end_signals", lambda action: None)  # they are pytest's own here
    files = ServerFiles(tmp_path / "mlflow.db")
    files.folder.mkdir()

    status = keeper._keep(files, free_port(), None)

    reason = "the server ended, or did not answer in time, and 6 restarts in a row did not help"
    assert (status, len(started), pauses) == (1, 7, [1, 2, 3, 4, 5, 6])
    assert (files.failed.read_text(), capfd.readouterr().out.splitlines()[-1]) == (reason, reason)
    assert not files.address.exists()
