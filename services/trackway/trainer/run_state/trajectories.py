"""Trajectories of a step as parquet, and what an update computed of their tokens.

Scalars and token arrays are columns. Nested values (turns, messages, spans) are JSON text.

    <run>/token_values/step_<n>.parquet     a row per row of tokens of each trajectory (`trackway.save_token_values`)

A trajectory that was not trained on has its `status` and no lists. The lists are as long as the row's response. NaN
and false stand for values that were not computed (TokenValues).

`Generations` writes samples as JSON lines, in the form of verl's `rollout_data_dir` and `validation_data_dir`
(`_dump_generations` in verl/trainer/ppo/ray_trainer.py): {"input", "output", "gts", "score", "step", each component of
the reward, and "turn_scores" where there are some}.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from trackway.learner.filtering import FilteredBatch, TrainStatus
from trackway.system import replacing, writing
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorBody
from trackway.wire.trajectory import (
    Incident,
    Reward,
    Tags,
    TeacherScores,
    Timings,
    TokenRow,
    TokenUsage,
    Trajectory,
    Turn,
    WeightSpan,
)

if TYPE_CHECKING:
    from torch import Tensor

    from trackway.learner.batch import TokenValues
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trackway.system import atomic_write

NESTED: dict[str, TypeAdapter] = {
    "tags": TypeAdapter(Tags),
    "prompt_messages": TypeAdapter(list[Message]),
    "turns": TypeAdapter(list[Turn]),
    "weight_versions": TypeAdapter(list[WeightSpan]),
    "further_rows": TypeAdapter(list[TokenRow]),
    "reward": TypeAdapter(Reward | None),
    "timings": TypeAdapter(Timings),
    "error": TypeAdapter(ErrorBody | None),
    "usage": TypeAdapter(TokenUsage | None),
    "teacher": TypeAdapter(TeacherScores | None),
    "incident_services": TypeAdapter(dict[Incident, list[str]]),
}
"""Columns of JSON text."""

_VIEWS = {"step", "sample_index", "rollout_n", "score"}
"""Columns that repeat a nested value so that it can be filtered on."""


def to_record(trajectory: Trajectory) -> dict[str, object]:
    """The trajectory's columns."""
    record: dict[str, object] = trajectory.model_dump(exclude=set(NESTED))
    nested = {name: adapter.dump_json(getattr(trajectory, name)).decode() for name, adapter in NESTED.items()}
    score = None if trajectory.reward is None else trajectory.reward.score
    views = {name: getattr(trajectory.tags, name) for name in ("step", "sample_index", "rollout_n")}
    return record | nested | views | {"score": score}


def from_record(record: dict[str, str]) -> Trajectory:
    """The trajectory of a record. Columns that it lacks get defaults. Raises ValidationError."""
    nested = {name: adapter.validate_json(record[name]) for name, adapter in NESTED.items() if name in record}
    plain = {name: value for name, value in record.items() if name not in NESTED and name not in _VIEWS}
    return Trajectory.model_validate(plain | nested)


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
    _write_table(path, table, "trajectories")


def _write_table(path: Path, table: pa.Table, what: str) -> None:
    with writing(path, what):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, what) as draft:
        pq.write_table(table, draft, compression="zstd")


def read_trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of a file written by `write_trajectories`. Columns that an older file lacks get defaults."""
    return [from_record(record) for record in pq.read_table(path).to_pylist()]


def write_token_values(path: Path, step: int, batch: FilteredBatch, values: "TokenValues") -> int:
    """Replace the file with the values of the batch's used trajectories, in their order. Returns its bytes.

    Raises StorageError when it cannot be written.
    """
    rows = [
        (trajectory, status, number)
        for trajectory, status in zip(batch.trajectories, batch.statuses, strict=True)
        for number in range(len(trajectory.rows))
    ]
    lengths = iter(values.lengths)
    # Null, and no place in the flat values, for a trajectory that was not trained on.
    ends = [next(lengths) if status is TrainStatus.USED else None for _, status, _ in rows]
    offsets = list(accumulate((length or 0 for length in ends), initial=0))
    is_null = pa.array([length is None for length in ends], pa.bool_())

    def lists(flat: "Tensor") -> pa.Array:
        kept = pa.array(np.asarray(flat))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), kept, mask=is_null)

    table = pa.table(
        {
            "step": pa.array([step] * len(rows), pa.int64()),
            "sample_index": [str(trajectory.tags.sample_index) for trajectory, _, _ in rows],
            "rollout_n": pa.array([trajectory.tags.rollout_n for trajectory, _, _ in rows], pa.int64()),
            "row": pa.array([number for *_, number in rows], pa.int64()),
            "status": [status.value for _, status, _ in rows],
            "logprobs": lists(values.logprobs),
            "entropies": lists(values.entropies),
            "advantages": lists(values.advantages),
            "clipped": lists(values.clipped),
            "kept": lists(values.kept),
        }
    )
    _write_table(path, table, "values of tokens")
    return path.stat().st_size


@dataclass(frozen=True)
class Generations:
    """Writes the scored trajectories of a step. `input` and `output` are text without special tokens."""

    folder: Path
    decode: Callable[[Sequence[int]], str]
    ground_truths: Mapping[int | str, str]
    """Ground truths by the index of the row."""

    def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Replace the file of this step. Raises StorageError when it cannot be written."""
        lines = [json.dumps(self._record(step, scored), ensure_ascii=False) for scored in trajectories if scored.reward]
        with writing(self.folder, "samples of the steps"):
            self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self.folder / f"{step}.jsonl", "".join(f"{line}\n" for line in lines), what="samples of a step")

    def _record(self, step: int, trajectory: Trajectory) -> dict[str, object]:
        reward = trajectory.reward
        return {
            **(reward.components if reward else {}),
            **({"turn_scores": reward.turn_scores} if reward and reward.turn_scores else {}),
            "input": self.decode(trajectory.prompt_ids),
            "output": self.decode(trajectory.response_ids),
            "gts": self.ground_truths.get(trajectory.tags.sample_index),
            "score": reward.score if reward else None,
            "step": step,
        }
