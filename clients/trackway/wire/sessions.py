"""Sessions of the agent service: opening, rewarding and reading one, its token graph, and the calls of its model.

Calls are requests of OpenAI's and Anthropic's routes from agents that are not written for us. Sampling is the run's, so
an agent's own is noted and left out. A field that no route knows is noted and ignored. A field that would change the
answer and is not supported is refused, as on the rollout service's routes.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, JsonValue, ModelWrapValidatorHandler, PrivateAttr, model_validator

from trackway.wire.agent import MAX_ROLLOUTS, GroupRequest, Limits, RunSampling, Sample
from trackway.wire.anthropic import CountTokensRequest, MessagesRequest
from trackway.wire.base import Int, Label, PolicyName, RunName, SampleIndex, Score, WireReply, WireRequest
from trackway.wire.openai import ChatRequest, CompletionRequest, OpenAIRequest
from trackway.wire.responses import ResponsesRequest
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import MAX_COMPONENTS, TraceTarget, Trajectory, WeightSpan


class NodeKind(StrEnum):
    """Content of a node of the token graph."""

    PROMPT = "prompt"
    """A rendered conversation that continues nothing: a root of the graph."""
    SAMPLED = "sampled"
    """Tokens of the model: one choice of one call."""
    OBSERVATION = "observation"
    """Tokens that a call added after sampled ones: end of turn, messages, generation prompt."""
    RETRY = "retry"
    """A call that was repeated and answered from the record. It has no tokens."""
    AUXILIARY = "auxiliary"
    """An auxiliary call, such as a token count or a title, which is never trained. Titles of a session without another
    call are its task."""


class RootReason(StrEnum):
    """Why a call began a new root instead of continuing an earlier one."""

    FIRST_CALL = "first_call"
    OTHER_SYSTEM_PROMPT = "other_system_prompt"
    """Its first message is another system prompt, as a sub-agent's."""
    OTHER_TOOLS = "other_tools"
    """The same messages with other tools or template variables."""
    OTHER_CONVERSATION = "other_conversation"
    """It differs from each earlier call before the model wrote anything."""
    ASSISTANT_CHANGED = "assistant_changed"
    """Text or calls of the model were rewritten."""
    REASONING_STRIPPED = "reasoning_stripped"
    """The model's reasoning was left out."""
    HISTORY_CHANGED = "history_changed"
    """Later messages were replaced or dropped, as by compaction."""


class GraphNode(WireReply):
    """Tokens that one call added. The ids from a root to a sampled node are those that the engine saw and wrote."""

    id: int
    parent: int | None = None
    """None for a root."""
    kind: NodeKind
    call: int
    """Number of the call that added the node, from 0."""
    ids: list[int] = Field(default_factory=list[int])
    logprobs: list[float] = Field(default_factory=list[float])
    """One for each sampled id. Empty in other kinds."""
    weight_versions: list[WeightSpan] = Field(default_factory=list[WeightSpan])
    """Spans over `ids`. Empty unless sampled."""
    reason: RootReason | None = None
    """Reason why a root continues nothing."""
    repeats: int | None = None
    """Call whose answer a retry was given again."""
    finish_reason: str | None = None
    """Stop reason of sampled tokens; `abort` when the client left, or the generation failed."""
    forced: str = ""
    """Start of the message of sampled tokens that a forced tool call put at the end of the prompt."""
    guided: bool = False
    """True if a grammar (`response_format`) guided sampled tokens. They are not trained, and `logprobs` are of
    what it left."""
    reward: float | None = None
    """Score of the call of sampled tokens, if it was posted."""
    delivered: bool = True
    """False for sampled tokens whose answer reached no client: an abandoned call, which is not trained."""


SESSION_ID = r"s-([0-9a-z]{4,32})-[0-9a-f]{32}"
"""A session's id names the agent replica that it lives in."""


