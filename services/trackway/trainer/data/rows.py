"""Dataset rows in verl's schema, as stored in parquet and sent to the agent service.

A row is the wire's `Sample`. This module types the `extra_info` of Trackway's own builders, and normalises rows for
storage and comparison: without nulls and empty structs. Parquet has no absent keys (it merges the keys of all rows and
fills with null) and no structs without members.
"""

from typing import Literal

from pydantic import Field, JsonValue

from trackway.wire.agent import RewardModel, Sample
from trackway.wire.base import SampleIndex, WireReply
from trackway.wire.chat import Message

Split = Literal["train", "test"]

AGENT_NAME = "tool_agent"
ABILITY = "math"


class ToolKwargs(WireReply):
    """Arguments for the life-cycle methods of one tool, for one row."""

    create_kwargs: dict[str, JsonValue] | None = None
    execute_kwargs: dict[str, JsonValue] | None = None
    calc_reward_kwargs: dict[str, JsonValue] | None = None
    release_kwargs: dict[str, JsonValue] | None = None


class InteractionKwargs(WireReply):
    """The fields that verl's interactions read: the user's text and the ground truth."""

    query: str
    ground_truth: str


class ExtraInfo(WireReply):
    """The `extra_info` column as Trackway writes it."""

    split: Split
    index: SampleIndex
    """Unique within the split. It becomes the `sample_index` tag of the trajectories."""
    answer: str
    """The worked answer, as in the source."""
    question: str
    """The question, as in the source."""
    need_tools_kwargs: bool = False
    """True if the tools cannot work without `tools_kwargs`."""
    tools_kwargs: dict[str, ToolKwargs] = Field(default_factory=dict)
    """Arguments by tool name."""
    tool_selection: list[str] | None = None
    """Tools offered for this row (verl's key); None offers every tool of the server."""
    interaction_kwargs: InteractionKwargs | None = None


def make_row(*, data_source: str, prompt: list[Message], ground_truth: str, extra_info: ExtraInfo) -> Sample:
    """A rule-scored math row for the tool agent."""
    return Sample(
        data_source=data_source,
        agent_name=AGENT_NAME,
        prompt=prompt,
        ability=ABILITY,
        reward_model=RewardModel(style="rule", ground_truth=ground_truth),
        extra_info=_with_tools_kwargs(prune(extra_info.model_dump(mode="json"))),
    )


def to_record(row: Sample) -> dict[str, JsonValue]:
    """The row as plain columns, ready to be stored."""
    return prune(row.model_dump(mode="json"))


def from_record(record: dict[str, JsonValue]) -> Sample:
    """The row of stored columns. Raises pydantic's ValidationError when they do not match verl's schema."""
    row = Sample.model_validate(prune(record))
    return row.model_copy(update={"extra_info": _with_tools_kwargs(row.extra_info)})


def prune(record: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The record without nulls and empty dicts at every depth. List items keep their positions."""
    pruned = {key: _prune_value(value) for key, value in record.items()}
    return {key: value for key, value in pruned.items() if value is not None and value != {}}


def _prune_value(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return prune(value)
    if isinstance(value, list):
        return [_prune_value(item) for item in value]
    return value


def _with_tools_kwargs(extra_info: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return {"need_tools_kwargs": False, "tools_kwargs": {}, **extra_info}
