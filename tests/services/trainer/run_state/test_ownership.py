"""Which process a run belongs to, with /proc and without."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trackway.trainer.run_state import folder
from trackway.trainer.run_state.folder import Owner, this_machine


@pytest.fixture(params=["linux", "macos"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """This machine, or one without /proc, as macOS is."""
    if request.param == "macos":
        monkeypatch.setattr(folder, "_PROC", tmp_path / "no-proc")
    this_machine.cache_clear()
    yield request.param
    this_machine.cache_clear()


def test_a_process_owns_its_run_until_it_ends_even_before_it_is_waited_for(kernel: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = Owner.of(process.pid)
        assert (owner.lives_here, Owner.of(os.getpid()).lives_here) == (True, True)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
        assert not owner.lives_here

    assert not owner.lives_here


def test_a_reused_pid_is_another_owner(kernel: str) -> None:
    earlier = Owner.of(os.getpid()).model_copy(update={"started": 1})

    assert not earlier.lives_here


def test_a_machine_is_the_same_one_for_all_its_processes(kernel: str) -> None:
    here = this_machine()
    this_machine.cache_clear()

    assert this_machine() == here and here.boot
    assert bool(here.processes) == (kernel == "linux")
