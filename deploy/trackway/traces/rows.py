"""Traces as rows of a list."""

from datetime import datetime

from pydantic import BaseModel, JsonValue

from trackway.traces import views
from trackway.traces.tree import TraceTree


class TraceRow(BaseModel):
    """One trace in a list."""

    trace_id: str
    name: str
    state: str
    tags: dict[str, str]
    started: datetime
    duration_ms: float | None
    reward: float | None
    advantage: JsonValue
    fate: JsonValue
    turns: int
    """Turns of the model."""
    prompt_tokens: int | None
    response_tokens: int | None
    tool_calls: int
    """Tool calls recorded by our services or by the agent's framework."""
    other_tokens: views.Tokens | None
    """Tokens of other models, as recorded by the agent's framework."""
    weight_versions: str
    answer: str
    """The last text of the model. Empty without token2text."""


def row(tree: TraceTree) -> TraceRow:
    """A trace as a row."""
    tokens = views.tokens_in(tree)
    return TraceRow(
        trace_id=tree.trace_id,
        name=tree.name,
        state=tree.state,
        tags=tree.tags,
        started=tree.started,
        duration_ms=tree.duration_ms,
        reward=views.reward_of(tree),
        advantage=tree.feedback.get("advantage"),
        fate=tree.feedback.get("fate"),
        turns=len(tree.of_kind("turn")),
        prompt_tokens=tokens.prompt if tokens else None,
        response_tokens=tokens.response if tokens else None,
        tool_calls=views.tool_calls(tree),
        other_tokens=views.other_tokens(tree),
        weight_versions=views.weight_versions(tree),
        answer=views.answer_of(tree),
    )
