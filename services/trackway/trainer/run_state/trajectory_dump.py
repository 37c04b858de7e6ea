"""Trajectories of a step as parquet, for inspection and comparison after training.

Scalars and token arrays are columns; nested values (turns, messages, spans) are JSON text.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from trackway.system import replacing, writing
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorBody
from trackway.wire.trajectory import Reward, Tags, Timings, TokenRow, Trajectory, Turn, WeightSpan

_NESTED: dict[str, TypeAdapter] = {
    "tags": TypeAdapter(Tags),
    "prompt_messages": TypeAdapter(list[Message]),
    "turns": TypeAdapter(list[Turn]),
    "weight_versions": TypeAdapter(list[WeightSpan]),
    "further_rows": TypeAdapter(list[TokenRow]),
    "reward": TypeAdapter(Reward | None),
    "timings": TypeAdapter(Timings),
    "error": TypeAdapter(ErrorBody | None),
}

_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("step", pa.int64()),
        ("sample_index", pa.int64()),
        ("rollout_n", pa.int64()),
        ("score", pa.float64()),
        ("session_id", pa.string()),
        ("agent_name", pa.string()),
        ("data_source", pa.string()),
        ("stop_reason", pa.string()),
        ("num_turns", pa.int64()),
        ("log", pa.string()),
        ("trace_id", pa.string()),
        ("span_id", pa.string()),
        ("trace_bytes", pa.int64()),
        ("incidents", pa.list_(pa.string())),
        ("prompt_ids", pa.list_(pa.int64())),
        ("response_ids", pa.list_(pa.int64())),
        ("response_mask", pa.list_(pa.int64())),
        ("response_logprobs", pa.list_(pa.float64())),
        ("tool_rewards", pa.list_(pa.float64())),
        *((name, pa.string()) for name in _NESTED),
    ]
)

_INDEX = _SCHEMA.get_field_index("sample_index")
_WITH_TEXT_INDEX = _SCHEMA.set(_INDEX, pa.field("sample_index", pa.string()))
"""Schema of a file in which any row's index is text; all indices are then stored as text."""

_VIEWS = {"step", "sample_index", "rollout_n", "score"}
"""Columns that repeat a nested value so that it can be filtered on."""


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Replace the file with these trajectories. Raises StorageError when it cannot be written."""
    records = [_record(trajectory) for trajectory in trajectories]
    schema = _SCHEMA
    if any(isinstance(record["sample_index"], str) for record in records):
        records = [{**record, "sample_index": str(record["sample_index"])} for record in records]
        schema = _WITH_TEXT_INDEX
    table = pa.Table.from_pylist(records, schema=schema)
    with writing(path, "trajectories"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, "trajectories") as draft:
        pq.write_table(table, draft, compression="zstd")


def read_trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of a file written by `write_trajectories`; columns that an older file lacks get defaults."""
    return [_trajectory(record) for record in pq.read_table(path).to_pylist()]


def _record(trajectory: Trajectory) -> dict[str, object]:
    record: dict[str, object] = trajectory.model_dump(exclude=set(_NESTED))
    nested = {name: adapter.dump_json(getattr(trajectory, name)).decode() for name, adapter in _NESTED.items()}
    score = None if trajectory.reward is None else trajectory.reward.score
    views = {name: getattr(trajectory.tags, name) for name in ("step", "sample_index", "rollout_n")}
    return record | nested | views | {"score": score}


def _trajectory(record: dict[str, str]) -> Trajectory:
    nested = {name: adapter.validate_json(record[name]) for name, adapter in _NESTED.items() if name in record}
    plain = {name: value for name, value in record.items() if name not in _NESTED and name not in _VIEWS}
    return Trajectory.model_validate(plain | nested)
