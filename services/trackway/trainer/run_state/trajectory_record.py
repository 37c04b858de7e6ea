"""A trajectory as a record of plain columns, and back: scalars and token arrays, and nested values as JSON text."""

from pydantic import TypeAdapter

from trackway.wire.chat import Message
from trackway.wire.errors import ErrorBody
from trackway.wire.tracing import Incident
from trackway.wire.trajectory import (
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
