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


def listing(found: Sequence[TraceRow], width: int) -> Table:
    """One row per trace."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    several_runs = len({one.tags.get("experiment_name") for one in found}) > 1
    table.add_column("trace", no_wrap=True)
    for name in ["name", *(["run"] if several_runs else [])]:
        table.add_column(name, no_wrap=True)
    for name in ("step", "sample", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for name in ("reward", "turns", "tokens", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("end of the answer", no_wrap=True, overflow="ellipsis")
    for one in found:
        run = [Text(one_line(one.tags.get("experiment_name", "")))] if several_runs else []
        table.add_row(Text(_id(one, width)), Text(one_line(one.name)), *run, *_tags(one), *_numbers(one), _answer(one))
    return table


def _id(one: TraceRow, width: int) -> str:
    return one.trace_id if width >= _ROOM_FOR_IDS else hex_id(one.trace_id)[:12]


def _tags(one: TraceRow) -> list[Text]:
    step = one.tags.get("step", one.tags.get("train_step", ""))
    places = [step, one.tags.get("sample_index", ""), one.tags.get("rollout_n", "")]
    outcome = one.tags.get("outcome", one.state)
    bad = one.state == "ERROR" or outcome.startswith(("error", "aborted"))
    style = "red" if bad else "" if outcome.lower() == "ok" else "yellow"
    return [*(Text(one_line(place)) for place in places), Text(one_line(outcome), style)]


def _numbers(one: TraceRow) -> list[str]:
    tokens = "" if one.prompt_tokens is None else f"{one.prompt_tokens}+{one.response_tokens}"
    reward = "" if one.reward is None else f"{one.reward:.4g}"
    took = "" if one.duration_ms is None else f"{one.duration_ms:.0f}"
    return [reward, str(one.turns), tokens, took]


def _answer(one: TraceRow) -> Text:
    return Text(ending(one.answer, 60))


def verification(found: "Verification") -> RenderableType:
    """The gaps, and one line that sums up."""
    parts: list[RenderableType] = []
    if found.gaps:
        table = Table("trajectory", "trace", "what is wrong", box=None, padding=(0, 2, 0, 0))
        for gap in found.gaps[:_SHOWN_GAPS]:
            table.add_row(
                Text(one_line(gap.name)), Text(gap.trace_id), Text("\n".join(map(one_line, gap.reasons)), "red")
            )
        parts.append(table)
    if len(found.gaps) > _SHOWN_GAPS:
        parts.append(Text(f"and {len(found.gaps) - _SHOWN_GAPS} more, which --json lists"))
    if found.waiting.files:
        parts.append(
            Text(
                f"{found.waiting.bytes} bytes in {found.waiting.files} files still wait on disk: the backend was down, "
                f"or is; they are sent when it is back",
                "yellow",
            )
        )
    sum_up = f"run {found.run}: {found.complete} of {found.traced} traced trajectories are whole trees"
    parts.append(
        Text(f"{sum_up} ({found.trajectories} trajectories in {found.dumps} files)", "red" if found.gaps else "green")
    )
    return Group(*parts)
