"""Progress on the terminal: a spinner per component, a bar per run; nothing with --json."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table

from trackway.system import visible

if TYPE_CHECKING:
    from IPython.display import DisplayHandle
    from pydantic import BaseModel

    from trackway.wire.trainer import RunInfo
    from trackway.wire.trajectory import Trajectory

_DONE = "[green]✓[/]"
_ENDS = {
    "ready": _DONE,
    "stopped": _DONE,
    "sent": _DONE,
    "left on disk": _DONE,
    "with problems": "[red]✗[/]",
    "not checked": "[yellow]?[/]",
}
"""States that end a component's row, and its mark."""
_COLUMNS = (
    SpinnerColumn(),
    TextColumn("{task.description}"),
    BarColumn(20),
    MofNCompleteColumn(),
    TextColumn("{task.fields[detail]}"),
    TimeRemainingColumn(),
)
_BARS = "▁▂▃▄▅▆▇█"

stderr = Console(stderr=True)
stdout = Console()


class NotebookCell:
    """An output of a notebook's cell, which each update replaces. Needs no widgets, and stays in the file."""

    _handle: "DisplayHandle | None" = None

    def update(self, renderable: RenderableType) -> None:
        """Show this in place of what the output had."""
        from IPython.display import HTML, display

        page = Console(file=StringIO(), record=True, width=120, force_jupyter=False)
        page.print(renderable)
        form = '<pre style="white-space: pre; margin: 0">{code}</pre>'
        shown = HTML(page.export_html(inline_styles=True, code_format=form))
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)


def _cell(quiet: bool) -> NotebookCell | None:
    """An output of the cell that runs, or None outside of a notebook."""
    return NotebookCell() if stderr.is_jupyter and not quiet else None


class Board:
    """One row per component: a spinner until it is ready, then a mark and the seconds it took."""

    def __init__(self, live: Live | NotebookCell | None, quiet: bool) -> None:
        self._live = live
        self._quiet = quiet
        self._started = time.monotonic()
        self._rows: dict[str, Spinner | str] = {}
        self.seconds: dict[str, float] = {}
        """Seconds from the board's start until each component was ready."""

    def report(self, name: str, state: str) -> None:
        """Show what a component does. A state of `_ENDS` ends its row."""
        if state not in _ENDS:
            self._rows[name] = Spinner("dots", f"{name} {state}")
        else:
            is_first = name not in self.seconds
            self.seconds.setdefault(name, time.monotonic() - self._started)
            self._rows[name] = row = f"{_ENDS[state]} {name} {state} [dim]{self.seconds[name]:.0f} s[/]"
            if is_first and self._live is None and not self._quiet:
                stderr.print(row)
        if self._live is not None:
            self._live.update(self._table())

    def _table(self) -> Table:
        table = Table.grid()
        for row in self._rows.values():
            table.add_row(row)
        return table


@contextmanager
def board(quiet: bool) -> Iterator[Board]:
    """A board for the duration of the block. Prints nothing with `quiet`, and plain lines without a terminal."""
    if quiet or not stderr.is_terminal:
        yield Board(_cell(quiet), quiet)
        return
    with Live(console=stderr, refresh_per_second=8) as live:
        yield Board(live, quiet)


