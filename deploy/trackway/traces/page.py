"""A comparison as a self-contained HTML file: no scripts, no external resources."""

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from trackway.system import StorageError, atomic_write
from trackway.system.process import UserError
from trackway.traces.compare import Comparison, DiffPiece, milliseconds, summary
from trackway.traces.render import extent, visible
from trackway.traces.tree import SpanNode, TraceTree


def write(path: Path, comparison: Comparison) -> None:
    """Write the page. Raises UserError if the file cannot be written."""
    try:
        atomic_write(path, render(comparison), what="the page")
    except StorageError as error:
        raise UserError(f"--html: {error}") from error
    except OSError as error:
        raise UserError(f"--html: cannot write {path}: {error.strerror}") from error


def render(comparison: Comparison) -> str:
    """The page's HTML. Every text of the traces is escaped."""
    # Autoescaping keeps a model's text from becoming markup.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"visible": visible, "ms": milliseconds, "shown": shown}
    template = environment.from_string(files(__package__ or "").joinpath("compare.html.j2").read_text(encoding="utf-8"))
    lines = [timeline(tree) for tree in comparison.trees]
    letters = [letter(index) for index in range(len(lines))]
    return template.render(comparison=comparison, summary=summary(comparison.turns), timelines=lines, letters=letters)


def letter(index: int) -> str:
    """The name of a trajectory by its place: A to Z, then its number."""
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def shown(piece: DiffPiece) -> str:
    """A piece's text, with a sign for a line break that only one side has."""
    text = visible(piece.text)
    return text.replace("\n", "↵\n") if piece.changed else text


def timeline(tree: TraceTree) -> list[dict[str, object]]:
    """The spans from top to bottom with their position on the time line in per cent."""
    return [_bar(span, depth, tree) for root in tree.roots for depth, span in _levels(root, 0)]


def _levels(span: SpanNode, depth: int) -> list[tuple[int, SpanNode]]:
    return [(depth, span), *(below for child in span.children for below in _levels(child, depth + 1))]


def _bar(span: SpanNode, depth: int, tree: TraceTree) -> dict[str, object]:
    start, length = extent(span, tree)
    return {
        "span": span,
        "depth": depth,
        "start": f"{100 * start:.2f}",
        "length": f"{100 * length:.2f}",
    }
