"""GSM8K from the Hugging Face hub, through `datasets`; what was fetched before is taken when the hub is away."""

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
    """The records of both splits. Raises TrackwayError(UNAVAILABLE) when neither the hub nor its cache has them."""
    dataset, place = _load(), Path(DATA_SOURCE, CONFIG)
    splits: tuple[Split, ...] = ("train", "test")
    return {
        split: [Record(place / split, line, dict(row)) for line, row in enumerate(dataset[split], start=1)]
        for split in splits
    }


def _load() -> "DatasetDict":
    import datasets.config  # takes seconds, and is needed for this alone

    away = _why_away()
    if away is not None:
        # Only the cache, and at once: the attempts of `datasets` itself to reach a hub that is away take minutes.
        datasets.config.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(DATA_SOURCE, CONFIG)
    except Exception as error:  # of the hub, the cache, parquet, or whichever HTTP library its client uses
        message = (
            f"expected {DATA_SOURCE} on the Hugging Face hub or in its cache, got {away or _told(error)}; "
            "give the folder of a local copy as --local-dataset-path"
        )
        raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error


def _why_away() -> str | None:
    """Why the hub does not answer, or None when it does."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(DATA_SOURCE, timeout=REACH_S)
    except Exception as error:  # its client has changed its HTTP library, and with it the errors, more than once
        return _told(error)
    return None


def _told(error: Exception) -> str:
    """The error in one line."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}"
