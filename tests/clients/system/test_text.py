"""Text from outside, as it is shown and as it is sent."""

import pytest

from trackway.system import visible
from trackway.wire.base import well_formed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("run/1/17/0", "run/1/17/0"),
        ("München 東京 🙂", "München 東京 🙂"),
        ("a\nINFO forged", "a\\nINFO forged"),
        ("a\r\tb\x00", "a\\r\\tb\\x00"),
        ("\x1b[31mred\x9b0m", "\\x1b[31mred\\x9b0m"),
        ("a\u2028b\u202ec\x85", "a\\u2028b\\u202ec\\x85"),
        ("half \ud83d", "half \\ud83d"),
    ],
)
def test_what_does_not_print_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_kept_character_stays() -> None:
    assert visible("a\nb\x1b", keep="\n") == "a\nb\\x1b"


@pytest.mark.parametrize(
    ("text", "sent"),
    [("plain", "plain"), ("ü🙂", "ü🙂"), ("a\ud83d", "a\ufffd"), ("\udc00\ud800b", "\ufffd\ufffdb")],
)
def test_only_lone_surrogates_are_replaced(text: str, sent: str) -> None:
    assert well_formed(text) == sent
    assert well_formed(text).encode().decode() == sent
