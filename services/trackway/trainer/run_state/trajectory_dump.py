"""Trajectories of a step as parquet, for inspection and comparison after training.

Scalars and token arrays are columns. Nested values (turns, messages, spans) are JSON text.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trackway.system import replacing, writing
from trackway.trainer.run_state.trajectory_record import NESTED, from_record, to_record
from trackway.wire.trajectory import Trajectory

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
        ("ground_truth", pa.string()),
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
        ("is_baseline", pa.bool_()),
        ("offered_tools", pa.list_(pa.string())),
        ("tool_rewards", pa.list_(pa.float64())),
        *((name, pa.string()) for name in NESTED if name != "teacher"),
    ]
)
_TEACHER = pa.field("teacher", pa.string())
"""A further column of a file with trajectories that a teacher scored."""

_INDEX = _SCHEMA.get_field_index("sample_index")
_WITH_TEXT_INDEX = _SCHEMA.set(_INDEX, pa.field("sample_index", pa.string()))
"""Schema of a file in which any row's index is text. All indices are then stored as text."""


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Replace the file with these trajectories. Raises StorageError when it cannot be written."""
    records = [to_record(trajectory) for trajectory in trajectories]
    schema = _SCHEMA
    if any(isinstance(record["sample_index"], str) for record in records):
        records = [{**record, "sample_index": str(record["sample_index"])} for record in records]
        schema = _WITH_TEXT_INDEX
    if any(trajectory.teacher for trajectory in trajectories):
        schema = schema.append(_TEACHER)
    table = pa.Table.from_pylist(records, schema=schema)
    with writing(path, "trajectories"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, "trajectories") as draft:
        pq.write_table(table, draft, compression="zstd")


def read_trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of a file written by `write_trajectories`. Columns that an older file lacks get defaults."""
    return [from_record(record) for record in pq.read_table(path).to_pylist()]
