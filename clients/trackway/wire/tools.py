"""The tool server: create, execute, reward, release; one-shot calls; and the operators' view.

verl-tool's protocol as well: a batch of model outputs in, the tools' observations out.

`POST /retrieve` is the retriever API that search-agent recipes call.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StrictBool, model_validator

from trackway.wire.base import WireReply, WireRequest
from trackway.wire.chat import ToolSchema

MAX_SESSION_CHARS = 512
"""Most characters of a session id, usually a trajectory's, whose run and index may each have 128."""


class ToolList(WireReply):
    """Every tool as an OpenAI function schema."""

    tools: list[ToolSchema]
    stateless: list[str] = Field(default_factory=list[str])
    """Tools without state between calls. One-shot calls of these need a quarter of the requests."""


class CreateInstance(WireRequest):
    """Create one tool's state for one trajectory."""

    tool: str = Field(max_length=128)
    session_id: str | None = Field(default=None, max_length=MAX_SESSION_CHARS)
    """Id of the trajectory, by which its instances are listed and released."""
    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """The dataset row's `extra_info.tools_kwargs.<tool>.create_kwargs`."""


class InstanceCreated(WireReply):
    """The handle of a new instance."""

    instance_id: str
    tool: str


class ExecuteRequest(WireRequest):
    """One call of an instance."""

    arguments: dict[str, JsonValue]
    tool_call_id: str | None = None
    execute_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class RewardRequest(WireRequest):
    """Ask for an instance's reward."""

    calc_reward_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class ReleaseRequest(WireRequest):
    """Release an instance."""

    release_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class OneShotRequest(ExecuteRequest, RewardRequest, ReleaseRequest):
    """Create, execute, reward and release in one request."""

    session_id: str | None = Field(default=None, max_length=MAX_SESSION_CHARS)
    """Id of the trajectory, whose run takes a fair share of the tool's slots."""
    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class ToolResult(WireReply):
    """The result of a call: text for the model, a step reward, and metrics."""

    text: str
    reward: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)


class OneShotResult(ToolResult):
    """The result of a one-shot call, with the reward of its temporary instance."""

    instance_reward: float


class ToolReward(WireReply):
    """The reward of an instance over its whole life."""

    reward: float


class InstanceInfo(WireReply):
    """An instance as operators see it."""

    instance_id: str
    tool: str
    session_id: str | None
    state: Literal["creating", "idle", "busy", "stuck", "released"]
    """`stuck`: its cancelled call has not stopped. The instance cannot be used, and is released when that call ends."""
    age_s: float
    idle_s: float
    """Seconds since its last call ended. 0 while one runs."""


class InstanceList(WireReply):
    """The instances of one replica, oldest first."""

    instances: list[InstanceInfo]
    total: int
    """Number of instances of the replica, including those beyond the request's limit."""


class SessionReleased(WireReply):
    """The result of releasing a trajectory's instances."""

    released: int
    failed: list[str] = Field(default_factory=list[str])
    """One message for each instance that could not be released cleanly."""


MAX_ACTIONS = 4096
_ENTRIES = Field(max_length=MAX_ACTIONS, fail_fast=True)


def _as_text(value: object) -> object:
    """verl-tool's own rollouts number their trajectories."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


TrajectoryId = Annotated[str, BeforeValidator(_as_text), Field(max_length=MAX_SESSION_CHARS)]
"""Text, or a whole number, which is equal to its digits as text."""


class ObservationRequest(BaseModel):
    """One action for each trajectory. All lists given have the same length. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    trajectory_ids: list[TrajectoryId] = Field(min_length=1, max_length=MAX_ACTIONS, fail_fast=True)
    actions: list[str] = Field(max_length=MAX_ACTIONS, fail_fast=True)
    """The model's output, which contains the tool call."""
    extra_fields: Annotated[list[dict[str, JsonValue]], _ENTRIES] | None = None
    """The dataset rows' `extra_info`. `tools_kwargs.<tool>.create_kwargs` and `.execute_kwargs` are used."""
    finish: Annotated[list[bool], _ENTRIES] | None = None
    """True if the trajectory is over: its tools are released and its action is ignored."""
    is_last_step: Annotated[list[bool], _ENTRIES] | None = None
    """True if the trajectory's tools are released after this action."""

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        lists = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        lengths = {name: len(value) for name, value in lists.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"expected lists of one length, got {lengths}")
        return self


class DetailedObservation(WireReply):
    """An observation with further fields."""

    obs: str
    """Text for the model."""
    reward: float | None = None
    """The step reward of the calls, where it is not 0."""
    invalid_reason: str | None = None
    available_tools: str | None = None
    error: str | None = None
    """An error of the server. The trajectory cannot continue."""
    tool_type: str | None = None


class ObservationReply(WireReply):
    """One entry per trajectory, in the order of the request."""

    observations: list[str | DetailedObservation]
    dones: list[bool]
    valids: list[bool]
    """True if the action contained a valid call, which was executed."""
    processing_time_ms: float


MAX_QUERIES = 4096
"""Most queries of one request. Recipes send the queries of a whole batch of trajectories."""
MAX_QUERY_CHARS = 8192
MAX_TOPK = 100


def _no_bool_or_text(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("Input should be a valid integer")
    return value


class RetrieveRequest(WireRequest):
    """Find documents for each query."""

    queries: list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]] = Field(max_length=MAX_QUERIES, fail_fast=True)
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK), BeforeValidator(_no_bool_or_text)] | None = None
    """Documents per query. None takes the server's default."""
    return_scores: StrictBool = False
    """Return each document with its score: `{"document": ..., "score": ...}`."""


class RetrievedDocument(WireReply):
    """One document. The first line of `contents` is its title in quotes."""

    id: str | int = ""
    contents: str

    @model_validator(mode="before")
    @classmethod
    def _from_title_and_text(cls, document: JsonValue) -> JsonValue:
        """Corpora have `contents`, or `text` and usually a `title`."""
        if not isinstance(document, dict) or "contents" in document or "text" not in document:
            return document
        title = document.get("title", document.get("id", ""))
        return {**document, "contents": f'"{title}"\n{document["text"]}'}


class ScoredDocument(WireReply):
    """A document and its score. Higher is better."""

    document: RetrievedDocument
    score: float = 0.0


class RetrieveReply(WireReply):
    """One list per query, best first; with scores if requested."""

    result: list[list[ScoredDocument | RetrievedDocument]]
