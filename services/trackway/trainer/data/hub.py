"""GSM8K from the Hugging Face hub, through `datasets`, or from its cache when the hub is unreachable."""

from pathlib import Path
from typing import TYPE_CHECKING

from trackway.trainer.data.gsm8k import DATA_SOURCE
from trackway.trainer.data.records import Record
from trackway.trainer.data.rows import Split
from trackway.wire.errors import ErrorCode, TrackwayError

if TYPE_CHECKING:
    from datasets import DatasetDict

CONFIG = "main"
REACH_S = 10.0
"""Longest wait for the hub's first answer."""


def hub_records() -> dict[Split, list[Record]]:
    """The records of both splits. Raises TrackwayError(UNAVAILABLE) when neither the hub nor the cache has them."""
    dataset, folder = _load(), Path(DATA_SOURCE, CONFIG)
    splits: tuple[Split, ...] = ("train", "test")
    return {
        split: [Record(folder / split, line, dict(row)) for line, row in enumerate(dataset[split], start=1)]
        for split in splits
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
