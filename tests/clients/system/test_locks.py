"""A file lock has one holder at a time, and ends with its holder."""

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trackway.system import LockTaken, acquire_lock, locked

pytestmark = pytest.mark.slow

HOLD = """
import sys
from pathlib import Path
from trackway.system import acquire_lock

lock = acquire_lock(Path(sys.argv[1]), holder="process of the test")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.lock"


@pytest.fixture
def holder(path: Path):
    """A process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(60)
    process.stdout.close()
    process.stdin.close()


def test_a_taken_lock_names_its_holder_whose_text_stays(path: Path, holder: "subprocess.Popen[str]") -> None:
    for _ in range(2):
        with pytest.raises(LockTaken, match=r"a\.lock is locked by process of the test") as taken:
            acquire_lock(path, holder="a second one")
        assert taken.value.holder == "process of the test"


def test_a_killed_holder_leaves_no_lock(path: Path, holder: "subprocess.Popen[str]") -> None:
    holder.kill()
    holder.wait(60)

    with locked(path, holder="the next"):
        assert path.read_text() == "the next"


def test_a_second_holder_waits_for_the_first(path: Path, holder: "subprocess.Popen[str]") -> None:
    release = threading.Timer(0.1, holder.kill)
    release.start()

    acquire_lock(path, wait_s=10.0).release()

    release.join()


def test_a_lock_is_exclusive_within_a_process_and_any_thread_may_release_it(path: Path) -> None:
    lock = acquire_lock(path)
    with pytest.raises(LockTaken):
        acquire_lock(path)

    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()

    with locked(path), pytest.raises(LockTaken, match="by another process"), locked(path):
        pass
    acquire_lock(path).release()


def _exit() -> None:
    os._exit(0)


def test_a_forked_child_does_not_take_the_lock_along(path: Path) -> None:
    lock = acquire_lock(path)
    child = multiprocessing.get_context("fork").Process(target=_exit)
    child.start()
    child.join(60)

    with pytest.raises(LockTaken):
        acquire_lock(path)
    lock.release()
    acquire_lock(path).release()


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (None, 0o640)])
def test_the_mode_is_the_given_one_or_the_umasks(path: Path, mode: int | None, expected: int) -> None:
    umask = os.umask(0o026)
    try:
        acquire_lock(path, mode=mode).release()
    finally:
        os.umask(umask)

    assert path.stat().st_mode & 0o777 == expected


def test_a_file_that_cannot_be_opened_is_an_error(path: Path) -> None:
    path.mkdir()

    with pytest.raises(IsADirectoryError):
        acquire_lock(path)
