"""Nothing in a model's text may act on a terminal or a page, and nothing in it is hidden."""

import pytest

from trackway.traces.render import ending, one_line, shortened, visible


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 54 <tool_call> [bold]x[/bold]\n\tend", "#### 54 <tool_call> [bold]x[/bold]\n\tend"),
        ("\x1b[2Jgone", "␛[2Jgone"),
        ("a\rb\x00\x07", "a␍b␀␇"),
        ("\x7f\x9b31m", "␡\\u009b31m"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("half \ud83d pair", "half \\ud83d pair"),
        ("日本 👍🏽 ñ", "日本 👍🏽 ñ"),
    ],
)
def test_what_would_act_is_shown_instead(text: str, expected: str) -> None:
    assert visible(text) == expected


def test_a_long_text_says_how_much_is_left_out() -> None:
    assert shortened("abcdef", 5, 4) == "abcd … 2 more characters"
    assert shortened("1\n2\n3\n4", 2, 100) == "1\n2 … 4 more characters"
    assert shortened("short", 5, 5) == "short"


def test_a_cell_has_one_line() -> None:
    assert one_line("a\nb\x1b") == "a⏎b␛"
    assert (ending("\n#### 54\n", 20), ending("abcdefgh", 4)) == ("#### 54", "…fgh")
