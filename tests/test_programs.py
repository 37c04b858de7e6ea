"""The suite on a machine that lacks the programs which pip cannot install."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


APT = """#!/bin/sh
echo "$DEBIAN_FRONTEND $@" >> {folder}/calls
[ ! -e {folder}/broken ] || {{ echo 'E: no network' >&2; exit 100; }}
"""
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs programs")


@pytest.fixture
def machine() -> Iterator[Path]:
    """The only folder of programs; it has an `apt-get` that writes down how it was called. Readable for all users."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "bin").mkdir()
        (folder / "bin" / "apt-get").write_text(APT.format(folder=folder))
        (folder / "bin" / "apt-get").chmod(0o755)
        yield folder / "bin"


@root
def test_root_installs_what_is_missing(machine: Path) -> None:
    (machine / "redis-server").symlink_to("/bin/true")

    assert programs(machine) == "installing bubblewrap, chromium, iproute2\n"
    assert (machine.parent / "calls").read_text().splitlines() == [
        "noninteractive update -qq",
        "noninteractive install -y -qq --no-install-recommends bubblewrap chromium iproute2",
    ]


def test_a_machine_that_has_them_all_is_left_alone(machine: Path) -> None:
    for name in ("bwrap", "chromium", "ip", "redis-server"):
        (machine / name).symlink_to("/bin/true")

    assert programs(machine, as_root=False) == ""
    assert not (machine.parent / "calls").exists()


@root
def test_an_installation_that_fails_is_told_and_the_tests_go_on(machine: Path) -> None:
    (machine.parent / "broken").touch()

    assert programs(machine).splitlines()[1:] == [
        "could not install bubblewrap, chromium, iproute2, redis-server; tests that need them are skipped: "
        "E: no network"
    ]


def test_other_users_get_the_command_to_run(machine: Path) -> None:
    assert programs(machine, as_root=False) == (
        "not installed: bubblewrap, chromium, iproute2, redis-server; tests that need them are skipped. To install "
        "them: sudo apt-get install -y -qq --no-install-recommends bubblewrap chromium iproute2 redis-server\n"
    )


def test_without_apt_the_programs_are_named(machine: Path) -> None:
    (machine / "apt-get").unlink()

    assert programs(machine, as_root=False) == (
        "not installed: bubblewrap, chromium, iproute2, redis-server; tests that need them are skipped. Install them "
        "with your package manager.\n"
    )


@pytest.mark.parametrize("name", ["bwrap", "chromium", "ip", "redis-server"])
def test_a_test_without_the_mark_does_not_see_a_program(name: str) -> None:
    assert shutil.which(name) is None


@pytest.mark.program("ip")
def test_a_test_with_the_mark_sees_that_program_alone() -> None:
    assert shutil.which("ip") is not None
    assert [shutil.which(name) for name in ("bwrap", "chromium", "redis-server")] == [None] * 3


@pytest.mark.slow
def test_both_halves_run_and_the_last_line_says_what_was_skipped(tmp_path: Path) -> None:
    """The suite's own command, with a failure in the first half and without any of the programs."""
    (tmp_path / "test_small.py").write_text(
        """import pytest
def test_fails(): assert False
def test_passes(): pass
@pytest.mark.program("bwrap")
def test_isolates(): raise AssertionError("ran without bubblewrap")
@pytest.mark.program("chromium", optional=True)
def test_opens_a_page_where_it_can(): pass
@pytest.mark.program("redis-server", optional=True)
class TestStore:
    @pytest.mark.program("redis-server")
    def test_stores(self): raise AssertionError("ran without redis-server")
@pytest.mark.e2e
def test_second_half(): pass
@pytest.mark.e2e
@pytest.mark.skip(reason="needs a GPU; none here")
def test_on_a_gpu(): pass
"""
    )
    environment = {**os.environ, "TRACKWAY_TEST_PATH": os.environ["PATH"]}
    command = [sys.executable, str(TESTS / "run_all.py"), str(tmp_path), f"--rootdir={TESTS.parent}", "-q"]
    done = subprocess.run(
        [*command, "-c", str(TESTS.parent / "pyproject.toml"), "-p", "no:cacheprovider"],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (
        "3 passed, 1 failed, 3 skipped: bubblewrap is not installed (1), needs a GPU (1), "
        "redis-server is not installed (1)"
    )


def programs(path: Path, as_root: bool = True) -> str:
    """What `python tests/programs.py` prints where `path` is the only folder of programs."""
    user = {} if as_root or os.geteuid() != 0 else {"user": 65534, "group": 65534, "extra_groups": []}
    python = shutil.which("python3", path="/usr/bin") if user else sys.executable
    done = subprocess.run(
        [str(python), "-S", "-"],
        input=(TESTS / "programs.py").read_text(),
        env={"PATH": str(path)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        **user,
    )
    return done.stdout
