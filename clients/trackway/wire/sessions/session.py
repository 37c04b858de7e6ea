"""Opening, rewarding and reading a session."""

from typing import Literal

from pydantic import Field

from trackway.wire.agent import MAX_ROLLOUTS, GroupRequest, Limits, RunSampling, Sample
from trackway.wire.base import Int, Score, WireReply, WireRequest
from trackway.wire.names import Label, RunName
from trackway.wire.rollout import SamplingParams
from trackway.wire.sessions.graph import GraphNode
from trackway.wire.sessions.training import TrainedSession
from trackway.wire.tracing import TraceTarget
from trackway.wire.trajectory import MAX_COMPONENTS, Trajectory


class SessionBounds(WireRequest):
    """Bounds of one session beside its `limits`, which bound its time and each row of its tokens."""

    max_calls: Int = Field(default=256, ge=1)
    """Most calls of the model; the session then ends with `max_turns`. A call that failed before the model wrote
    anything does not count, nor do retries answered from the record and token counts, of which there may be eight times
    as many."""
    max_tokens: Int | None = Field(default=None, ge=1)
    """Most tokens that the model writes in all calls together, held by parallel calls too: one waits while others hold
    what it may write. The session then ends with `max_response`."""


FormatUse = Literal["guide", "note"]
"""Use of the JSON formats of an agent's calls: they guide the sampling, and guided tokens are not trained; or
they are named among the fields without effect, and all tokens are trained."""


class SessionRequest(WireRequest):
    """A session for one rollout of a sample; the tags are those of the trajectory that it becomes."""

    sample: Sample
    run: RunName = "sessions"
    experiment_name: Label = "sessions"
    step: Int = 0
    rollout_n: Int = Field(default=0, ge=0, lt=MAX_ROLLOUTS)
    sampling_params: RunSampling = Field(default_factory=SamplingParams)
    """The sampling of every call, whatever the agent asks for; an agent may ask for fewer tokens."""
    limits: Limits = Field(default_factory=Limits)
    bounds: SessionBounds = Field(default_factory=SessionBounds)
    formats: FormatUse = "guide"
    """Use of `response_format`, `text.format` and `output_config.format`: `guide` has the engine guide the
    answer, whose tokens are then not trained; `note` names them in `ignored_fields`, and trains what the model writes
    by itself."""
    min_weight_version: Int = Field(default=0, ge=0)
    trace: bool | None = None
    """As in GroupRequest."""
    trace_target: TraceTarget = Field(default_factory=TraceTarget)
    train: TrainedSession | None = None
    """Train on the session once `/end` is called; the run then sets `run`, `experiment_name`, `step`, the sampling, the
    limits, `min_weight_version` and `trace_target`."""

    def group(self) -> GroupRequest:
        """The request of this one rollout."""
        fields = {name: getattr(self, name) for name in SessionRequest.model_fields}
        del fields["bounds"], fields["formats"], fields["rollout_n"], fields["train"]
        return GroupRequest(**fields, n=self.rollout_n + 1, rollouts=[self.rollout_n])


class SessionAccess(WireReply):
    """How an agent calls the model in its session: by the URL or by the key."""

    session_id: str
    base_url: str
    """OpenAI's base URL; Anthropic's is the same without `/v1`."""
    direct_url: str | None = None
    """The same at the replica's own port, where a call costs a fraction of one through Ray Serve's proxy; for agents
    that reach it. None without such a port."""
    api_key: str
    """A key for this session only, which also identifies it at `/agent/v1`."""
    traceparent: str | None = None
    """The session's root span, for the agent's own spans; None when the session is not traced."""


class ExternalRollout(SessionAccess):
    """Body that the URL of an external agent gets for each rollout, with `traceparent` as a header too."""

    sample: Sample


class ExternalReply(WireRequest):
    """Its answer once its agent has ended; an empty body is the same as `{}`."""

    score: Score | None = None
    """The score of the session, instead of the reward service's."""
    log: str = ""
    """Kept with the trajectory, its end."""


class SessionReward(WireRequest):
    """The score of the session, or of one of its calls; it replaces that of the reward service."""

    score: Score
    components: dict[str, Score] = Field(default_factory=dict, max_length=MAX_COMPONENTS)
    call_id: str | None = None
    """The `id` of the response that is scored. Without a score of its own, the session has the sum of its calls'."""


class SessionState(WireReply):
    """A session so far, and its trajectory once it has ended."""

    session_id: str
    ended: bool
    calls: int
    """Calls of the model, retries and auxiliary ones included."""
    attributes: dict[str, str]
    """Session and conversation ids that the agent's own headers named; never used for routing."""
    ignored_fields: list[str] = Field(default_factory=list[str])
    """Fields of its calls that had no effect, at most 64: the agent's own sampling, formats that are only noted, and
    what the model's routes do not know."""
    nodes: list[GraphNode]
    trajectory: Trajectory | None = None
