import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trackway.system import append_line, atomic_write, log_tail, new_folder, remove_drafts, replacing

pytestmark = pytest.mark.usefixtures("umask")


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_with_the_mode_that_was_asked_for(tmp_path: Path):
    file = tmp_path / "state.json"
    file.write_text("old")

    atomic_write(file, "né", mode=0o600)

    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode), names(tmp_path)) == (
        b"n\xc3\xa9",
        0o600,
        ["state.json"],
    )


def test_a_new_file_has_the_mode_of_an_ordinary_one(tmp_path: Path):
    atomic_write(tmp_path / "a", b"new")

    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    file.write_text("old")

    with pytest.raises(ValueError, match="half"), replacing(file) as draft:
        draft.write_text("new")
        raise ValueError("half")

    assert (file.read_text(), names(tmp_path)) == ("old", ["rows.parquet"])


def test_a_line_is_appended_with_its_end(tmp_path: Path):
    append_line(tmp_path / "lines", "a")
    append_line(tmp_path / "lines", "b")

    assert (tmp_path / "lines").read_text() == "a\nb\n"


KILLED = """
import os, signal, sys
from pathlib import Path
from trackway.system import replacing
with replacing(Path(sys.argv[1])) as draft:
    draft.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_while_it_writes(path: Path) -> Path:
    """The draft that it leaves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60)
    assert process.returncode == -signal.SIGKILL
    [draft] = path.parent.glob(f".{path.name}.*.tmp")
    return draft


def test_drafts_of_killed_processes_are_removed_once_they_are_old_and_nothing_else(tmp_path: Path):
    now = time.time()
    old = [killed_while_it_writes(tmp_path / "a.json"), killed_while_it_writes(tmp_path / "b" / "c.parquet")]
    others = [
        killed_while_it_writes(tmp_path / "b" / "new"),
        tmp_path / ".user.tmp",
        tmp_path / "notes.0123456789ab.tmp",
    ]
    for path in others[1:]:
        path.write_text("the user's")
    for path in [*old, *others[1:]]:
        os.utime(path, (now - 3700, now - 3700))

    assert remove_drafts(tmp_path) == 2
    assert [path.exists() for path in [*old, *others]] == [False, False, True, True, True]
    assert remove_drafts(tmp_path / "nowhere") == 0


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path: Path):
    with new_folder(tmp_path / "a" / "7") as draft:
        (draft / "file").write_text("new")
        assert names(draft.parent) == [draft.name] and draft.name.startswith(".7.")

    assert ((tmp_path / "a" / "7" / "file").read_text(), names(tmp_path / "a")) == ("new", ["7"])


def test_a_folder_whose_block_raises_is_removed(tmp_path: Path):
    with pytest.raises(ValueError, match="half"), new_folder(tmp_path / "7") as draft:
        (draft / "file").write_text("new")
        raise ValueError("half")

    assert names(tmp_path) == []


def test_a_folder_that_another_process_made_meanwhile_stays(tmp_path: Path):
    with new_folder(tmp_path / "7") as draft:
        (draft / "file").write_text("new")
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "file").write_text("first")

    assert ((tmp_path / "7" / "file").read_text(), names(tmp_path)) == ("first", ["7"])


@pytest.mark.parametrize(
    ("content", "tail"),
    [
        (b"", ""),
        (b"one\n", "one"),
        (b"one\ntwo\nthree\n\n", "two\nthree"),
        (b"x" * 30 + b"\ny\xff", "x" * 17 + "\ny\ufffd"),
    ],
)
def test_the_end_of_a_log_is_its_last_lines_within_the_bytes(tmp_path: Path, content: bytes, tail: str):
    (tmp_path / "log").write_bytes(content)

    assert log_tail(tmp_path / "log", lines=2, max_bytes=20) == tail


def test_a_log_that_is_not_there_is_said_to_be_none(tmp_path: Path):
    assert log_tail(tmp_path / "log") == "(no log)"
