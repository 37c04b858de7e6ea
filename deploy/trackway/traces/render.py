"""Traces on a terminal: the tree with a time line, texts, events and errors, and the tables of the commands.

Texts are escaped and shortened, and never parsed as markup.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, JsonValue
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from trackway.traces import views
from trackway.traces.compare import Comparison, milliseconds, observation, pretty, summary
from trackway.traces.tree import SpanEvent, SpanNode, TraceTree, hex_id

if TYPE_CHECKING:
    from trackway.traces.verify import Verification

_ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and bidirectional formatting characters."""


def visible(text: str) -> str:
    """The text with control characters replaced by symbols or escapes."""
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _ACTING.sub(lambda match: _sign(ord(match[0])), encodable)


def _sign(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


def shortened(text: str, lines: int, characters: int) -> str:
    """The beginning of a text, with the number of characters left out."""
    kept = "\n".join(text.split("\n")[:lines])[:characters]
    left_out = len(text) - len(kept)
    return f"{kept} … {left_out} more characters" if left_out > 0 else text


def one_line(text: str) -> str:
    """The text without line breaks, for a table cell."""
    return visible(text).replace("\n", "⏎")


def ending(text: str, characters: int) -> str:
    """The end of a text on one line."""
    line = one_line(text.strip())
    return line if len(line) <= characters else f"…{line[-characters + 1 :]}"


COLOURS = {"agent": "blue", "rollout": "green", "tools": "yellow", "reward": "magenta", "trainer": "cyan"}
_GUIDE = 4
"""Columns per level of rich's tree."""
_NAME, _SERVICE, _TIME = 40, 8, 20


@dataclass(frozen=True)
class Style:
    """Widths, and whether texts are complete."""

    width: int = 120
    full: bool = False
    """Show complete texts instead of their beginnings."""

    @property
    def bar(self) -> int:
        """Columns of the time line."""
        return max(8, min(40, self.width - _NAME - _SERVICE - _TIME - 4))

    def text(self, text: str) -> str:
        """The text, shortened unless `full`."""
        return visible(text if self.full else shortened(text.strip("\n"), 12, 800))


def draw(tree: TraceTree, style: Style) -> RenderableType:
    """The whole trace."""
    top = Tree("", hide_root=True, guide_style="dim")
    for span in tree.roots:
        if span.parent_id is not None and span is tree.orphans[0]:
            top.add(Text("these spans have lost their parent:", style="red"))
        _add(top, span, tree, style, depth=1)
    return Group(head(tree), Text(), top)


def head(tree: TraceTree) -> RenderableType:
    """The lines above the tree: names, tags, outcome, feedback."""
    state = {"OK": "green", "ERROR": "red", "IN_PROGRESS": "yellow"}[tree.state]
    title = Text.assemble((one_line(tree.name) or "(no name)", "bold"), "  ", (tree.state, state), "  ", tree.trace_id)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for key, value in _facts(tree).items():
        facts.add_row(Text(key), Text(one_line(value)))
    return Group(title, facts)


def _facts(tree: TraceTree) -> dict[str, str]:
    tokens, others = views.tokens_in(tree), views.other_tokens(tree)
    feedback = {key: pretty(value) for key, value in tree.feedback.items()}
    reward = views.reward_of(tree)
    facts = {
        "tags": "  ".join(f"{key}={value}" for key, value in tree.tags.items()),
        "reward": "" if reward is None else f"{reward:.4g}",
        **{key: value for key, value in feedback.items() if key != "reward"},
        "stop reason": pretty(views.output_of(tree, "stop_reason")),
        "tokens": f"{tokens.prompt} prompt + {tokens.response} response" if tokens else "",
        "other models": f"{others.prompt} prompt + {others.response} response tokens" if others else "",
        "tool calls": str(views.tool_calls(tree) or ""),
        "weights": views.weight_versions(tree),
        "started": f"{tree.started:%Y-%m-%d %H:%M:%S.%f} UTC",
        "duration": milliseconds(tree.duration_ms),
    }
    return {key: value for key, value in facts.items() if value}


def _add(above: Tree, span: SpanNode, tree: TraceTree, style: Style, depth: int) -> None:
    branch = above.add(Group(_line(span, tree, style, depth), *_details(span, tree, style)))
    for child in span.children:
        _add(branch, child, tree, style, depth + 1)


def _line(span: SpanNode, tree: TraceTree, style: Style, depth: int) -> Text:
    colour = "red" if span.status == "ERROR" else COLOURS.get(span.service, "white")
    width = max(12, _NAME - _GUIDE * depth)
    name = one_line(span.name)
    shown = name if len(name) <= width else name[: width - 1] + "…"
    took = milliseconds(span.duration_ms) or "open"
    return Text.assemble(
        (f"{shown:<{width}} ", f"bold {colour}"),
        (f"{span.service:<{_SERVICE}} ", colour),
        (_bar(span, tree, style.bar), colour),
        f" {took:>8}",
        (f" +{span.start_ms:.0f}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _bar(span: SpanNode, tree: TraceTree, width: int) -> str:
    """A span's bar on the time line."""
    start, length = extent(span, tree)
    offset = min(width - 1, int(start * width))
    return (" " * offset + "━" * max(1, round(length * width))).ljust(width)[:width]


def extent(span: SpanNode, tree: TraceTree) -> tuple[float, float]:
    """Start and length of a span as fractions of the trace."""
    whole = max((node.end_ms or node.start_ms for node in tree.spans()), default=0.0) or 1.0
    end = whole if span.end_ms is None else span.end_ms
    start = min(1.0, max(0.0, span.start_ms / whole))
    return start, max(0.0, min(1.0 - start, (end - span.start_ms) / whole))


def _details(span: SpanNode, tree: TraceTree, style: Style) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in blocks(span, views.has_texts(tree)).items():
        table.add_row(Text(label), Text(style.text(value)))
    for event in span.events:
        table.add_row(Text("event", style="yellow"), _event(event, style))
    if span.links:
        linked = ", ".join(link.trace_id for link in span.links)
        table.add_row(Text("links"), Text(f"{len(span.links)} spans of {style.text(linked)}"))
    if span.status == "ERROR":
        table.add_row(Text("error", style="red"), Text(style.text(span.error or "ERROR"), style="red"))
    return [table] if table.row_count else []


def _event(event: SpanEvent, style: Style) -> Text:
    shown = {key: value for key, value in event.attributes.items() if style.full or key != "exception.stacktrace"}
    details = "  ".join(f"{key}={pretty(value)}" for key, value in shown.items())
    return Text.assemble((one_line(event.name), "yellow"), (f" +{event.at_ms:.0f} ms  ", "dim"), style.text(details))


def blocks(span: SpanNode, texts_below: bool) -> dict[str, str]:
    """Texts of a span by label. `texts_below`: the generations have the answer, so the root leaves it out."""
    if span.kind == "trajectory":
        return _of_root(span, texts_below)
    if span.kind == "chat":
        return {key: value for key, value in _of_chat(span).items() if value}
    if span.kind == "execute_tool":
        return _of_tool(span)
    texts = {"inputs": pretty(span.inputs), "outputs": pretty(span.outputs)}
    return {key: value for key, value in texts.items() if value}


def _of_root(span: SpanNode, texts_below: bool) -> dict[str, str]:
    asked, answered = views.messages_of(span.inputs), [] if texts_below else views.messages_of(span.outputs)
    texts = {"messages": _conversation(asked), "answer": _conversation(answered)}
    return {key: value for key, value in texts.items() if value}


def _conversation(messages: Sequence[Mapping[str, JsonValue]]) -> str:
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


def _of_chat(span: SpanNode) -> dict[str, str]:
    counts, version = views.tokens_of(span), views.weight_version(span)
    facts = [f"{counts[0]} → {counts[1]} tokens"] if counts else []
    facts += [f"weights {version}"] if version else []
    return {
        "generation": "  ".join(facts),
        "prompt": views.prompt_text(span) or "",
        "wrote": views.response_text(span) or "",
    }


def _of_tool(span: SpanNode) -> dict[str, str]:
    reward = views.number(views.field_of(span.outputs, "reward"))
    texts = {
        "arguments": pretty(span.inputs),
        "result": "" if span.status == "ERROR" else observation(span),
        "reward": f"{reward:.4g}" if reward else "",
    }
    return {key: value for key, value in texts.items() if value}


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


_ROOM_FOR_IDS = 130
"""Width below which ids are shortened. `trackway traces show` takes their first digits."""

_SHOWN_GAPS = 50
_GAP = 2
"""Columns of a terminal between two columns of the list."""
_SHORTEST_ANSWER = 18
"""Width of its heading."""


def listing(rows: Sequence[TraceRow], width: int) -> Table:
    """One row per trace. Names and numbers are whole: the answer gets what they leave of `width`, or is left out."""
    several_runs = len({row.tags.get("experiment_name") for row in rows}) > 1
    left = ["name", *(["run"] if several_runs else []), "trace", "outcome"]
    names = [*left[:-1], "step", "sample", "n", "outcome", "reward", "turns", "tokens", "ms"]
    cells = [_cells(row, width, several_runs) for row in rows]
    taken = [
        max(cell_len(name), *(line[number].cell_len for line in cells)) if cells else cell_len(name)
        for number, name in enumerate(names)
    ]
    room = width - sum(taken) - _GAP * len(names)
    table = Table(box=None, padding=(0, _GAP, 0, 0))
    for name, longest in zip(names, taken, strict=True):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True, min_width=longest)
    if room >= _SHORTEST_ANSWER:
        table.add_column("end of the answer", no_wrap=True, overflow="ellipsis", max_width=room)
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*line, *([Text(ending(row.answer, 60))] if room >= _SHORTEST_ANSWER else []))
    return table


def _cells(row: TraceRow, width: int, several_runs: bool) -> list[Text]:
    """Every column but the answer."""
    run = [Text(one_line(row.tags.get("experiment_name", "")))] if several_runs else []
    return [Text(one_line(row.name)), *run, Text(_id(row, width)), *_tags(row), *map(Text, _numbers(row))]


def _id(row: TraceRow, width: int) -> str:
    return row.trace_id if width >= _ROOM_FOR_IDS else hex_id(row.trace_id)[:12]


def _tags(row: TraceRow) -> list[Text]:
    step = row.tags.get("step", row.tags.get("train_step", ""))
    places = [step, row.tags.get("sample_index", ""), row.tags.get("rollout_n", "")]
    outcome = row.tags.get("outcome", row.state)
    bad = row.state == "ERROR" or outcome.startswith(("error", "aborted"))
    style = "red" if bad else "" if outcome.lower() == "ok" else "yellow"
    return [*(Text(one_line(place)) for place in places), Text(one_line(outcome), style)]


def _numbers(row: TraceRow) -> list[str]:
    tokens = "" if row.prompt_tokens is None else f"{row.prompt_tokens}+{row.response_tokens}"
    reward = "" if row.reward is None else f"{row.reward:.4g}"
    took = "" if row.duration_ms is None else f"{row.duration_ms:.0f}"
    return [reward, str(row.turns), tokens, took]


def facts(comparison: Comparison) -> RenderableType:
    """The facts about each trajectory, those that differ marked with ≠, and the turns that differ."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    for _ in comparison.trees:
        table.add_column(overflow="fold")
    table.add_row("", "", *(Text(one_line(tree.name) or tree.trace_id, "bold") for tree in comparison.trees))
    for field in comparison.head:
        values = (Text(one_line(value), "yellow" if field.differs else "") for value in field.values)
        table.add_row("≠" if field.differs else " ", field.name, *values)
    turns = [f"{visible(turn.name)}: {'the same' if turn.equal else 'differs'}" for turn in comparison.turns]
    return Group(table, Text(), *map(Text, turns), Text(summary(comparison.turns), "bold"))


def verification(result: "Verification") -> RenderableType:
    """The gaps, and a summary line."""
    parts: list[RenderableType] = []
    if result.gaps:
        table = Table("trajectory", "trace", "what is wrong", box=None, padding=(0, 2, 0, 0))
        for gap in result.gaps[:_SHOWN_GAPS]:
            table.add_row(
                Text(one_line(gap.name)), Text(gap.trace_id), Text("\n".join(map(one_line, gap.reasons)), "red")
            )
        parts.append(table)
    if len(result.gaps) > _SHOWN_GAPS:
        parts.append(Text(f"and {len(result.gaps) - _SHOWN_GAPS} more, which --json lists"))
    if result.waiting.files:
        parts.append(
            Text(
                f"{result.waiting.bytes} bytes in {result.waiting.files} files wait on disk because the backend was or "
                "is down; they are sent once it is back",
                "yellow",
            )
        )
    sum_up = f"run {result.run}: {result.complete} of {result.traced} traced trajectories have a complete trace"
    parts.append(
        Text(
            f"{sum_up} ({result.trajectories} trajectories in {result.dumps} files)", "red" if result.gaps else "green"
        )
    )
    return Group(*parts)
