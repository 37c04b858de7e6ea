"""Two texts side by side: what they share and what only one has."""

import time

import pytest

from tests.time_limits import slowness
from trackway.traces.compare import Diff, DiffPiece, diff


def same(text: str) -> DiffPiece:
    return DiffPiece(text, False)


def only(text: str) -> DiffPiece:
    return DiffPiece(text, True)


def test_the_same_text_is_one_piece() -> None:
    assert diff("a b", "a b") == Diff(sides=[[same("a b")], [same("a b")]])
    assert diff("a b", "a b").equal and not diff("a b", "a c").equal


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (
            "6*9 is #### 54",
            "6*8 is #### 48",
            Diff(
                sides=[
                    [same("6*"), only("9"), same(" is #### "), only("54")],
                    [same("6*"), only("8"), same(" is #### "), only("48")],
                ]
            ),
        ),
        ("0.5", "0.75", Diff(sides=[[only("0.5")], [only("0.75")]])),
        ("a\nb\nc\n", "a\nc\n", Diff(sides=[[same("a\n"), only("b\n"), same("c\n")], [same("a\nc\n")]])),
        ("a", "a\n", Diff(sides=[[same("a")], [same("a"), only("\n")]])),
        ("", "new", Diff(sides=[[], [only("new")]])),
        (
            "wörter größe",
            "wörter grösse",
            Diff(sides=[[same("wörter "), only("größe")], [same("wörter "), only("grösse")]]),
        ),
    ],
)
def test_texts_differ_word_by_word(left: str, right: str, expected: Diff) -> None:
    assert diff(left, right) == expected


def test_several_texts_are_compared_with_the_first() -> None:
    assert diff("a b c", "a x c", None, "a b y") == Diff(
        sides=[
            [same("a "), only("b"), same(" "), only("c")],
            [same("a "), only("x"), same(" c")],
            None,
            [same("a b "), only("y")],
        ]
    )
    assert diff("a", None, None) == Diff(sides=[[only("a")], None, None])
    assert diff(None, "a", "a") == Diff(sides=[None, [only("a")], [only("a")]])
    assert diff("a", "a", "a").equal and not diff("a", "a", "b").equal


def test_a_side_that_does_not_exist_is_no_empty_text() -> None:
    assert diff(None, "x y") == Diff(sides=[None, [only("x y")]])
    assert diff("x", None) == Diff(sides=[[only("x")], None])
    assert (diff(None, None).empty, diff("", "").empty, diff(None, "x").empty) == (True, True, False)


@pytest.mark.parametrize("text", ["a  b\t\r\n\n#### 7 <tool_call>[x]", "\n", "日本語 テキスト", "a_b-c.d 1.2.3"])
def test_no_character_is_lost(text: str) -> None:
    for changed in ("", "a b", text + "!"):
        found = diff(text, changed)
        assert "".join(piece.text for piece in found.sides[0] or []) == text
        assert "".join(piece.text for piece in found.sides[1] or []) == changed


def test_long_texts_that_share_nothing_are_compared_in_bounded_time() -> None:
    left, right = (" ".join(f"{word}{index}" for index in range(20_000)) for word in "ab")
    began = time.process_time()
    found = diff(left, right)
    assert time.process_time() - began < 5 * slowness()
    assert found.sides == [[only(left)], [only(right)]]
