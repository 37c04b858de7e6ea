"""Copies to other file systems."""

from pathlib import Path

import fsspec
import pytest

from trackway.trainer.data.copies import RemoteFolder
from trackway.wire.errors import ErrorCode, TrackwayError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"rows")
    return path


def test_a_file_is_copied_to_a_url(file: Path) -> None:
    url = RemoteFolder("memory://copies/gsm8k/").put(file)

    assert url == "memory://copies/gsm8k/train.parquet"
    assert fsspec.filesystem("memory").cat_file("/copies/gsm8k/train.parquet") == b"rows"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_is_made_and_an_older_copy_is_replaced(file: Path, scheme: str) -> None:
    folder = RemoteFolder(f"{scheme}{file.parent}/new/folder")
    folder.put(file)
    file.write_bytes(b"newer")

    folder.put(file)

    assert (file.parent / "new" / "folder" / "train.parquet").read_bytes() == b"newer"


@pytest.mark.parametrize("url", ["nothing://bucket/gsm8k", "abfs://bucket/gsm8k"])
def test_a_protocol_that_nothing_here_speaks_is_an_error_that_says_what_to_install(url: str) -> None:
    with pytest.raises(TrackwayError, match=f"got {url} .*install the package for its protocol") as caught:
        RemoteFolder(url)

    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_copy_that_fails_says_that_the_file_itself_is_whole(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")

    with pytest.raises(
        TrackwayError, match=r"expected to write train\.parquet to .*taken.*itself is complete"
    ) as caught:
        RemoteFolder(str(tmp_path / "taken")).put(file)

    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_files_and_folders_are_listed_fetched_and_removed(file: Path, tmp_path: Path) -> None:
    remote = RemoteFolder("memory://copies/listed")
    assert remote.names() == []

    remote.put(file)
    remote.put(file, "below/rows.parquet")
    remote.get("below/rows.parquet", tmp_path / "new/back")

    assert sorted(remote.names()) == ["below", "train.parquet"]
    assert (tmp_path / "new/back").read_bytes() == b"rows"
    for name in ("below", "train.parquet", "nowhere"):
        remote.remove(name)
    assert remote.names() == []
    with pytest.raises(TrackwayError, match=r"read train\.parquet of memory://copies/listed, got FileNotFound"):
        remote.get("train.parquet", tmp_path / "back")
