"""The reward service: score what the model wrote against the ground truth."""

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply, WireRequest
from trackway.wire.chat import MAX_MESSAGES, Message

ANY_DATA_SOURCE = "*"
"""Wildcard among a scorer's data sources: every source without a scorer of its own."""


class ScoreRequest(WireRequest):
    """One solution to score. `solution_str` holds the model's own text only (response_mask 1)."""

    data_source: str = Field(max_length=1024)
    solution_str: str
    ground_truth: str
    method: str | None = None
    """The scorer's method (`strict` or `flexible` for GSM8K). None takes the scorer's default."""
    trajectory_id: str | None = None
    messages: list[Message] = Field(default_factory=list[Message], max_length=2 * MAX_MESSAGES, fail_fast=True)
    """The conversation with the solution in it, which a reward model scores. Scorers of the text need none."""
    extra_info: dict[str, JsonValue] = Field(default_factory=dict)
    """The row's `extra_info` and, from the agent, `num_turns`. `turns`, the text of each turn of the model, which
    `turn_scores` of the answer follow. `tool_rewards`, a step reward per call (verl's).
    `tool_calls`, a ToolCallRecord per call that was sent. `tool_metrics`, sums over the calls by tool and metric;
    `tool_calc_rewards`, the reward of the instance by tool."""


class ScorerInfo(WireReply):
    """A scorer, the data sources it serves, and its methods. The first method is the default."""

    name: str
    data_sources: list[str]
    methods: list[str]
    description: str


class ScorerList(WireReply):
    """Every scorer."""

    scorers: list[ScorerInfo]
