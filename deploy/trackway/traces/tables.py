"""Tables on a terminal: the list of traces (and its rows), the facts of a comparison, the result of a verification."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, JsonValue
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trackway.traces import views
from trackway.traces.compare import Comparison, summary
from trackway.traces.text import ending, one_line, visible
from trackway.traces.tree import TraceTree, hex_id

if TYPE_CHECKING:
    from trackway.traces.verify import Verification


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
