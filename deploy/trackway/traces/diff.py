"""Two texts laid side by side, word by word: lines first, then the words of the lines that differ."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from pydantic import BaseModel

_WORD = re.compile(r"\d+(?:\.\d+)*|\w+|\s+|[^\w\s]")
"""A number, a word, white space, or one sign; together they are the whole text."""
_MOST_COMPARISONS = 4_000_000
"""Of word with word; difflib's time grows with their product, so longer passages differ as a whole."""


class Piece(NamedTuple):
    """A stretch of one side."""

    text: str
    changed: bool
    """Whether the other side lacks it."""


class Diff(BaseModel):
    """Two texts; a side is None when it does not exist."""

    left: list[Piece] | None
    right: list[Piece] | None

    @property
    def equal(self) -> bool:
        """Whether both sides say the same."""
        return self.left == self.right

    @property
    def empty(self) -> bool:
        """Whether neither side says anything."""
        return not self.left and not self.right


def diff(left: str | None, right: str | None) -> Diff:
    """What two texts share and where they differ; all of a side whose other side does not exist is changed."""
    if left is None or right is None:
        return Diff(left=_whole(left), right=_whole(right))
    sides: tuple[list[Piece], list[Piece]] = ([], [])
    lines = left.splitlines(keepends=True), right.splitlines(keepends=True)
    for same, here, there in _blocks(*lines):
        pair = ("".join(here), "".join(there))
        if same:
            _append(sides, pair, changed=False)
        else:
            _append_words(sides, *pair)
    return Diff(left=_merged(sides[0]), right=_merged(sides[1]))


def _whole(text: str | None) -> list[Piece] | None:
    return None if text is None else _merged([Piece(text, True)])


def _append_words(sides: tuple[list[Piece], list[Piece]], left: str, right: str) -> None:
    words = _WORD.findall(left), _WORD.findall(right)
    if len(words[0]) * len(words[1]) > _MOST_COMPARISONS:
        _append(sides, (left, right), changed=True)
        return
    for same, here, there in _blocks(*words):
        _append(sides, ("".join(here), "".join(there)), changed=not same)


def _blocks(left: Sequence[str], right: Sequence[str]) -> list[tuple[bool, Sequence[str], Sequence[str]]]:
    """Aligned stretches, and whether they are the same."""
    codes = SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    return [(tag == "equal", left[a:b], right[c:d]) for tag, a, b, c, d in codes]


def _append(sides: tuple[list[Piece], list[Piece]], pair: tuple[str, str], changed: bool) -> None:
    for side, text in zip(sides, pair, strict=True):
        side.append(Piece(text, changed))


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece, without empty ones."""
    merged: list[Piece] = []
    for piece in pieces:
        if piece.text and merged and merged[-1].changed == piece.changed:
            merged[-1] = Piece(merged[-1].text + piece.text, piece.changed)
        elif piece.text:
            merged.append(piece)
    return merged
