"""The agent service: a dataset row in, trajectories out, streamed as NDJSON as each one ends.

Protocols of other projects' environments have the fields used here.

`Env...`: OpenEnv's `/schema`, and its answers over `/ws` (openenv 0.10, env_server/types.py). `Gym...`: `/verify` of
NeMo-Gym's resources servers (base_resources_server.py), which ignore fields that they do not know.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, field_validator
from pydantic_core import PydanticCustomError

from trackway.wire.base import Finite, Float, Int, Label, PolicyName, RunName, WireReply, WireRequest, sample_index
from trackway.wire.chat import MAX_MESSAGES, MAX_TOOLS, Message
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import MAX_PROMPT_TOP_LOGPROBS, SamplingParams
from trackway.wire.service import Wait
from trackway.wire.trajectory import StopReason, Tags, TraceTarget, Trajectory, trajectory_id

MAX_ROLLOUTS = 1024
"""Rollouts of one group."""


class RewardModel(WireReply):
    """verl's `reward_model` column: the rule and its ground truth."""

    style: str = "rule"
    ground_truth: str = Field(coerce_numbers_to_str=True)
    """Text. A number becomes its text."""


class Sample(WireReply):
    """A dataset row in verl's schema. `extra_info` is passed through, except for the keys used here."""

    data_source: str = Field(max_length=1024)
    agent_name: str | None = Field(default=None, max_length=1024)
    prompt: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ability: str = ""
    reward_model: RewardModel
    extra_info: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("extra_info")
    @classmethod
    def _of_known_shapes(cls, extra_info: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Check the types of the keys used here, so that a malformed row is refused before its rollout starts."""
        try:
            sample_index(extra_info.get("index"))
        except ValueError as error:
            raise PydanticCustomError("index", "index: {problem}", {"problem": str(error)}) from error
        _object(extra_info.get("env_kwargs"), "env_kwargs")
        for tool, stages in _object(extra_info.get("tools_kwargs"), "tools_kwargs").items():
            for stage, kwargs in _object(stages, f"tools_kwargs.{tool}").items():
                _object(kwargs, f"tools_kwargs.{tool}.{stage}")
        selection = extra_info.get("tool_selection")
        if selection is not None and not (isinstance(selection, list) and all(isinstance(n, str) for n in selection)):
            raise _wrong("tool_selection", "a list of tools' names", selection)
        return extra_info

    @property
    def index(self) -> int | str:
        """`extra_info.index`, which tags the trajectory as `sample_index`. 0 when absent, as in verl."""
        return sample_index(self.extra_info.get("index"))

    @property
    def env_kwargs(self) -> dict[str, JsonValue]:
        """`extra_info.env_kwargs`, with which an environment begins the row's episode."""
        return {**_object(self.extra_info.get("env_kwargs"), "env_kwargs")}

    def tool_kwargs(self, tool: str, kind: str) -> dict[str, JsonValue]:
        """`extra_info.tools_kwargs.<tool>.<kind>`. Kind is create_, execute_, calc_reward_ or release_kwargs."""
        stages = _object(self.extra_info.get("tools_kwargs"), "tools_kwargs").get(tool)
        return {**_object(_object(stages, tool).get(kind), kind)}


def _object(value: JsonValue, place: str) -> dict[str, JsonValue]:
    """A JSON object. null and an empty value become an empty object."""
    if not value:
        return {}
    if not isinstance(value, dict):
        raise _wrong(place, "an object", value)
    return value


def _wrong(place: str, expected: str, value: JsonValue) -> PydanticCustomError:
    got = {"place": place[:200], "expected": expected, "got": type(value).__name__}
    return PydanticCustomError("extra_info", "{place}: expected {expected}, got {got}", got)


class Limits(WireRequest):
    """Limits of one trajectory."""

    max_prompt_length: Int = Field(default=512, ge=1)
    """Most tokens of the prompt."""
    prompt_truncation: Literal["left", "right", "middle", "error"] = "error"
    """Which tokens of a longer prompt are removed, as in verl's `data.truncation`: the first, last or middle ones.
    `error` removes none and ends the trajectory."""
    max_response_length: Int = Field(default=512, ge=1)
    """Most tokens of the whole multi-turn response, observations included."""
    max_assistant_turns: Int | None = Field(default=None, ge=1)
    max_user_turns: Int | None = Field(default=None, ge=1)
    """Most rounds of observations. The model's next turn is the last, as in verl."""
    max_parallel_calls: Int = Field(default=1, ge=1)
    """Most tool calls of one turn that run. The observation of each further call says that it did not run."""
    on_bad_call: Literal["observe", "end"] = "observe"
    """Treatment of a call that cannot be parsed or names no offered tool: tell the model, or end with `bad_call`."""
    max_tool_response_length: Int | None = Field(default=256, ge=1)
    """Most characters of one observation, as in verl. None means no limit."""
    max_tool_response_tokens: Int | None = Field(default=None, ge=1)
    """Most tokens of one observation, in addition to the limit in characters. None means no limit."""
    tool_response_truncate_side: str = Field(default="middle", pattern="^(left|right|middle)$")
    """Side on which a longer observation is truncated. A marker, which does not count, replaces what was removed."""
    timeout_s: Float = Field(default=600.0, gt=0)
    """Time limit of one trajectory in seconds; then it ends with `deadline_exceeded`."""

    @property
    def max_rendered(self) -> int:
        """Most tokens of a prompt before truncation: sixteen times its limit, at least 65,536."""
        limit = self.max_prompt_length
        return limit if self.prompt_truncation == "error" else max(16 * limit, 65_536)


class GroupWaits(WireReply):
    """Current waits of a group's rollouts. They are a line of its stream, as trajectories are."""

    waits: list[Wait]
    now: int
    """The sender's clock, in milliseconds since 1970."""


def _of_a_run(params: SamplingParams) -> SamplingParams:
    of_a_call = {
        "structured_outputs": params.structured_outputs is not None,
        "logprobs": params.logprobs > 0,
        "prompt_logprobs": params.prompt_logprobs is not None,
    }
    if name := next((name for name, given in of_a_call.items() if given), None):
        message = "expected sampling_params without {name}, which only a call of a session may ask for; leave it out"
        raise PydanticCustomError("sampling_params", message, {"name": name})
    return params


RunSampling = Annotated[SamplingParams, AfterValidator(_of_a_run)]
"""Sampling parameters of a whole run or session. A grammar, top logprobs and prompt logprobs belong to one call."""


class Teacher(WireRequest):
    """A model that scores the tokens of rollouts, for distillation."""

    name: Label
    """Its name in the run's configuration."""
    model: Label
    """One of the agent service's `teachers`, else a policy of the rollout service."""
    top_k: Int = Field(default=0, ge=0, le=MAX_PROMPT_TOP_LOGPROBS)
    """Most likely tokens to return at each position."""


class GroupRequest(WireRequest):
    """n rollouts of one sample."""

    run: RunName
    """The run's name, the first part of every trajectory id."""
    experiment_name: Label
    step: Int
    validation: bool = Field(default=False, alias="validate")
    sample: Sample
    n: Int = Field(default=1, ge=1, le=MAX_ROLLOUTS)
    rollouts: Annotated[list[Int], Field(max_length=MAX_ROLLOUTS, fail_fast=True)] | None = None
    """Only these `rollout_n`, to complete a broken stream. None asks for 0..n-1."""
    sampling_params: RunSampling = Field(default_factory=SamplingParams)
    limits: Limits = Field(default_factory=Limits)
    policy: PolicyName | None = None
    """Policy of the rollout service that generates. None is its default one."""
    min_weight_version: Int = Field(default=0, ge=0)
    trace: bool | None = None
    """Record the traces of this group, each a trace of its own. None continues the caller's `traceparent`, if any."""
    trace_target: TraceTarget = Field(default_factory=TraceTarget)
    """Destination of these traces."""
    is_baseline: bool = False
    """Greedy rollouts whose score is the baseline of their group (ReMax). Their traces have the tag `is_baseline`."""
    tools: Annotated[list[str], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Names of the tools offered to the model; None offers every tool of the server."""
    teacher: Teacher | None = None
    """Scores the tokens of each rollout that did not fail."""
    report_waits_s: Annotated[Float, Field(ge=0.1)] | None = None
    """Report what the rollouts wait for whenever none has ended for so many seconds; None reports nothing."""

    def rollout_numbers(self) -> list[int]:
        """The requested values of `rollout_n`."""
        return list(range(self.n)) if self.rollouts is None else self.rollouts

    def tags(self, rollout_n: int) -> Tags:
        """The tags of one rollout of this group."""
        return Tags(
            experiment_name=self.experiment_name,
            step=self.step,
            sample_index=self.sample.index,
            rollout_n=rollout_n,
            validate=self.validation,
        )

    def failed(self, rollout_n: int, error: TrackwayError) -> Trajectory:
        """A trajectory without tokens, for a rollout that failed before it produced any."""
        tags = self.tags(rollout_n)
        name = trajectory_id(self.run, tags)
        return Trajectory(
            id=name,
            session_id=name,
            tags=tags,
            agent_name=self.sample.agent_name or "",
            data_source=self.sample.data_source,
            stop_reason=StopReason.ERROR,
            error=error.to_reply().error,
        )


class AgentInfo(WireReply):
    """A registered agent loop."""

    name: str
    description: str
    offers_tools: bool = False
    """True if it shows the model the tool server's tools."""


class AgentList(WireReply):
    """Every agent loop."""

    agents: list[AgentInfo]
    without_tools: str = ""
    """Why the model's chat template carries no tools. Empty when it does."""
    teachers: dict[str, str] = Field(default_factory=dict)
    """URLs of the rollout services that may teach, by name."""


class EnvSchema(WireReply):
    """The JSON schema of an environment's actions."""

    action: dict[str, JsonValue]


class EnvMessage(WireReply):
    """One message from an environment."""

    type: Literal["observation", "state", "error", "mcp"]
    data: dict[str, JsonValue]


class EnvObservation(WireReply):
    """The answer to `reset` and `step`."""

    observation: dict[str, JsonValue]
    reward: Finite | None = None
    """Reward of this step. null counts as 0."""
    done: bool = False


class EnvFailure(WireReply):
    """Why a request was refused, or failed."""

    message: str = ""
    code: str = ""


class EnvTool(WireReply):
    """A tool of an environment that offers MCP's tools."""

    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue] = Field(alias="inputSchema")


class GymResponse(WireReply):
    """Items of OpenAI's Responses that the agent made."""

    output: list[dict[str, JsonValue]]


class GymVerify(WireReply):
    """A request of `/verify` for a row that also has verl's columns."""

    data_source: str = Field(max_length=1024)
    reward_model: RewardModel
    extra_info: dict[str, JsonValue] = Field(default_factory=dict)
    response: GymResponse


class GymReward(WireReply):
    """The answer of `/verify`, in addition to the request's fields."""

    reward: Finite
    reward_components: dict[str, Finite] = Field(default_factory=dict)
