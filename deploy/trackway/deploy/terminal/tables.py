"""Tables of plain text, readable in a terminal and in a file."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 140
"""Width in columns without a terminal."""


def wide(console: Console) -> Console:
    """The console, or a wide one when the output is not a terminal."""
    return console if console.is_terminal else Console(stderr=console.stderr, width=_WIDTH)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A borderless table of plain text, readable in a file too."""
    grid = Table(
        title=f"\n{title}" if title else None,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for number, column in enumerate(columns):
        grid.add_column(column, overflow="fold", header_style="dim", no_wrap=number == 0)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def size_of(count: int) -> str:
    """Bytes in decimal units."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
