"""A trace on a terminal: the tree with a time line, texts, events and errors. Texts are never parsed as markup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from trackway.traces import views
from trackway.traces.compare import milliseconds, observation, pretty
from trackway.traces.text import one_line, shortened, visible
from trackway.traces.tree import SpanEvent, SpanNode, TraceTree

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
