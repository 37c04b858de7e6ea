"""Tables on a terminal: the list of traces, and what a verification found."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trackway.traces.rows import TraceRow
from trackway.traces.text import ending, one_line
from trackway.traces.tree import hex_id

if TYPE_CHECKING:
    from trackway.traces.verify import Verification

_ROOM_FOR_IDS = 130
"""On narrower terminals ids are shortened; `trackway traces show` takes their first digits."""

_SHOWN_GAPS = 50


def listing(rows: Sequence[TraceRow], width: int) -> Table:
    """One row per trace."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    several_runs = len({row.tags.get("experiment_name") for row in rows}) > 1
    table.add_column("trace", no_wrap=True)
    for name in ["name", *(["run"] if several_runs else [])]:
        table.add_column(name, no_wrap=True)
    for name in ("step", "sample", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for name in ("reward", "turns", "tokens", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("end of the answer", no_wrap=True, overflow="ellipsis")
    for row in rows:
        run = [Text(one_line(row.tags.get("experiment_name", "")))] if several_runs else []
        table.add_row(Text(_id(row, width)), Text(one_line(row.name)), *run, *_tags(row), *_numbers(row), _answer(row))
    return table


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


def _answer(row: TraceRow) -> Text:
    return Text(ending(row.answer, 60))


def verification(result: "Verification") -> RenderableType:
    """The gaps, and one line that sums up."""
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
    sum_up = f"run {result.run}: {result.complete} of {result.traced} traced trajectories are whole trees"
    parts.append(
        Text(
            f"{sum_up} ({result.trajectories} trajectories in {result.dumps} files)", "red" if result.gaps else "green"
        )
    )
    return Group(*parts)
