"""Compares trajectories: head, prompt, turns, scoring. Pure: trees in, a model out."""

import itertools
import json
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import NamedTuple

from pydantic import BaseModel, JsonValue

from trackway.traces import views
from trackway.traces.tree import SpanNode, TraceTree

_WORD = re.compile(r"\d+(?:\.\d+)*|\w+|\s+|[^\w\s]")
"""A number, a word, white space, or a single character. Joined they are the text."""
_MOST_COMPARISONS = 4_000_000
"""Limit of word comparisons, the product of both lengths. Longer passages differ as a whole."""


class DiffPiece(NamedTuple):
    """A piece of one text."""

    text: str
    changed: bool
    """True if another text lacks this part of the first, or the first lacks this part of another."""


class Diff(BaseModel):
    """The diff of several texts, or None for a side that does not exist."""

    sides: list[list[DiffPiece] | None]

    @property
    def equal(self) -> bool:
        """Return whether all texts are equal."""
        return all(side == self.sides[0] for side in self.sides)

    @property
    def empty(self) -> bool:
        """Return whether all texts are empty."""
        return not any(self.sides)


def diff(*texts: str | None) -> Diff:
    """The diff of each text against the first. All of a text without a counterpart is changed."""
    first, *others = texts
    if first is None:
        return Diff(sides=[None, *map(_whole, others)])
    pairs = [None if other is None else _pair(first, other) for other in others]
    sides = [None if pair is None else pair[1] for pair in pairs]
    firsts = [pair[0] for pair in pairs if pair is not None]
    return Diff(sides=[_union(firsts) if firsts else _whole(first), *sides])


def _pair(left: str, right: str) -> tuple[list[DiffPiece], list[DiffPiece]]:
    sides: tuple[list[DiffPiece], list[DiffPiece]] = ([], [])
    lines = left.splitlines(keepends=True), right.splitlines(keepends=True)
    for same, here, there in _blocks(*lines):
        pair = ("".join(here), "".join(there))
        if same:
            _append(sides, pair, changed=False)
        else:
            _append_words(sides, *pair)
    return _merged(sides[0]), _merged(sides[1])


def _union(versions: Sequence[Sequence[DiffPiece]]) -> list[DiffPiece]:
    """One text from its comparisons with several others: changed where any of them says so."""
    text = "".join(piece.text for piece in versions[0])
    changed = [False] * len(text)
    for pieces in versions:
        start = 0
        for piece in pieces:
            end = start + len(piece.text)
            if piece.changed:
                changed[start:end] = [True] * len(piece.text)
            start = end
    runs = groupby(range(len(text)), key=changed.__getitem__)
    return [DiffPiece("".join(text[place] for place in places), flag) for flag, places in runs]


def _whole(text: str | None) -> list[DiffPiece] | None:
    return None if text is None else _merged([DiffPiece(text, True)])


def _append_words(sides: tuple[list[DiffPiece], list[DiffPiece]], left: str, right: str) -> None:
    words = _WORD.findall(left), _WORD.findall(right)
    if len(words[0]) * len(words[1]) > _MOST_COMPARISONS:
        _append(sides, (left, right), changed=True)
        return
    for same, here, there in _blocks(*words):
        _append(sides, ("".join(here), "".join(there)), changed=not same)


def _blocks(left: Sequence[str], right: Sequence[str]) -> list[tuple[bool, Sequence[str], Sequence[str]]]:
    """Aligned slices of both sides, and whether they are equal."""
    codes = SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    return [(tag == "equal", left[a:b], right[c:d]) for tag, a, b, c, d in codes]


def _append(sides: tuple[list[DiffPiece], list[DiffPiece]], pair: tuple[str, str], changed: bool) -> None:
    for side, text in zip(sides, pair, strict=True):
        side.append(DiffPiece(text, changed))


def _merged(pieces: Sequence[DiffPiece]) -> list[DiffPiece]:
    """Merge adjacent pieces of the same kind and drop empty ones."""
    merged: list[DiffPiece] = []
    for piece in pieces:
        if piece.text and merged and merged[-1].changed == piece.changed:
            merged[-1] = DiffPiece(merged[-1].text + piece.text, piece.changed)
        elif piece.text:
            merged.append(piece)
    return merged


