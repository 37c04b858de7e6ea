"""Builds dataset folders: `train.parquet` and `test.parquet`, for `data.train_files` and `data.val_files`.

Rows come from files, or from a dataset of the Hugging Face Hub.

GSM8K (`question`, `answer` ending in `#### N`) becomes rows for multi-turn training with a tool.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from trackway.trainer.data.copies import RemoteFolder
from trackway.trainer.data.row_files import SUFFIXES, Record, Rejected, read_records, write_rows
from trackway.trainer.data.rows import AGENT_NAME, ExtraInfo, InteractionKwargs, Split, ToolKwargs, make_row
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.agent import Sample
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError

if TYPE_CHECKING:
    from datasets import DatasetDict


DATA_SOURCE = "openai/gsm8k"
TOOL = "calc_gsm8k_reward"
SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. "
    "Reasoning step by step before any tool call. "
    f"You should use the `{TOOL}` tool after step by step solving the question, "
    "before generate final answer at least once and refine your answer if necessary. "
    "Put your final answer in the format of `#### <answer>`."
)
"""verl's system prompt, word for word (examples/data_preprocess/gsm8k_multiturn_w_tool.py), so that rows are equal."""
INSTRUCTION = "Let's think step by step and output the final answer after `####`."
GROUND_TRUTH = re.compile(r"#### (\-?[0-9\.\,]+)")


@dataclass(frozen=True)
class Gsm8kRows:
    """One split: its rows, and the rejected records."""

    rows: list[Sample]
    rejected: list[Rejected]


def load_gsm8k(records: Iterable[Record | Rejected], split: Split) -> Gsm8kRows:
    """The rows of a split's records. A row's index is its record's position in the source."""
    loaded = Gsm8kRows(rows=[], rejected=[])
    for index, record in enumerate(records):
        row = record if isinstance(record, Rejected) else gsm8k_row(record, split, index)
        if isinstance(row, Rejected):
            loaded.rejected.append(row)
        else:
            loaded.rows.append(row)
    return loaded


def gsm8k_row(record: Record, split: Split, index: int) -> Sample | Rejected:
    """The record as a row, or the reason for its rejection."""
    try:
        question, answer = _text(record, "question"), _text(record, "answer")
        ground_truth = extract_ground_truth(answer)
    except ValueError as error:
        return Rejected(record.file, record.line, str(error))
    user = f"{question} {INSTRUCTION}"
    return make_row(
        data_source=DATA_SOURCE,
        prompt=[Message(role="system", content=SYSTEM), Message(role="user", content=user)],
        ground_truth=ground_truth,
        extra_info=ExtraInfo(
            split=split,
            index=index,
            answer=answer,
            question=question,
            need_tools_kwargs=True,
            tools_kwargs={TOOL: ToolKwargs(create_kwargs={"ground_truth": ground_truth})},
            interaction_kwargs=InteractionKwargs(query=user, ground_truth=ground_truth),
        ),
    )


def extract_ground_truth(answer: str) -> str:
    """The number after `#### `, without thousands separators. Raises ValueError when there is none."""
    match = GROUND_TRUTH.search(answer)
    number = match[1].replace(",", "") if match else ""
    if not any(character.isdigit() for character in number):
        raise ValueError(f"expected an answer ending in '#### <number>', got one ending in {answer[-40:]!r}")
    return number


