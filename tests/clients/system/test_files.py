import os
import stat
from pathlib import Path

import pytest

from trackway.system import append_line, atomic_write, replacing

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
