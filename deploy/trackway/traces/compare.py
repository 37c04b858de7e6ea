"""Two trajectories laid side by side: head, prompt, turn by turn, scoring. Pure: two trees in, a model out."""

import itertools
import json
from collections.abc import Sequence

from pydantic import BaseModel, JsonValue

from trackway.traces import views
from trackway.traces.diff import Diff, diff
from trackway.traces.tree import SpanNode, TraceTree

NO_TEXT = "(no text: traced without token2text)"


class Field(BaseModel):
    """One fact about both trajectories."""

    name: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        """Whether the facts differ."""
        return self.left != self.right


class CallPair(BaseModel):
    """The nth tool call of a turn on both sides."""

    name: Diff
    arguments: Diff
    observation: Diff
    left_ms: float | None
    right_ms: float | None


class TurnPair(BaseModel):
    """The nth turn on both sides."""

    name: str
    left: list[str] | None
    """Weights, tokens, time, events; None when this side has no such turn."""
    right: list[str] | None
    text: Diff
    calls: list[CallPair]

    @property
    def equal(self) -> bool:
        """Whether model and tools said the same on both sides."""
        parts = [self.text, *(part for call in self.calls for part in (call.name, call.arguments, call.observation))]
        return all(part.equal for part in parts)


class Comparison(BaseModel):
    """Everything that the terminal and the page show."""

    left: TraceTree
    right: TraceTree
    head: list[Field]
    prompt: Diff
    turns: list[TurnPair]
    scoring: Diff
    """The reward's parts."""


def compare(left: TraceTree, right: TraceTree) -> Comparison:
    """Lay two trajectories side by side; the nth turn stands beside the nth turn."""
    pairs = itertools.zip_longest(_turns(left), _turns(right))
    return Comparison(
        left=left,
        right=right,
        head=_head(left, right),
        prompt=diff(_prompt(left), _prompt(right)),
        turns=[_turn_pair(index, *pair) for index, pair in enumerate(pairs)],
        scoring=diff(_scoring(left), _scoring(right)),
    )


def _head(left: TraceTree, right: TraceTree) -> list[Field]:
    facts = _facts(left), _facts(right)
    keys = dict.fromkeys([*facts[0], *facts[1]])
    return [Field(name=key, left=facts[0].get(key, ""), right=facts[1].get(key, "")) for key in keys]


def _facts(tree: TraceTree) -> dict[str, str]:
    tokens = views.tokens_in(tree)
    error = tree.root.error if tree.root else ""
    facts = {
        "trace": tree.trace_id,
        **tree.tags,
        "state": tree.state,
        "error": error,
        "reward": _number(views.reward_of(tree)),
        "advantage": _number(views.number(tree.feedback.get("advantage"))),
        "fate": _plain(tree.feedback.get("fate")),
        "turns": str(len(_turns(tree))),
        "tool calls": str(len(tree.of_kind("execute_tool"))),
        "prompt tokens": str(tokens.prompt) if tokens else "",
        "response tokens": str(tokens.response) if tokens else "",
        "weights": views.weight_versions(tree),
        "stop reason": _plain(views.output_of(tree, "stop_reason")),
        "duration": milliseconds(tree.duration_ms),
        "generation": milliseconds(_total_ms(tree, "chat")),
        "tools": milliseconds(_total_ms(tree, "execute_tool")),
    }
    return {key: value for key, value in facts.items() if value}


def _turns(tree: TraceTree) -> list[SpanNode]:
    """The turns; of an agent loop that opens none, what the root did."""
    turns = tree.of_kind("turn")
    return turns or [span for span in (tree.root.children if tree.root else tree.roots) if span.kind != "reward"]


def _turn_pair(index: int, left: SpanNode | None, right: SpanNode | None) -> TurnPair:
    calls = itertools.zip_longest(_within(left, "execute_tool"), _within(right, "execute_tool"))
    span = left or right
    assert span is not None
    return TurnPair(
        name=span.name if span.kind == "turn" else f"{index}: {span.name}",
        left=_facts_of_turn(left),
        right=_facts_of_turn(right),
        text=diff(_written(left), _written(right)),
        calls=[_call_pair(*pair) for pair in calls],
    )


def _facts_of_turn(turn: SpanNode | None) -> list[str] | None:
    if turn is None:
        return None
    chats = _within(turn, "chat")
    versions = [version for chat in chats if (version := views.weight_version(chat))]
    counts = [count for chat in chats if (count := views.tokens_of(chat))]
    facts = [f"weights {','.join(dict.fromkeys(versions))}"] if versions else []
    facts += [f"{counts[0][0]} → {sum(written for _, written in counts)} tokens"] if counts else []
    events = [event.name for span in turn.walk() for event in span.events if event.name != "exception"]
    return [*facts, milliseconds(turn.duration_ms), *events, *errors_of(turn)]


def errors_of(span: SpanNode) -> list[str]:
    """What went wrong in a span and below it."""
    return [f"{node.name}: {node.error or 'ERROR'}" for node in span.walk() if node.status == "ERROR"]


def _call_pair(left: SpanNode | None, right: SpanNode | None) -> CallPair:
    return CallPair(
        name=diff(*(None if call is None else call.name.removeprefix("execute_tool ") for call in (left, right))),
        arguments=diff(*(None if call is None else pretty(call.inputs) for call in (left, right))),
        observation=diff(*(None if call is None else observation(call) for call in (left, right))),
        left_ms=None if left is None else left.duration_ms,
        right_ms=None if right is None else right.duration_ms,
    )


def observation(call: SpanNode) -> str:
    """What a tool answered, or how it failed."""
    if call.status == "ERROR":
        return f"ERROR {call.error}"
    text = views.field_of(call.outputs, "text")
    return text if isinstance(text, str) else pretty(call.outputs)


def _within(turn: SpanNode | None, kind: str) -> list[SpanNode]:
    if turn is None:
        return []
    return sorted((span for span in turn.walk() if span.kind == kind), key=lambda span: span.start_ms)


def _written(turn: SpanNode | None) -> str | None:
    if turn is None:
        return None
    texts = [views.response_text(chat) for chat in _within(turn, "chat")]
    known = [text for text in texts if text is not None]
    return "".join(known) if known else NO_TEXT if texts else ""


def _prompt(tree: TraceTree) -> str:
    return "\n".join(f"{role}: {content}" for role, content in views.message_texts(tree))


def _scoring(tree: TraceTree) -> str:
    return "\n".join(pretty(span.outputs) for span in tree.of_kind("reward"))


def _total_ms(tree: TraceTree, kind: str) -> float | None:
    spent = [span.duration_ms for span in tree.of_kind(kind) if span.duration_ms is not None]
    return sum(spent) if spent else None


def milliseconds(value: float | None) -> str:
    """A duration for people: `0.31 ms`, `457 ms`, `12.30 s`."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2f} ms"


def pretty(value: JsonValue) -> str:
    """JSON for people: a text as it is, a flat object as `key: value` lines, anything else indented."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and not any(isinstance(item, dict | list) for item in value.values()):
        return "\n".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return json.dumps(value, indent=2, ensure_ascii=False)


def _plain(value: JsonValue) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def summary(pairs: Sequence[TurnPair]) -> str:
    """How many turns differ."""
    different = sum(not pair.equal for pair in pairs)
    return f"{different} of {len(pairs)} turns differ" if different else f"all {len(pairs)} turns are the same"
