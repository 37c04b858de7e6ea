"""Child processes are remembered, watched, and stopped with all their descendants."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from trackway.deploy.deployment import processes
from trackway.system.user_error import UserError

PARENT = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print(child.pid, flush=True)
time.sleep(600)
"""


def first_line(log: Path, deadline_s: float = 10.0) -> str:
    end = time.monotonic() + deadline_s
    while "\n" not in log.read_text():
        assert time.monotonic() < end, f"nothing in {log}"
        os.sched_yield()
    return log.read_text().splitlines()[0]


def test_a_tree_that_ignores_sigterm_is_gone_after_the_grace(tmp_path: Path) -> None:
    record = processes.start("parent", [sys.executable, "-c", PARENT], {}, tmp_path / "log")
    child = psutil.Process(int(first_line(record.log)))
    processes.stop_tree(record, grace_s=0.2)
    assert record.find() is None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


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
