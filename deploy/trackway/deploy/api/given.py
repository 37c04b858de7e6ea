"""Converts the arguments of a Python call: keys to overrides of a command line, rows to a file."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from pydantic import JsonValue

from trackway.run_config.compose import Tree, leaves
from trackway.system import atomic_write
from trackway.wire.errors import ErrorCode, TrackwayError

ROWS = "rows"
"""Subfolder of the outputs folder for the rows of Python calls."""
_DATA_SOURCE = "python"
_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "agent_name", "extra_info")


@runtime_checkable
class Frame(Protocol):
    """A pandas DataFrame."""

    def to_dict(self, orient: str) -> list[dict[str, Any]]: ...


@runtime_checkable
class HubDataset(Protocol):
    """A `datasets.Dataset` of Hugging Face."""

    def to_list(self) -> list[dict[str, Any]]: ...


RowsGiven = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]] | Frame | HubDataset
"""Files of rows, or the rows: dicts, a DataFrame or a Hugging Face dataset."""


def overrides(keys: Mapping[str, object]) -> list[str]:
    """The keys as overrides of a command line. Sections are nested dicts, `trainer={"save_freq": 5}`."""
    return [f"{key}={_in_hydra(value)}" for key, value in leaves(cast(Tree, dict(keys))).items()]


def _in_hydra(value: object) -> str:
    """The value in Hydra's grammar, whose quoted text escapes nothing but quotes and the backslashes before them."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(_in_hydra, value))}]"
    text = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), str(value))
    return f"'{text}'"


def row_files(rows: RowsGiven, outputs: Path) -> list[str]:
    """Files of the rows. Rows that are not files are written to one in the outputs folder, named by its content.

    Raises TrackwayError(INVALID_REQUEST) for a row without prompt, and StorageError.
    """
    if isinstance(rows, str | Path):
        return [str(rows)]
    items = _listed(rows)
    if items and all(isinstance(item, str | Path) for item in items):
        return [str(item) for item in items]
    lines = [json.dumps(_row(number, item), ensure_ascii=False, default=_plain) for number, item in enumerate(items)]
    if not lines:
        raise _invalid("rows: expected at least one row, got none")
    text = "\n".join(lines) + "\n"
    file = outputs.resolve() / ROWS / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, text, what="rows")
    return [str(file)]


def _listed(rows: object) -> list[Any]:
    if isinstance(rows, Frame) and not isinstance(rows, Mapping):
        return rows.to_dict("records")
    if isinstance(rows, HubDataset):
        return rows.to_list()
    return list(cast(Iterable[Any], rows))


def _row(number: int, given: object) -> dict[str, JsonValue]:
    """The row in verl's schema. `prompt` may be text, and `answer` stands for `reward_model.ground_truth`."""
    if not isinstance(given, Mapping):
        raise _invalid(f"rows[{number}]: expected a dict with 'prompt' and 'answer', got {type(given).__name__}")
    row: dict[str, JsonValue] = {str(key): value for key, value in given.items()}
    answer = row.pop("answer", None)
    unknown = [key for key in row if key not in _COLUMNS]
    if "prompt" not in row or unknown:
        got = f"the column {unknown[0]!r}" if unknown else f"the columns {', '.join(row) or 'none'}"
        raise _invalid(
            f"rows[{number}]: expected 'prompt', 'answer' and columns out of {', '.join(_COLUMNS)}, got {got}; put "
            "other values into 'extra_info'"
        )
    if isinstance(row["prompt"], str):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    row.setdefault("data_source", _DATA_SOURCE)
    row.setdefault("reward_model", {"ground_truth": "" if answer is None else str(answer)})
    extra = row.get("extra_info") or {}
    row["extra_info"] = {"index": number, **extra} if isinstance(extra, dict) else extra
    return row


def _plain(value: object) -> JsonValue:
    """A NumPy value as Python's."""
    if hasattr(value, "tolist"):
        return cast(JsonValue, value.tolist())  # pyright: ignore[reportAttributeAccessIssue]
    raise TypeError(f"expected values of JSON, got {type(value).__name__}")


def _invalid(message: str) -> TrackwayError:
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)