NO_TEXT = "(no text: traced without token2text)"


class Field(BaseModel):
    """One fact about each trajectory."""

    name: str
    values: list[str]

    @property
    def differs(self) -> bool:
        """Return whether the values differ."""
        return len(set(self.values)) > 1


class ComparedCall(BaseModel):
    """The nth tool call of a turn, in each trajectory."""

    name: Diff
    arguments: Diff
    observation: Diff
    ms: list[float | None]


class ComparedTurn(BaseModel):
    """The nth turn of each trajectory."""

    name: str
    facts: list[list[str] | None]
    """Weights, tokens, time and events. None for a trajectory without such a turn."""
    text: Diff
    calls: list[ComparedCall]

    @property
    def equal(self) -> bool:
        """Return whether the texts of model and tools are equal in all trajectories."""
        parts = [self.text, *(part for call in self.calls for part in (call.name, call.arguments, call.observation))]
        return all(part.equal for part in parts)


class Comparison(BaseModel):
    """Trajectories side by side; a diff compares each with the first."""

    trees: list[TraceTree]
    head: list[Field]
    prompt: Diff
    turns: list[ComparedTurn]
    scoring: Diff
    """The components of the reward."""


def compare(trees: Sequence[TraceTree]) -> Comparison:
    """Compare two or more trajectories. Turns are matched by their number."""
    turns = itertools.zip_longest(*map(_turns, trees))
    return Comparison(
        trees=list(trees),
        head=_head(trees),
        prompt=diff(*map(_prompt, trees)),
        turns=[_turn(index, spans) for index, spans in enumerate(turns)],
        scoring=diff(*map(_scoring, trees)),
    )


def _head(trees: Sequence[TraceTree]) -> list[Field]:
    facts = [_facts(tree) for tree in trees]
    keys = dict.fromkeys(itertools.chain.from_iterable(facts))
    return [Field(name=key, values=[known.get(key, "") for known in facts]) for key in keys]


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
        "tool calls": str(views.tool_calls(tree)),
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
    """The turns; for an agent loop that opens none, the children of the root."""
    turns = tree.of_kind("turn")
    return turns or [span for span in (tree.root.children if tree.root else tree.roots) if span.kind != "reward"]


def _turn(index: int, spans: Sequence[SpanNode | None]) -> ComparedTurn:
    calls = itertools.zip_longest(*(_within(span, "execute_tool") for span in spans))
    span = next(filter(None, spans))
    return ComparedTurn(
        name=span.name if span.kind == "turn" else f"{index}: {span.name}",
        facts=[_facts_of_turn(span) for span in spans],
        text=diff(*map(_written, spans)),
        calls=[_call(call) for call in calls],
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
    """The errors of a span and its descendants."""
    return [f"{node.name}: {node.error or 'ERROR'}" for node in span.walk() if node.status == "ERROR"]


def _call(calls: Sequence[SpanNode | None]) -> ComparedCall:
    return ComparedCall(
        name=diff(*(call and call.name.removeprefix("execute_tool ") for call in calls)),
        arguments=diff(*(call and pretty(call.inputs) for call in calls)),
        observation=diff(*(call and observation(call) for call in calls)),
        ms=[None if call is None else call.duration_ms for call in calls],
    )


def observation(call: SpanNode) -> str:
    """The result of a tool call, or its error."""
    if call.status == "ERROR":
        return f"ERROR {call.error}"
    text = views.field_of(call.outputs, "text")
    return text if isinstance(text, str) else pretty(call.outputs)


def _within(turn: SpanNode | None, kind: str) -> list[SpanNode]:
    if turn is None:
        return []
    return sorted((span for span in turn.walk() if span.kind == kind and span.service), key=lambda span: span.start_ms)


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
    """A duration as text: `0.31 ms`, `457 ms`, `12.30 s`."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2f} ms"


def pretty(value: JsonValue) -> str:
    """JSON in readable form: text unchanged, a flat object as `key: value` lines, anything else indented."""
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


def summary(turns: Sequence[ComparedTurn]) -> str:
    """A sentence with the number of turns that differ."""
    different = sum(not turn.equal for turn in turns)
    return f"{different} of {len(turns)} turns differ" if different else f"all {len(turns)} turns are the same"
