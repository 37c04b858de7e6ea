"""What a node that drains waits for; the rest needs a cluster, which tests/cluster has."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import psutil
import pytest
from ray.core.generated.gcs_pb2 import ActorTableData  # pyright: ignore[reportAttributeAccessIssue]

from trackway.deploy import drain as draining
from trackway.deploy.drain import drain, replicas_on

HERE, ELSEWHERE = "ab" * 28, "cd" * 28


def actor(name: str, node: str = HERE, state: str = "ALIVE") -> ActorTableData:
    made = ActorTableData(name=name, state=ActorTableData.ActorState.Value(state))
    made.address.node_id = bytes.fromhex(node)
    return made


def test_the_replicas_of_this_node_are_waited_for_and_nothing_else() -> None:
    actors = [
        actor("SERVE_REPLICA::tools#tools#b2"),
        actor("SERVE_REPLICA::rollout#rollout#a1"),
        actor("SERVE_REPLICA::rollout#rollout#c3", ELSEWHERE),
        actor("SERVE_REPLICA::rollout#rollout#d4", state="DEAD"),
        actor("SERVE_CONTROLLER_ACTOR"),
        actor("SERVE_PROXY_ACTOR-ab"),  # it serves those that end, and goes with the pod
    ]
    assert replicas_on(HERE, actors) == ["SERVE_REPLICA::rollout#rollout#a1", "SERVE_REPLICA::tools#tools#b2"]


@pytest.mark.extended
@pytest.mark.slow
def test_a_store_that_says_nothing_is_waited_for_no_longer_than_its_answer_takes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asks = f"print(drain({HERE!r}, '127.0.0.1:{silent.getsockname()[1]}', 1.0))"
        program = f"from trackway.deploy.drain import drain; print('imported', flush=True); {asks}"
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "imported\n"
            began = time.monotonic()
            said, _ = process.communicate(timeout=120)
            took = time.monotonic() - began
    assert (process.returncode, said) == (0, "['the cluster does not answer']\n")
    assert took < 30  # Ray's client alone would take 40 s to give up


RAYLET = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave no zombies
for line in sys.stdin:
    subprocess.Popen([sys.executable, "-c", *line.strip().split("|")], stdout=sys.stdout)
"""
SLEEPS = "import signal; print('there', flush=True); signal.pause()"
TRAINER = """
import subprocess, sys
worker = "import os, sys; print('there', flush=True); os.read(0, 1); open(sys.argv[2], 'w').write('saved')"
subprocess.Popen([sys.executable, "-c", worker, "trackway.trainer.worker", sys.argv[2]], stdin=subprocess.PIPE).wait()
"""
"""A service whose run saves when the service ends."""


class Raylet:
    """A process with the node's id on its command line, which starts processes with others."""

    def __init__(self) -> None:
        words = [sys.executable, "-c", RAYLET, f"--node_id={HERE}"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._family = psutil.Process(self._process.pid)

    def start(self, program: str, *marks: str) -> psutil.Process:
        before = {child.pid for child in self._family.children()}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("|".join([program.strip().replace("\n", "; "), *marks]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "there\n"
        [child] = [child for child in self._family.children() if child.pid not in before]
        return child

    def close(self) -> None:
        for child in self._family.children():
            child.kill()
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def raylet() -> Iterator[Raylet]:
    raylet = Raylet()
    yield raylet
    raylet.close()


@pytest.fixture
def silent_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining._Watch, "run", lambda watch: None)
    monkeypatch.setattr(draining, "_SILENCE_S", 0.0)
    monkeypatch.setattr(draining, "_POLL_S", 0.01)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[int]], None]]:
    """Starts a replica's socket that answers with these numbers of requests in flight, one after the other."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/tools-a.sock")
        monkeypatch.setenv("TRACKWAY_PROBE_DIR", folder)

        def answer(numbers: list[int]) -> None:
            while numbers:
                connection, _ = listening.accept()
                with connection:
                    connection.send(json.dumps({"ready": True, "reason": "", "in_flight": numbers.pop(0)}).encode())

        def serve(numbers: list[int]) -> None:
            listening.listen()
            Thread(target=answer, args=(numbers,), daemon=True).start()

        yield serve


@pytest.mark.slow
@pytest.mark.usefixtures("silent_head")
def test_without_a_head_a_node_stops_once_no_request_is_in_flight(replica: Callable[[list[int]], None]) -> None:
    replica(in_flight := [2, 1, 0])
    assert (drain(HERE, "127.0.0.1:1", 60.0), in_flight) == (["the cluster does not answer"], [])


@pytest.mark.slow
@pytest.mark.usefixtures("silent_head")
def test_without_a_head_the_run_saves_before_the_node_stops(raylet: Raylet, tmp_path: Path) -> None:
    trainer = raylet.start(TRAINER, "ray::ServeReplica:trainer:trainer", str(tmp_path / "saved"))
    assert drain(HERE, "127.0.0.1:1", 60.0) == ["the cluster does not answer"]
    assert ((tmp_path / "saved").read_text(), trainer.is_running()) == ("saved", False)


@pytest.mark.slow
def test_a_replica_that_says_nothing_and_a_rank_of_another_nodes_run_keep_the_node(
    raylet: Raylet, replica: Callable[[list[int]], None]
) -> None:
    replica([0] * 9)
    raylet.start(SLEEPS, "ray::ServeReplica:tools:tools")
    assert not draining._busy(HERE)
    stopping = raylet.start(SLEEPS, "ray::ServeReplica:agent:agent")
    assert draining._busy(HERE)
    assert not draining._busy(ELSEWHERE)
    stopping.kill()
    psutil.wait_procs([stopping])
    raylet.start(SLEEPS, "trackway.learner.ranks.process")
    assert draining._busy(HERE)
    raylet.start(SLEEPS, "trackway.trainer.worker")
    assert not draining._busy(HERE)  # the run ends its own ranks
