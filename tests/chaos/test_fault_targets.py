"""The processes of a run are found by its folder, and one that is stopped always goes on."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM

import psutil
import pytest

from tests.chaos.fault_schedule import Fault, Moment, Target
from tests.chaos.fault_targets import running, send, stopped, title_of, workers
from tests.waiting import until

pytestmark = pytest.mark.slow

TITLES = [
    "ray::ServeController.listen_for_change",
    "ray::ServeReplica:rollout:rollout",
    "ray::ServeReplica:rollout:rollout.initialize_and_get_metadata",
    "ray::ServeReplica:agent:agent",
    "ray::ProxyActor",
    "ray::SERVE_PROXY_ACTOR-9315502483e1747dba82:ProxyActor.__init__",
    "ray::DashboardAgent",
    "ray::IDLE",
]
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeping() -> Iterator[Callable[..., psutil.Process]]:
    """Start a process that sleeps, with further words in its command."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> psutil.Process:
        started.append(subprocess.Popen([*SLEEP, *words]))
        return psutil.Process(started[-1].pid)

    yield start
    for process in started:
        process.kill()
        process.wait(60)


def test_the_workers_of_a_run_are_those_of_its_folder_and_of_no_other(sleeping, tmp_path: Path):
    worker = sleeping("-m", "trackway.trainer.worker", str(tmp_path / "run-1"), "--lifeline")
    sleeping("-m", "trackway.trainer.worker", str(tmp_path / "run-10"), "--lifeline")
    sleeping(str(tmp_path / "run-1"))

    until(lambda: workers(tmp_path / "run-1") == [worker])
    assert workers(tmp_path / "run-2") == []


@pytest.mark.parametrize(
    ("target", "matched"),
    [
        (Target.ROLLOUT, TITLES[1:3]),
        (Target.AGENT, [TITLES[3]]),
        (Target.PROXY, TITLES[4:6]),
        (Target.CONTROLLER, [TITLES[0]]),
    ],
)
def test_a_replica_the_proxy_and_the_controller_are_found_by_the_titles_that_ray_gives_them(
    target: Target, matched: list[str]
):
    assert [title for title in TITLES if title_of(target).match(title)] == matched


@pytest.mark.parametrize("signal", [SIGKILL, SIGTERM])
def test_a_killed_process_runs_no_more(sleeping, signal):
    process, other_process = sleeping(), sleeping()

    send(Fault(Moment(0, 0), Target.TOOLS, signal), [process])

    until(lambda: running([process, other_process]) == [other_process])


def test_a_stopped_process_goes_on(sleeping):
    process = sleeping()
    sending = threading.Thread(target=send, args=(Fault(Moment(0, 0), Target.TOOLS, SIGSTOP, 1.0), [process]))

    sending.start()
    until(lambda: stopped([process]) == [process])
    sending.join(60)

    assert (stopped([process]), running([process])) == ([], [process])


def test_a_stopped_process_goes_on_even_if_the_one_that_stopped_it_is_killed(sleeping):
    process = sleeping()
    script = f"""import psutil, signal
from tests.chaos.fault_targets import send
from tests.chaos.fault_schedule import Fault, Moment, Target
send(Fault(Moment(0, 0), Target.TOOLS, signal.SIGSTOP, 2.0), [psutil.Process({process.pid})])
"""
    sender = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    until(lambda: stopped([process]) == [process])

    sender.kill()
    sender.wait(60)

    assert stopped([process]) == [process]
    until(lambda: stopped([process]) == [])
