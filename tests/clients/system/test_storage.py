"""Storage without room or without the right to write, for everything that is written."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trackway.system import StorageError, append_line, atomic_write, replacing, storage_problem, writing
from trackway.wire.errors import ErrorCode

TOO_MUCH = bytes(2_000_000)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_is_named_with_what_was_being_written_and_nothing_stays_behind(small_disk: Path):
    (small_disk / "state.json").write_text("old")

    with pytest.raises(StorageError) as caught:
        atomic_write(small_disk / "state.json", TOO_MUCH, what="the state of run 'a'")

    free = int(str(caught.value.detail["free_bytes"]))
    assert (caught.value.code, caught.value.status, caught.value.errno) == (ErrorCode.DISK_FULL, 507, errno.ENOSPC)
    assert caught.value.detail == {
        "path": f"{small_disk}/state.json",
        "disk": str(small_disk),
        "free_bytes": free,
        "writing": "the state of run 'a'",
        "reason": "ENOSPC",
    }
    assert caught.value.message == (
        f"expected to write the state of run 'a' to {small_disk}/state.json, got 'No space left on device' with {free} "
        f"bytes free on the disk at {small_disk}; free space there, or enlarge the disk or its quota"
    )
    assert ((small_disk / "state.json").read_text(), names(small_disk)) == ("old", ["state.json"])


def test_a_line_without_room_leaves_the_lines_before_it(small_disk: Path):
    append_line(small_disk / "rows", "first")

    with pytest.raises(StorageError):
        append_line(small_disk / "rows", "x" * 2_000_000)
    append_line(small_disk / "rows", "second")

    assert (small_disk / "rows").read_text() == "first\nsecond\n"


def test_a_library_in_rust_says_the_same(small_disk: Path):
    with (
        pytest.raises(StorageError, match=r"to write the weights to .*, got 'No space left on device'"),
        replacing(small_disk / "a.safetensors", "the weights") as draft,
    ):
        save_file({"x": torch.zeros(1_000_000)}, draft)

    assert names(small_disk) == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EDQUOT, ErrorCode.DISK_FULL),
        (errno.EROFS, ErrorCode.NOT_WRITABLE),
        (errno.EACCES, ErrorCode.NOT_WRITABLE),
        (errno.EIO, ErrorCode.NOT_WRITABLE),
    ],
)
def test_a_quota_a_read_only_disk_and_a_foreign_folder_are_storage_too(tmp_path: Path, number: int, code: ErrorCode):
    with pytest.raises(StorageError, match=os.strerror(number)) as caught, writing(tmp_path / "not" / "there", "rows"):
        raise OSError(number, os.strerror(number))

    assert (caught.value.code, caught.value.status, caught.value.retryable) == (code, 507, False)


@pytest.mark.parametrize("error", [ValueError("no storage"), FileNotFoundError(errno.ENOENT, "no such file")])
def test_other_errors_pass(tmp_path: Path, error: Exception):
    with pytest.raises(type(error)) as caught, writing(tmp_path, "rows"):
        raise error

    assert caught.value is error


def test_a_read_only_disk_is_named(small_disk: Path, remount: Callable[[Path, str], None]):
    remount(small_disk, "ro")

    with pytest.raises(StorageError, match="'Read-only file system'") as caught:
        atomic_write(small_disk / "a", "text")

    assert caught.value.code is ErrorCode.NOT_WRITABLE


def test_a_disk_that_takes_nothing_more_can_be_told_without_writing(
    small_disk: Path, fill: Callable[..., Path], remount: Callable[[Path, str], None]
):
    before = storage_problem(small_disk)
    fill(small_disk)
    full = storage_problem(small_disk / "not" / "there")
    remount(small_disk, "ro")
    read_only = storage_problem(small_disk)

    assert before is None
    assert full is not None and full.detail["reason"] == "ENOSPC"
    assert read_only is not None and read_only.detail["reason"] == "EROFS"
