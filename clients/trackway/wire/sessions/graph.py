"""The graph of what the calls of one session added, token by token."""

from enum import StrEnum

from pydantic import Field

from trackway.wire.base import WireReply
from trackway.wire.trajectory import WeightSpan


class NodeKind(StrEnum):
    """Content of a node of the token graph."""

    PROMPT = "prompt"
    """A rendered conversation that continues nothing: a root of the graph."""
    SAMPLED = "sampled"
    """Tokens of the model: one choice of one call."""
    OBSERVATION = "observation"
    """Tokens that a call added after sampled ones: end of turn, messages, generation prompt."""
    RETRY = "retry"
    """A call that was repeated and answered from the record; it has no tokens."""
    AUXILIARY = "auxiliary"
    """A call beside the task, such as a token count or a title; never trained. Titles of a session without another call
    are its task."""


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
    """One for each sampled id; empty in other kinds."""
    weight_versions: list[WeightSpan] = Field(default_factory=list[WeightSpan])
    """Spans over `ids`; empty unless sampled."""
    reason: RootReason | None = None
    """Reason why a root continues nothing."""
    repeats: int | None = None
    """Call whose answer a retry was given again."""
    finish_reason: str | None = None
    """Stop reason of sampled tokens; `abort` when the client left, or the generation failed."""
    forced: str = ""
    """Start of the message of sampled tokens that a forced tool call put at the end of the prompt."""
    guided: bool = False
    """Whether a grammar (`response_format`) guided sampled tokens. They are not trained, and `logprobs` are those of
    what it left."""
    reward: float | None = None
    """Score of the call of sampled tokens, if it was posted."""
    delivered: bool = True
    """False for sampled tokens whose answer reached no client: an abandoned call, which is not trained."""
