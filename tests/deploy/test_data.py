"""`trackway data`: options under our names and verl's, and what is written where."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from trackway.deploy.commands.data import app

RECORD = {"question": "Six and one?", "answer": "#### 7"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The published dataset's layout: main/<split>-00000-of-00001, here as JSONL."""
    folder = tmp_path / "source" / "main"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}-00000-of-00001.jsonl").write_text(json.dumps(RECORD))
    return folder.parent


@pytest.mark.parametrize(
    "options",
    [
        ("--local-dir", "--local-dataset-path", "--hdfs-dir"),
        ("--local_dir", "--local_dataset_path", "--hdfs_dir"),
        ("--local_save_dir", "--local_dataset_path", "--hdfs_dir"),
    ],
)
def test_the_options_have_our_spelling_and_verls(options: tuple[str, str, str], source: Path, tmp_path: Path) -> None:
    places = [str(tmp_path / "out"), str(source), f"file://{tmp_path}/copy"]
    words = [word for pair in zip(options, places, strict=True) for word in pair]

    result = CliRunner().invoke(app, ["gsm8k", *words, "--json"])

    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [(split["split"], split["rows"]) for split in told["splits"]] == [("train", 1), ("test", 1)]
    assert told["copies"] == [f"file://{tmp_path}/copy/{split}.parquet" for split in ("train", "test")]
    for folder in ("out", "copy"):
        assert pq.read_table(tmp_path / folder / "test.parquet")["agent_name"].to_pylist() == ["tool_agent"]


def test_without_a_folder_the_files_are_where_the_reproduce_script_looks(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    result = CliRunner().invoke(app, ["gsm8k", "--local-dataset-path", str(source)])

    assert result.exit_code == 0, result.output
    written = sorted(path.name for path in (tmp_path / "data" / "gsm8k").iterdir())
    assert written == ["test.parquet", "train.parquet"]


@pytest.mark.slow
def test_rows_without_room_are_one_line_that_names_the_disk_and_leave_nothing(small_disk: Path) -> None:
    words = [sys.executable, "-m", "trackway.deploy.cli", "data", "make-tiny", str(small_disk), "--train-size", "90000"]

    made = subprocess.run(words, capture_output=True, text=True)

    assert (made.returncode, made.stderr.count("\n")) == (2, 1)
    assert made.stderr.startswith(f"error: expected to write 90000 rows to {small_disk}/train.parquet, got 'No space ")
    assert list(small_disk.iterdir()) == []