class TrainedSession(WireRequest):
    """Which run trains on a session once it has ended, and with which sessions it is compared."""

    run: RunName | None = None
    """None: the only run in progress that trains on sessions."""
    group: SampleIndex | None = None
    """Sessions of one group had the same task. None takes the sample's `extra_info.index`."""


class SessionRun(WireReply):
    """Settings that a run fixes for each session that it trains on."""

    run: RunName
    experiment_name: Label
    step: Int = 0
    """The step that is next when the session is opened: the tag `step` of its trace."""
    sampling_params: SamplingParams
    limits: Limits
    policy: PolicyName | None = None
    """The policy that the run trains. None is the rollout service's default one."""
    min_weight_version: Int = 0
    """The newest weights of the run, or the first that it will publish."""
    trace_target: TraceTarget


class FinishedSession(WireRequest):
    """A session that has ended and is scored."""

    session_id: str = Field(pattern=f"^{SESSION_ID}$")
    group: SampleIndex
    trajectory: Trajectory


class WaitingSessions(WireReply):
    """Sessions that a run has not drawn yet."""

    waiting: Int


SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "top_a",
        "min_p",
        "typical_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "best_of",
        "use_beam_search",
    }
)
"""Fields that choose among the model's tokens and change nothing else of the answer."""

_IGNORED = frozenset({"truncation", "context_management", "prediction"})
"""Fields that other routes refuse, and without which a session answers the same or refuses the call by its bound."""


class LeftOut(NamedTuple):
    """Field of a call that has no effect."""

    sampling: Mapping[str, JsonValue]
    """The sampling, which is the run's."""
    ignored: frozenset[str]
    """The names of other fields."""


_NOTHING = LeftOut({}, frozenset())


