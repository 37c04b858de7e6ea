"""Child processes are remembered, watched, and stopped with all their descendants."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.time_limits import ENDS_SOON
from trackway.deploy.deployment import processes
from trackway.system.process import UserError

PARENT = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print(child.pid, flush=True)
time.sleep(600)
"""

RAYLET = """
import pathlib, signal, time
pathlib.Path("/proc/self/comm").write_text("raylet")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
WORKER = """
import pathlib, signal, sys, time
def finish(*_):
    time.sleep(0.3)
    pathlib.Path(sys.argv[1]).touch()
    raise SystemExit
signal.signal(signal.SIGTERM, finish)
print("ready", flush=True)
time.sleep(600)
"""
NODE = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [subprocess.Popen([sys.executable, "-c", program, sys.argv[3]]) for program in sys.argv[1:3]]
time.sleep(600)
"""
"""A node of Ray that ignores SIGTERM, with a worker that has something to finish."""


def lines(log: Path, count: int = 1, deadline_s: float = 10.0) -> list[str]:
    """The lines of the log, as soon as there are `count`."""
    end = time.monotonic() + deadline_s
    while log.read_text().count("\n") < count:
        assert time.monotonic() < end, f"expected {count} lines in {log}"
        os.sched_yield()
    return log.read_text().splitlines()


def test_a_tree_that_ignores_sigterm_is_gone_after_the_grace(tmp_path: Path) -> None:
    record = processes.start("parent", [sys.executable, "-c", PARENT], {}, tmp_path / "log")
    child = psutil.Process(int(lines(record.log)[0]))
    processes.stop_tree(record, grace_s=0.2)
    assert record.find() is None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@ENDS_SOON
def test_a_node_of_ray_is_killed_once_its_workers_have_finished(tmp_path: Path) -> None:
    finished = tmp_path / "finished"
    record = processes.start("ray", [sys.executable, "-c", NODE, RAYLET, WORKER, str(finished)], {}, tmp_path / "log")
    lines(record.log, 2)

    processes.stop_tree(record, grace_s=600.0)

    assert finished.exists() and record.find() is None


def test_a_process_that_ended_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such device'); raise SystemExit(3)"]
    record = processes.start("ray", command, {}, tmp_path / "log")
    psutil.wait_procs([psutil.Process(record.pid)], timeout=10)
    with pytest.raises(UserError, match=r"ray exited during start-up.*\nno such device"):
        processes.check_alive(record)


def test_another_process_under_the_same_pid_is_not_ours(tmp_path: Path) -> None:
    me = psutil.Process()
    record = processes.ProcessRecord(name="ray", pid=me.pid, started=me.create_time() - 100, log=tmp_path / "log")
    assert record.find() is None
    processes.stop_tree(record)
