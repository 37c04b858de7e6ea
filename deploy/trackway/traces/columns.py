"""A comparison on a terminal: two columns, what differs in colour, or between [-...-] and {+...+} without colours."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trackway.traces.compare import CallPair, Comparison, Field, TurnPair, milliseconds, summary
from trackway.traces.diff import Diff, Piece
from trackway.traces.text import one_line, visible

LEFT, RIGHT = "black on red", "black on green"


@dataclass(frozen=True)
class Marks:
    """How a changed passage is marked on each side."""

    colours: bool

    def text(self, pieces: Sequence[Piece] | None, side: str) -> Text:
        """One side of a diff; a side that does not exist is said to be absent."""
        if pieces is None:
            return Text("-", style="dim")
        return Text.assemble(*(self._piece(piece, side) for piece in pieces))

    def _piece(self, piece: Piece, side: str) -> tuple[str, str]:
        text = visible(piece.text)
        if not piece.changed:
            return text, ""
        if self.colours:
            return text, side
        return (f"[-{text}-]" if side == LEFT else f"{{+{text}+}}"), ""


def draw(comparison: Comparison, colours: bool) -> RenderableType:
    """Head, prompt, turns, scoring."""
    marks = Marks(colours)
    parts: list[RenderableType] = [_names(comparison), _head(comparison.head, colours), _section("prompt")]
    parts.append(_both(marks, comparison.prompt))
    for turn in comparison.turns:
        parts += _turn(marks, turn)
    if not comparison.scoring.empty:
        parts += [_section("reward"), _both(marks, comparison.scoring)]
    return Group(*parts, Text(), Text(summary(comparison.turns), style="bold"))


def _names(comparison: Comparison) -> Table:
    table = _two()
    names = [one_line(tree.name) or tree.trace_id for tree in (comparison.left, comparison.right)]
    table.add_row(Text(f"A  {names[0]}", style="bold red"), Text(f"B  {names[1]}", style="bold green"))
    return table


def _head(fields: Iterable[Field], colours: bool) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    for _ in range(2):
        table.add_column(overflow="fold")
    for field in fields:
        left, right = ("red", "green") if field.differs and colours else ("", "")
        sign = "≠" if field.differs else " "
        table.add_row(sign, field.name, Text(one_line(field.left), left), Text(one_line(field.right), right))
    return table


def _turn(marks: Marks, turn: TurnPair) -> list[RenderableType]:
    table = _two()
    table.add_row(
        *(Text("  ".join(map(visible, facts or ["no such turn"])), style="dim") for facts in (turn.left, turn.right))
    )
    if not turn.text.empty:
        table.add_row(marks.text(turn.text.left, LEFT), marks.text(turn.text.right, RIGHT))
    for call in turn.calls:
        _add_call(table, marks, call)
    title = f"{visible(turn.name)}{' (the same)' if turn.equal else ''}"
    return [_section(title), table]


def _add_call(table: Table, marks: Marks, call: CallPair) -> None:
    table.add_row(
        Text.assemble(("→ ", "bold"), marks.text(call.name.left, LEFT), (f"  {milliseconds(call.left_ms)}", "dim")),
        Text.assemble(("→ ", "bold"), marks.text(call.name.right, RIGHT), (f"  {milliseconds(call.right_ms)}", "dim")),
    )
    for sign, part in ((" ", call.arguments), ("=", call.observation)):
        if not part.empty:
            left, right = marks.text(part.left, LEFT), marks.text(part.right, RIGHT)
            table.add_row(_indented(sign, left), _indented(sign, right))


def _indented(sign: str, text: Text) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(sign, text)
    return table


def _both(marks: Marks, part: Diff) -> RenderableType:
    """A text once when both sides say the same."""
    if part.equal:
        return Text.assemble(marks.text(part.left, LEFT), ("  (the same)", "dim"))
    table = _two()
    table.add_row(marks.text(part.left, LEFT), marks.text(part.right, RIGHT))
    return table


def _section(title: str) -> Rule:
    return Rule(Text(title, style="bold"), align="left", style="dim")


def _two() -> Table:
    table = Table(box=None, show_header=False, expand=True, padding=(0, 2, 0, 0))
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    return table