class SessionCall(OpenAIRequest):
    """Fields that the calls of all formats share."""

    _left_out: LeftOut = PrivateAttr(default_factory=lambda: _NOTHING)

    @property
    def left_out(self) -> LeftOut:
        """Fields of the call that had no effect."""
        return self._left_out

    @model_validator(mode="wrap")
    @classmethod
    def _without_sampling(cls, fields: JsonValue, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return handler(fields)
        given = {name: value for name, value in fields.items() if value is not None}
        unknown = given.keys() - _known(cls)
        others = {name: given.pop(name) for name in unknown}
        call = handler(given)
        ignored = frozenset(unknown - SAMPLING) | _strict(given.get("tools"))
        if others or ignored:
            call._left_out = LeftOut({name: others[name] for name in unknown & SAMPLING}, ignored)
        return call


def _strict(tools: JsonValue) -> frozenset[str]:
    """The field `strict` of tools, if one sets it: without effect, since guided calls would not be trained."""
    for tool in tools if isinstance(tools, list) else []:
        if isinstance(tool, dict):
            function = tool.get("function", tool)
            if isinstance(function, dict) and function.get("strict"):
                return frozenset({"tools.strict"})
    return frozenset()


@cache
def _known(kind: type[SessionCall]) -> frozenset[str]:
    return frozenset(kind.model_fields.keys() | kind.neutral.keys()) - SAMPLING - _IGNORED


class SessionChat(SessionCall, ChatRequest):
    """The next message of a conversation."""

    neutral: ClassVar[dict[str, list[JsonValue]]] = {**ChatRequest.neutral, "prompt_logprobs": []}


class SessionCompletion(SessionCall, CompletionRequest):
    """Continue one or several prompts, each as text or token ids."""

    neutral: ClassVar[dict[str, list[JsonValue]]] = OpenAIRequest.neutral


class SessionResponse(SessionCall, ResponsesRequest):
    """The next response of a conversation."""

    keeps_items: ClassVar[bool] = True


class SessionMessages(SessionCall, MessagesRequest):
    """The next message of a conversation, for Anthropic's clients."""


class SessionTokenCount(SessionCall, CountTokensRequest):
    """A conversation whose tokens are counted."""


class SessionBounds(WireRequest):
    """Bounds of one session in addition to its `limits`, which bound its time and each row of its tokens."""

    max_calls: Int = Field(default=256, ge=1)
    """Most calls of the model. The session then ends with `max_turns`. A call that failed before the model wrote
    anything does not count, nor do retries answered from the record and token counts, of which there may be eight times
    as many."""
    max_tokens: Int | None = Field(default=None, ge=1)
    """Most tokens that the model writes in all calls together, held by parallel calls too: one waits while others hold
    what it may write. The session then ends with `max_response`."""


FormatUse = Literal["guide", "note"]
"""Use of the JSON formats of an agent's calls: they guide the sampling, and guided tokens are not trained; or
they are named among the fields without effect, and all tokens are trained."""


class SessionRequest(WireRequest):
    """Open a session for one rollout of a sample. Its trajectory gets the tags."""

    sample: Sample
    run: RunName = "sessions"
    experiment_name: Label = "sessions"
    step: Int = 0
    rollout_n: Int = Field(default=0, ge=0, lt=MAX_ROLLOUTS)
    sampling_params: RunSampling = Field(default_factory=SamplingParams)
    """The sampling of every call, whatever the agent asks for. An agent may ask for fewer tokens."""
    limits: Limits = Field(default_factory=Limits)
    bounds: SessionBounds = Field(default_factory=SessionBounds)
    formats: FormatUse = "guide"
    """Use of `response_format`, `text.format` and `output_config.format`: `guide` has the engine guide the
    answer, whose tokens are then not trained. `note` names them in `ignored_fields`, and trains what the model writes
    by itself."""
    policy: PolicyName | None = None
    """Policy of the rollout service that answers. None is its default one."""
    min_weight_version: Int = Field(default=0, ge=0)
    trace: bool | None = None
    """Format and content of the trace. See GroupRequest."""
    trace_target: TraceTarget = Field(default_factory=TraceTarget)
    train: TrainedSession | None = None
    """Train on the session once `/end` is called. The run then sets `run`, `experiment_name`, `step`, the sampling, the
    limits, `policy`, `min_weight_version` and `trace_target`."""

    def group(self) -> GroupRequest:
        """The request of this one rollout."""
        fields = {name: getattr(self, name) for name in SessionRequest.model_fields}
        del fields["bounds"], fields["formats"], fields["rollout_n"], fields["train"]
        return GroupRequest(**fields, n=self.rollout_n + 1, rollouts=[self.rollout_n])


class SessionAccess(WireReply):
    """How an agent calls the model in its session: by the URL or by the key."""

    session_id: str
    base_url: str
    """OpenAI's base URL. Anthropic's is the same without `/v1`."""
    direct_url: str | None = None
    """The same at the replica's own port, where a call costs a fraction of one through Ray Serve's proxy; for agents
    that reach it. None without such a port."""
    api_key: str
    """A key for this session only, which also identifies it at `/agent/v1`."""
    traceparent: str | None = None
    """The session's root span, for the agent's own spans, or None when the session is not traced."""


class ExternalRollout(SessionAccess):
    """Body that the URL of an external agent gets for each rollout, with `traceparent` as a header too."""

    sample: Sample


class ExternalReply(WireRequest):
    """Its answer once its agent has ended. An empty body is the same as `{}`."""

    score: Score | None = None
    """The score of the session, instead of the reward service's."""
    log: str = ""
    """Kept with the trajectory, its end."""


class SessionReward(WireRequest):
    """Score a session or one of its calls, in place of the reward service."""

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
    """Session and conversation ids that the agent's own headers named. Never used for routing."""
    ignored_fields: list[str] = Field(default_factory=list[str])
    """Fields of its calls that had no effect, at most 64: the agent's own sampling, formats that are only noted, and
    what the model's routes do not know."""
    nodes: list[GraphNode]
    trajectory: Trajectory | None = None
