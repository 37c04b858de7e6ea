"""Dataset folders."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trackway.trainer.data.make import find_split_files, make_gsm8k, make_tiny
from trackway.trainer.data.row_files import read_rows
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.errors import ErrorCode, TrackwayError

T = TypeVar("T")

GOOD = {"question": "Six and one?", "answer": "#### 7"}


def _write_source(folder: Path, train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    for split, records in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_make_tiny_writes_both_splits_of_the_sizes_asked_for(tmp_path: Path) -> None:
    summary = make_tiny(tmp_path / "tiny", train_size=5, test_size=3, seed=1)

    assert [(s.split, s.path.name, s.rows) for s in summary.splits] == [
        ("train", "train.parquet", 5),
        ("test", "test.parquet", 3),
    ]
    assert read_rows(tmp_path / "tiny" / "train.parquet") == make_tiny_rows("train", 5, seed=1)
    assert read_rows(tmp_path / "tiny" / "test.parquet") == make_tiny_rows("test", 3, seed=1)


def test_make_tiny_names_the_agent_loop_of_its_rows(tmp_path: Path) -> None:
    make_tiny(tmp_path, train_size=2, test_size=1, seed=1, agent_name="external")

    rows = [*read_rows(tmp_path / "train.parquet"), *read_rows(tmp_path / "test.parquet")]
    assert [row.agent_name for row in rows] == ["external"] * 3


def test_make_tiny_refuses_an_empty_split_before_it_writes(tmp_path: Path) -> None:
    with pytest.raises(TrackwayError, match="expected at least 1 test problem, got 0"):
        make_tiny(tmp_path, train_size=5, test_size=0, seed=1)

    assert list(tmp_path.iterdir()) == []


def test_make_gsm8k_writes_the_good_rows_and_lists_the_rejected(tmp_path: Path) -> None:
    _write_source(tmp_path, train=[GOOD, {"question": "q"}, GOOD], test=[GOOD])

    summary = make_gsm8k(tmp_path, tmp_path / "out")

    assert [(s.split, s.rows, len(s.rejected)) for s in summary.splits] == [("train", 2, 1), ("test", 1, 0)]
    assert [(rejected.file.name, rejected.line) for rejected in summary.rejected] == [("train.jsonl", 2)]
    assert [row.index for row in read_rows(tmp_path / "out" / "train.parquet")] == [0, 2]
    assert read_rows(tmp_path / "out" / "test.parquet")[0].extra_info["split"] == "test"


def test_the_summary_in_text_names_each_file_and_each_rejected_record(tmp_path: Path) -> None:
    _write_source(tmp_path, train=[GOOD, {"question": "q"}], test=[GOOD])

    text = str(make_gsm8k(tmp_path, tmp_path / "out"))

    assert text.splitlines() == [
        f"{tmp_path}/out/train.parquet: 1 rows, 1 records rejected",
        f"  {tmp_path}/train.jsonl:2: expected the field 'answer', got only ['question']",
        f"{tmp_path}/out/test.parquet: 1 rows, 0 records rejected",
    ]


def test_make_gsm8k_copies_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    _write_source(tmp_path, train=[GOOD], test=[GOOD])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")

    summary = make_gsm8k(tmp_path, tmp_path / "out", copy_to=f"file://{tmp_path}/copy")

    copies = sorted((tmp_path / "copy").iterdir())
    assert [path.name for path in copies] == ["test.parquet", "train.parquet"]
    assert [path.read_bytes() for path in copies] == [(tmp_path / "out" / path.name).read_bytes() for path in copies]
    assert summary.copies == tuple(f"file://{tmp_path}/copy/{split}.parquet" for split in ("train", "test"))
    assert str(summary).endswith(f"copied to file://{tmp_path}/copy/test.parquet")


def test_a_place_that_cannot_be_copied_to_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    _write_source(tmp_path, train=[GOOD], test=[GOOD])

    with pytest.raises(TrackwayError, match="nothing://x"):
        make_gsm8k(tmp_path, tmp_path / "out", copy_to="nothing://x")

    assert not (tmp_path / "out").exists()


def test_a_source_is_never_replaced_by_its_rows(tmp_path: Path) -> None:
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([GOOD]), tmp_path / f"{split}.parquet")

    with pytest.raises(TrackwayError, match="its files would be replaced"):
        make_gsm8k(tmp_path, tmp_path / "sub" / "..")

    assert pq.read_table(tmp_path / "train.parquet").column_names == ["question", "answer"]


def test_what_takes_long_can_be_watched(tmp_path: Path) -> None:
    _write_source(tmp_path, train=[GOOD, {"question": "q"}, GOOD], test=[GOOD])
    seen: list[tuple[str, int]] = []

    def watch(items: Iterable[T], what: str) -> Iterable[T]:
        taken = list(items)
        seen.append((what, len(taken)))
        return taken

    make_gsm8k(tmp_path, tmp_path / "out", copy_to=str(tmp_path / "copy"), watch=watch)

    assert seen == [("train rows", 3), ("test rows", 1), (f"copy to {tmp_path}/copy", 2)]


def test_make_gsm8k_writes_nothing_when_a_split_has_no_good_record(tmp_path: Path) -> None:
    _write_source(tmp_path, train=[GOOD], test=[{"question": "q"}])

    with pytest.raises(TrackwayError, match=r"1 were rejected, the first .*test\.jsonl:1: expected the field 'answer'"):
        make_gsm8k(tmp_path, tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_split_files_are_found_in_main_in_order_and_without_the_socratic_variant(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    for name in ("train-1.parquet", "train-0.parquet", "train_socratic.parquet", "test-0.parquet"):
        pq.write_table(pa.Table.from_pylist([GOOD]), tmp_path / "main" / name)

    found = find_split_files(tmp_path, "train")

    assert [path.name for path in found] == ["train-0.parquet", "train-1.parquet"]


def test_a_split_in_two_formats_is_refused(tmp_path: Path) -> None:
    _write_source(tmp_path, train=[GOOD], test=[GOOD])
    pq.write_table(pa.Table.from_pylist([GOOD]), tmp_path / "train.parquet")

    with pytest.raises(TrackwayError, match=r"expected one format for train in .*, got \.parquet and \.jsonl"):
        find_split_files(tmp_path, "train")


def test_a_folder_without_the_split_is_an_error_that_says_what_to_look_for(tmp_path: Path) -> None:
    with pytest.raises(TrackwayError, match=r"expected test\*\.parquet or test\*\.jsonl") as caught:
        find_split_files(tmp_path, "test")

    assert caught.value.code is ErrorCode.NOT_FOUND
