"""A word diff of texts: lines first, then the words of the lines that differ."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import NamedTuple

from pydantic import BaseModel

_WORD = re.compile(r"\d+(?:\.\d+)*|\w+|\s+|[^\w\s]")
"""A number, a word, white space, or a single character; joined they give the text."""
_MOST_COMPARISONS = 4_000_000
"""Limit of word comparisons, the product of both lengths; longer passages differ as a whole."""


class DiffPiece(NamedTuple):
    """A piece of one text."""

    text: str
    changed: bool
    """Whether another text lacks this part of the first, or the first lacks this part of another."""


class Diff(BaseModel):
    """The diff of several texts; None for a side that does not exist."""

    sides: list[list[DiffPiece] | None]

    @property
    def equal(self) -> bool:
        """Whether all texts are equal."""
        return all(side == self.sides[0] for side in self.sides)

    @property
    def empty(self) -> bool:
        """Whether all texts are empty."""
        return not any(self.sides)


def diff(*texts: str | None) -> Diff:
    """The diff of each text against the first; all of a text without a counterpart is changed."""
    first, *others = texts
    if first is None:
        return Diff(sides=[None, *map(_whole, others)])
    pairs = [None if other is None else _pair(first, other) for other in others]
    sides = [None if pair is None else pair[1] for pair in pairs]
    firsts = [pair[0] for pair in pairs if pair is not None]
    return Diff(sides=[_union(firsts) if firsts else _whole(first), *sides])


def _pair(left: str, right: str) -> tuple[list[DiffPiece], list[DiffPiece]]:
    sides: tuple[list[DiffPiece], list[DiffPiece]] = ([], [])
    lines = left.splitlines(keepends=True), right.splitlines(keepends=True)
    for same, here, there in _blocks(*lines):
        pair = ("".join(here), "".join(there))
        if same:
            _append(sides, pair, changed=False)
        else:
            _append_words(sides, *pair)
    return _merged(sides[0]), _merged(sides[1])


def _union(versions: Sequence[Sequence[DiffPiece]]) -> list[DiffPiece]:
    """One text from its comparisons with several others: changed where any of them says so."""
    text = "".join(piece.text for piece in versions[0])
    changed = [False] * len(text)
    for pieces in versions:
        start = 0
        for piece in pieces:
            end = start + len(piece.text)
            if piece.changed:
                changed[start:end] = [True] * len(piece.text)
            start = end
    runs = groupby(range(len(text)), key=changed.__getitem__)
    return [DiffPiece("".join(text[place] for place in places), flag) for flag, places in runs]


def _whole(text: str | None) -> list[DiffPiece] | None:
    return None if text is None else _merged([DiffPiece(text, True)])


def _append_words(sides: tuple[list[DiffPiece], list[DiffPiece]], left: str, right: str) -> None:
    words = _WORD.findall(left), _WORD.findall(right)
    if len(words[0]) * len(words[1]) > _MOST_COMPARISONS:
        _append(sides, (left, right), changed=True)
        return
    for same, here, there in _blocks(*words):
        _append(sides, ("".join(here), "".join(there)), changed=not same)


def _blocks(left: Sequence[str], right: Sequence[str]) -> list[tuple[bool, Sequence[str], Sequence[str]]]:
    """Aligned slices of both sides, and whether they are equal."""
    codes = SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    return [(tag == "equal", left[a:b], right[c:d]) for tag, a, b, c, d in codes]


def _append(sides: tuple[list[DiffPiece], list[DiffPiece]], pair: tuple[str, str], changed: bool) -> None:
    for side, text in zip(sides, pair, strict=True):
        side.append(DiffPiece(text, changed))


def _merged(pieces: Sequence[DiffPiece]) -> list[DiffPiece]:
    """Merge adjacent pieces of the same kind and drop empty ones."""
    merged: list[DiffPiece] = []
    for piece in pieces:
        if piece.text and merged and merged[-1].changed == piece.changed:
            merged[-1] = DiffPiece(merged[-1].text + piece.text, piece.changed)
        elif piece.text:
            merged.append(piece)
    return merged
