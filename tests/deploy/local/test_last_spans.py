"""Services are stopped once their spans are delivered; a real process with a real exporter, a receiver that is slow."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.clients.tracing.otlp_sink import Sink, running_sink
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local import up
from trackway.deploy.local.up import take_down
from trackway.system import free_port

pytestmark = pytest.mark.slow

REPLICA = """
import json, sys
import uvicorn
from fastapi import FastAPI
from trackway.serving.app import process_health
from trackway.tracing import Tracing, TracingSettings, trajectory_span, turn_span
from trackway.tracing.span_handle import activated
from trackway.wire.service import Ready, ReplicaInfo, ReplicaList
from trackway.wire.trajectory import Tags

port, mlflow, spool = sys.argv[1:]
tracing = Tracing("reward", TracingSettings(mlflow_uri=mlflow, spool_dir=spool, schedule_delay_s=3.0))
tags = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=0)
with activated(tracing), trajectory_span(tags, "t", "agent", [], True), turn_span(0):
    pass
app = FastAPI()

@app.get("/reward/replicas")
async def replicas() -> ReplicaList:
    return ReplicaList(replicas=[ReplicaInfo(health=process_health("reward", "a", tracing), ready=Ready(ready=True))])

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print("answers", flush=True)

Server(uvicorn.Config(app, port=int(port), log_level="error")).run()
"""
Reported = list[tuple[str, str]]


@pytest.fixture
def sink() -> Iterator[Sink]:
    with running_sink() as sink:
        yield sink


@pytest.fixture
def replica(sink: Sink, tmp_path: Path) -> Iterator[Deployment]:
    """A deployment of one process, which has two spans to send."""
    sink.open.clear()
    port = free_port()
    command = [sys.executable, "-c", REPLICA, str(port), sink.url, str(tmp_path / "spool")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "answers\n"
        started = psutil.Process(process.pid).create_time()
        yield Deployment(
            base_url=f"http://127.0.0.1:{port}",
            dashboard_url="",
            mlflow_uri=sink.url,
            outputs=tmp_path,
            processes=[ProcessRecord(name="ray", pid=process.pid, started=started, log=tmp_path / "log")],
            serve_config={"applications": [{"name": "reward"}]},
        )
        process.kill()


def test_services_stop_once_a_slow_backend_has_their_spans(replica: Deployment, sink: Sink) -> None:
    reported: Reported = []

    def report(name: str, state: str) -> None:
        reported.append((name, state.split()[0]))
        if sink.asked:
            sink.open.set()

    take_down(replica, report)

    assert sorted(sink.spans) == ["trajectory", "turn 0"]
    assert list(dict.fromkeys(reported)) == [
        ("spans", "sending"),
        ("spans", "sent"),
        ("ray", "stopping"),
        ("ray", "stopped"),
    ]
    assert not replica.started_here


def test_a_backend_that_does_not_answer_keeps_no_service_running_and_its_spans_are_on_disk(
    replica: Deployment, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "STALLED_S", 5.0)
    reported: Reported = []

    began = time.monotonic()
    take_down(replica, lambda name, state: reported.append((name, state)))

    assert 5.0 <= time.monotonic() - began < 30.0
    assert ("spans", "left on disk") in reported and not replica.started_here
    [stored] = (replica.outputs / "spool").rglob("*.otlp")
    assert (stored.stem.rpartition("-")[2], sink.spans) == ("2", [])


def test_the_wait_goes_on_as_long_as_spans_are_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = 0.0, iter([5, 4, 3, 2, 1, 0])

    def asked(deployment: Deployment) -> int:
        nonlocal now
        now += 20.0
        return next(left)

    monkeypatch.setattr(up, "spans_waiting", asked)
    monkeypatch.setattr(up, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda seconds: None))
    reported: Reported = []

    nothing = Deployment(base_url="", dashboard_url="", mlflow_uri="", outputs=tmp_path)
    assert up.deliver_spans(nothing, lambda name, state: reported.append((name, state))) == 0
    assert (now, reported[-1]) == (120.0, ("spans", "sent"))


def test_an_interrupt_during_the_wait_stops_the_services(replica: Deployment) -> None:
    def report(name: str, state: str) -> None:
        if name == "spans":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_down(replica, report)

    assert not replica.started_here
