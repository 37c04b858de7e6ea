"""The agent service: a dataset row in, trajectories out, streamed as NDJSON as each one ends."""

from typing import Any, Literal

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply, WireRequest
from trackway.wire.chat import Message
from trackway.wire.rollout import SamplingParams
from trackway.wire.tracing import TraceTarget


class RewardModel(WireReply):
    """verl's `reward_model` column: the rule and its ground truth."""

    style: str = "rule"
    ground_truth: str


class Sample(WireReply):
    """A dataset row in verl's schema; `extra_info` is passed on unread but for the keys used here."""

    data_source: str
    agent_name: str | None = None
    prompt: list[Message] = Field(min_length=1)
    ability: str = ""
    reward_model: RewardModel
    extra_info: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def index(self) -> int:
        """`extra_info.index`, which tags the trajectory as `sample_index`; 0 when absent, as in verl."""
        index: Any = self.extra_info.get("index", 0)
        return int(index)

    def tool_kwargs(self, tool: str, kind: str) -> dict[str, JsonValue]:
        """`extra_info.tools_kwargs.<tool>.<kind>`; kind is create_, execute_, calc_reward_ or release_kwargs."""
        tools: Any = self.extra_info.get("tools_kwargs") or {}
        return dict((tools.get(tool) or {}).get(kind) or {})


class Limits(WireRequest):
    """Bounds of one trajectory."""

    max_prompt_length: int = Field(default=512, ge=1)
    """Tokens of the prompt."""
    prompt_truncation: Literal["left", "right", "middle", "error"] = "error"
    """What goes of a longer prompt, as verl's `data.truncation`: its first, its last or its middle tokens; `error` cuts
    nothing and ends the trajectory."""
    max_response_length: int = Field(default=512, ge=1)
    """Tokens of the whole multi-turn response, observations included."""
    max_assistant_turns: int | None = Field(default=None, ge=1)
    max_parallel_calls: int = Field(default=1, ge=1)
    """Calls of one turn that run; each further one is answered by an observation that says so."""
    on_bad_call: Literal["observe", "end"] = "observe"
    """A call that cannot be read or names no offered tool: tell the model, or run nothing and end with `bad_call`."""
    max_tool_response_length: int | None = Field(default=256, ge=1)
    """Characters of one observation that are kept, as in verl; None is no bound."""
    max_tool_response_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one observation that are kept, on top of the bound in characters; None is no bound."""
    tool_response_truncate_side: str = Field(default="middle", pattern="^(left|right|middle)$")
    """Which end of a longer observation goes; a marker, not counted, stands there."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that one trajectory may take; then it ends with `deadline_exceeded`."""


class GroupRequest(WireRequest):
    """n rollouts of one sample."""

    run: str
    """The run's name, the first part of every trajectory id."""
    experiment_name: str
    step: int
    validation: bool = Field(default=False, alias="validate")
    sample: Sample
    n: int = Field(default=1, ge=1, le=1024)
    rollouts: list[int] | None = None
    """Exactly these rollout_n, to mend a broken stream; None asks for 0..n-1."""
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    limits: Limits = Field(default_factory=Limits)
    min_weight_version: int = Field(default=0, ge=0)
    trace: bool | None = None
    """Record the traces of this group, each a trace of its own; None continues the caller's `traceparent`, if any."""
    trace_target: TraceTarget = Field(default_factory=TraceTarget)
    """Where these traces go."""
    tools: list[str] | None = None
    """Names of the tools the model is offered; None offers every tool of the server."""

    def rollout_numbers(self) -> list[int]:
        """The rollout_n values this request asks for."""
        return list(range(self.n)) if self.rollouts is None else self.rollouts


class AgentInfo(WireReply):
    """An agent loop that can be asked for by `agent_name`."""

    name: str
    description: str


class AgentList(WireReply):
    """Every agent loop."""

    agents: list[AgentInfo]
