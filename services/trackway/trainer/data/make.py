"""Dataset folders: `train.parquet` and `test.parquet`, what `data.train_files` and `data.val_files` name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trackway.trainer.data.gsm8k import Gsm8kRows, load_gsm8k
from trackway.trainer.data.parquet import write_rows
from trackway.trainer.data.records import SUFFIXES, Rejected
from trackway.trainer.data.rows import Split
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError

SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True)
class SplitSummary:
    """One written file."""

    split: Split
    path: Path
    rows: int
    rejected: tuple[Rejected, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.rows} rows, {len(self.rejected)} records rejected"]
        return "\n".join([*lines, *(f"  {rejected}" for rejected in self.rejected)])


@dataclass(frozen=True)
class DatasetSummary:
    """What was written, and which source records were not."""

    splits: tuple[SplitSummary, ...]

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The rejected records of every split."""
        return tuple(rejected for split in self.splits for rejected in split.rejected)

    def __str__(self) -> str:
        return "\n".join(str(split) for split in self.splits)


def make_tiny(out_dir: Path, train_size: int, test_size: int, seed: int) -> DatasetSummary:
    """Write the tiny word problems; the test split uses number pairs that the train split never shows."""
    sizes: dict[Split, int] = {"train": train_size, "test": test_size}
    for split, size in sizes.items():
        if size < 1:
            raise TrackwayError(
                ErrorCode.INVALID_REQUEST, f"expected at least 1 {split} problem, got {size}; ask for more"
            )
    splits = [_write_split(out_dir, split, make_tiny_rows(split, size, seed)) for split, size in sizes.items()]
    return DatasetSummary(tuple(splits))


def make_gsm8k(local_dataset_path: Path, out_dir: Path) -> DatasetSummary:
    """Write GSM8K from a local copy; both splits are read before either is written."""
    loaded = {split: _load_split(local_dataset_path, split) for split in SPLITS}
    splits = [_write_split(out_dir, split, loaded[split].rows, loaded[split].rejected) for split in SPLITS]
    return DatasetSummary(tuple(splits))


def find_split_files(local_dataset_path: Path, split: Split) -> list[Path]:
    """The split's files, in the folder or in its `main`, where the published dataset keeps this variant."""
    folder = local_dataset_path.expanduser()
    for place in (folder, folder / "main"):
        formats = [files for suffix in SUFFIXES if (files := _matching(place, split, suffix))]
        if len(formats) > 1:
            raise TrackwayError(
                ErrorCode.INVALID_REQUEST,
                f"expected one format for {split} in {place}, got {' and '.join(SUFFIXES)}; keep one",
            )
        if formats:
            return formats[0]
    raise TrackwayError(
        ErrorCode.NOT_FOUND,
        f"expected {split}*.parquet or {split}*.jsonl in {folder} or its subfolder main, found none; "
        "download GSM8K (openai/gsm8k, `main`) there or correct the path",
    )


def _matching(folder: Path, split: Split, suffix: str) -> list[Path]:
    # GSM8K's other variant lies beside the default one under names such as train_socratic.jsonl.
    return [path for path in sorted(folder.glob(f"{split}*{suffix}")) if "socratic" not in path.name]


def _load_split(local_dataset_path: Path, split: Split) -> Gsm8kRows:
    files = find_split_files(local_dataset_path, split)
    loaded = load_gsm8k(files, split)
    if not loaded.rows:
        first = f", the first {loaded.rejected[0]}" if loaded.rejected else ""
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected GSM8K records in {', '.join(map(str, files))}, got none; "
            f"{len(loaded.rejected)} were rejected{first}; download the dataset again",
        )
    return loaded


def _write_split(out_dir: Path, split: Split, rows: list[Sample], rejected: Sequence[Rejected] = ()) -> SplitSummary:
    path = out_dir.expanduser() / f"{split}.parquet"
    write_rows(path, rows)
    return SplitSummary(split, path, len(rows), tuple(rejected))