def _text(record: Record, field: str) -> str:
    if field not in record.data:
        raise ValueError(f"expected the field {field!r}, got only {sorted(record.data)}")
    value = record.data[field]
    if not isinstance(value, str):
        raise ValueError(f"expected text in {field!r}, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"expected text in {field!r}, got an empty string")
    return value


CONFIG = "main"
REACH_S = 10.0
"""Longest wait for the hub's first answer."""


def hub_records() -> dict[Split, list[Record]]:
    """The records of both splits. Raises TrackwayError(UNAVAILABLE) when neither the hub nor the cache has them."""
    dataset, folder = _load(), Path(DATA_SOURCE, CONFIG)
    return {
        split: [Record(folder / split, line, dict(row)) for line, row in enumerate(dataset[split], start=1)]
        for split in SPLITS
    }


def _load() -> "DatasetDict":
    import datasets.config  # the import takes seconds, and only this function needs it

    failure = _connection_failure()
    if failure is not None:
        # Use only the cache: the connection attempts of `datasets` to an unreachable hub take minutes.
        datasets.config.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(DATA_SOURCE, CONFIG)
    except Exception as error:  # from the hub, the cache, parquet, or the client's HTTP library
        message = (
            f"expected {DATA_SOURCE} on the Hugging Face hub or in its cache, got {failure or _one_line(error)}; "
            "pass the folder of a local copy as --local-dataset-path"
        )
        raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error


def _connection_failure() -> str | None:
    """The reason why the hub does not answer, or None when it does."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(DATA_SOURCE, timeout=REACH_S)
    except Exception as error:  # the client's HTTP library, and so its errors, changed between versions
        return _one_line(error)
    return None


def _one_line(error: Exception) -> str:
    """The error in one line."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}"


T = TypeVar("T")

SPLITS: tuple[Split, ...] = ("train", "test")


class Watch(Protocol):
    """Returns the items, and may display progress."""

    def __call__(self, items: Iterable[T], what: str, /) -> Iterable[T]: ...


def unwatched(items: Iterable[T], what: str) -> Iterable[T]:
    """Return the items without progress."""
    return items


@dataclass(frozen=True)
class SplitSummary:
    """A written file."""

    split: Split
    path: Path
    rows: int
    rejected: tuple[Rejected, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.rows} rows, {len(self.rejected)} records rejected"]
        return "\n".join([*lines, *(f"  {rejected}" for rejected in self.rejected)])


@dataclass(frozen=True)
class DatasetSummary:
    """The written files, and the rejected source records."""

    splits: tuple[SplitSummary, ...]
    copies: tuple[str, ...] = ()
    """URLs that the files were copied to."""

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The rejected records of all splits."""
        return tuple(rejected for split in self.splits for rejected in split.rejected)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.splits), *(f"copied to {url}" for url in self.copies)])


def make_tiny(
    out_dir: Path, train_size: int, test_size: int, seed: int, agent_name: str = AGENT_NAME
) -> DatasetSummary:
    """Write the tiny word problems. The test split uses number pairs that do not occur in the train split."""
    sizes: dict[Split, int] = {"train": train_size, "test": test_size}
    for split, size in sizes.items():
        if size < 1:
            raise TrackwayError(
                ErrorCode.INVALID_REQUEST, f"expected at least 1 {split} problem, got {size}; raise its number"
            )
    rows = {split: make_tiny_rows(split, size, seed) for split, size in sizes.items()}
    named = {split: [row.model_copy(update={"agent_name": agent_name}) for row in rows[split]] for split in rows}
    return DatasetSummary(tuple(_write_split(out_dir, split, named[split]) for split in sizes))


def make_gsm8k(
    local_dataset_path: Path | None, out_dir: Path, copy_to: str | None = None, watch: Watch = unwatched
) -> DatasetSummary:
    """Write GSM8K from a local copy, else from the Hugging Face hub, and optionally copy it to an fsspec URL.

    Both splits are read before either is written. Raises TrackwayError.
    """
    remote = None if copy_to is None else RemoteFolder(copy_to)
    sources: Mapping[Split, Iterable[Record | Rejected]] = (
        hub_records() if local_dataset_path is None else _local_records(local_dataset_path, out_dir)
    )
    loaded = {split: _load_split(sources[split], split, watch) for split in SPLITS}
    splits = [_write_split(out_dir, split, loaded[split].rows, loaded[split].rejected) for split in SPLITS]
    copies = [] if remote is None else [remote.put(split.path) for split in watch(splits, f"copy to {copy_to}")]
    return DatasetSummary(tuple(splits), tuple(copies))


def find_split_files(local_dataset_path: Path, split: Split) -> list[Path]:
    """The split's files, in the folder or in its subfolder `main`, as in the published dataset."""
    folder = local_dataset_path.expanduser()
    for candidate in (folder, folder / "main"):
        formats = [files for suffix in SUFFIXES if (files := _matching(candidate, split, suffix))]
        if len(formats) > 1:
            suffixes = " and ".join(files[0].suffix for files in formats)
            raise TrackwayError(
                ErrorCode.INVALID_REQUEST,
                f"expected one format for {split} in {candidate}, got {suffixes}; keep one",
            )
        if formats:
            return formats[0]
    raise TrackwayError(
        ErrorCode.NOT_FOUND,
        f"expected {split}*.parquet or {split}*.jsonl in {folder} or its subfolder main, found none; "
        "download GSM8K (openai/gsm8k, `main`) there or correct the path",
    )


def _matching(folder: Path, split: Split, suffix: str) -> list[Path]:
    # GSM8K's other variant is in the same folder, under names such as train_socratic.jsonl.
    return [path for path in sorted(folder.glob(f"{split}*{suffix}")) if "socratic" not in path.name]


def _local_records(folder: Path, out_dir: Path) -> dict[Split, Iterable[Record | Rejected]]:
    files = {split: find_split_files(folder, split) for split in SPLITS}
    sources = {path.resolve() for split in SPLITS for path in files[split]}
    if not sources.isdisjoint(_path(out_dir, split).resolve() for split in SPLITS):
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected an output folder other than the source's, got {out_dir}; its files would be replaced",
        )
    return {split: chain.from_iterable(map(read_records, files[split])) for split in SPLITS}


def _load_split(records: Iterable[Record | Rejected], split: Split, watch: Watch) -> Gsm8kRows:
    loaded = load_gsm8k(watch(records, f"{split} rows"), split)
    if not loaded.rows:
        first = f", the first {loaded.rejected[0]}" if loaded.rejected else ""
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected GSM8K records of the {split} split, got none; "
            f"{len(loaded.rejected)} were rejected{first}; download the dataset again",
        )
    return loaded


def _write_split(out_dir: Path, split: Split, rows: list[Sample], rejected: Sequence[Rejected] = ()) -> SplitSummary:
    path = _path(out_dir, split)
    write_rows(path, rows)
    return SplitSummary(split, path, len(rows), tuple(rejected))


def _path(out_dir: Path, split: Split) -> Path:
    return out_dir.expanduser() / f"{split}.parquet"