class RunBar:
    """The progress of a run: step, reward and accuracy, or losses, and the time left."""

    def __init__(self, progress: Progress, quiet: bool) -> None:
        self._progress = progress
        self._quiet = quiet
        self._cell = _cell(quiet)
        self._task = progress.add_task("starting", total=None, detail="")
        self._shown = -1
        self._last_message = ""
        self._curve: dict[int, float] = {}

    def show(self, info: "RunInfo") -> None:
        """Show the run's progress. Without a terminal, one line per step. Prints each message of an active run once."""
        from trackway.wire.trainer import ENDED

        if info.message and info.message != self._last_message and info.state not in ENDED and not self._quiet:
            stderr.print(f"[yellow]run {info.run}:[/] {escape(visible(info.message))}", soft_wrap=True)
        self._last_message = info.message
        detail, total = run_detail(info), info.total_steps or None
        value = info.metrics.get("critic/score/mean", info.metrics.get("train/loss"))
        if value is not None:
            self._curve[info.step] = value
        self._progress.update(
            self._task,
            description=info.state.value,
            completed=info.step,
            total=total,
            detail=f"{sparkline([*self._curve.values()])} {detail}",
        )
        if self._cell is not None:
            self._cell.update(self._progress.get_renderable())
        elif self._progress.disable and not self._quiet and info.step != self._shown:
            step = f" step {info.step}/{info.total_steps} {detail}" if info.total_steps else ""
            stderr.print(f"{info.state.value}{step}")
            self._shown = info.step


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The newest `width` values as bars between the least and the greatest of them."""
    newest = [value for value in values if math.isfinite(value)][-width:]
    if not newest:
        return ""
    least, span = min(newest), max(newest) - min(newest)
    return "".join(_BARS[round((value - least) / span * (len(_BARS) - 1)) if span else 0] for value in newest)


def run_detail(info: "RunInfo") -> str:
    """Mean reward and validation accuracy, or the losses of other training, as one line."""
    parts = []
    for name, title in (("train/loss", "loss"), ("val/loss", "validation loss"), ("actor/loss_sum", "loss")):
        if name in info.metrics:
            parts.append(f"{title} {info.metrics[name]:.4f}")
    if "critic/score/mean" in info.metrics:
        parts.append(f"reward {info.metrics['critic/score/mean']:.2f}")
    accuracies = [
        value for name, value in info.metrics.items() if name.startswith("val-core/") and "/acc/mean@" in name
    ]
    if accuracies:
        parts.append(f"accuracy {accuracies[-1]:.2f}")
    return "  ".join(parts)


def rollout_account(info: "RunInfo") -> list[str]:
    """A sentence that says where the rollouts are. Empty before the first."""
    states = {
        name.replace("_", " "): count for name, count in info.rollout_states.items() if count and name != "submitted"
    }
    if not states:
        return []
    retries = info.metrics.get("training/rollout_retries", 0.0)
    again = f"; {retries:.0f} were requested again" if retries else ""
    parts = ", ".join(f"{count} {state}" for state, count in states.items())
    return [f"{info.rollout_states['submitted']} rollouts submitted: {parts}{again}"]


@contextmanager
def run_bar(quiet: bool) -> Iterator[RunBar]:
    """A bar for the duration of the block; prints nothing with `quiet`."""
    with Progress(*_COLUMNS, console=stderr, disable=quiet or not stderr.is_terminal) as progress:
        yield RunBar(progress, quiet)


class RowBar:
    """The progress of an evaluation: rows that have ended, and the mean score so far."""

    def __init__(self, progress: Progress, board: Board, cell: NotebookCell | None) -> None:
        self._progress, self.report, self._cell = progress, board.report, cell
        self._task = progress.add_task("rows", total=None, detail="", visible=False)
        self._scores: list[float] = []
        self._rows = self._failed = 0

    def show(self, rollouts: "Sequence[Trajectory]", left: int) -> None:
        """Count the rollouts of another row, of which `left` are to come."""
        self._rows += 1
        self._failed += sum(rollout.error is not None for rollout in rollouts)
        self._scores += [rollout.reward.score for rollout in rollouts if rollout.reward is not None]
        mean = f"score {sum(self._scores) / len(self._scores):.3f}" if self._scores else ""
        failed = f"  {self._failed} failed" if self._failed else ""
        total = self._rows + left
        self._progress.update(self._task, completed=self._rows, total=total, detail=f"{mean}{failed}", visible=True)
        if self._cell is not None:
            self._cell.update(self._progress.get_renderable())


@contextmanager
def row_bar(quiet: bool) -> Iterator[RowBar]:
    """A bar for the duration of the block, and lines for what starts before; prints nothing with `quiet`."""
    with Progress(*_COLUMNS, console=stderr, disable=quiet or not stderr.is_terminal) as progress:
        yield RowBar(progress, Board(_cell(quiet), quiet), _cell(quiet))


def print_json(value: "BaseModel | Mapping[str, object] | list[object]") -> None:
    """Print one JSON document on standard output."""
    from pydantic_core import to_json

    from trackway.wire.base import NON_FINITE

    text = to_json(value, indent=2, inf_nan_mode=NON_FINITE, fallback=str)
    sys.stdout.write(text.decode() + "\n")
    sys.stdout.flush()  # `serve` and `ui` go on


class DeliveryBar:
    """The progress of what is sent to backends after a run."""

    def __init__(self, progress: Progress, quiet: bool) -> None:
        self._progress = progress
        self._quiet = quiet
        self._cell = _cell(quiet)
        self._task = progress.add_task("sending", total=None)
        self._most = 0
        self._shown = ""

    def show(self, total: int, what: str) -> None:
        """Show that `total` things are left, `what` in words. Without a terminal, print the first and the last."""
        self._most = max(self._most, total)
        done = self._most - total
        self._progress.update(self._task, description=f"sending {what}", completed=done, total=self._most or None)
        if (
            self._progress.disable
            and not self._quiet
            and self._most
            and (not self._shown or not total)
            and what != self._shown
        ):
            text = f"waiting until the backends have {what}" if total else "the backends have everything"
            stderr.print(text) if self._cell is None else self._cell.update(text)
            self._shown = what


@contextmanager
def delivery_bar(quiet: bool) -> Iterator[DeliveryBar]:
    """A bar for the duration of the block; prints nothing with `quiet`."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=quiet or not stderr.is_terminal) as progress:
        yield DeliveryBar(progress, quiet)


@contextmanager
def file_bar(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar of files, for the duration of the block: call what it yields with the number done and of all."""
    with Progress(*_COLUMNS, console=stderr, transient=True, disable=quiet or not stderr.is_terminal) as progress:
        task = progress.add_task("files", total=None, detail="")
        yield lambda done, total: progress.update(task, completed=done, total=total)
