"""Text of any script in a header that HTTP can carry."""

from urllib.parse import unquote

import pytest

from trackway.wire.service import LONGEST_TEXT, header_text


@pytest.mark.parametrize("text", ["demo/1/17/0", "a b~%41", "x" * LONGEST_TEXT])
def test_printable_ascii_is_sent_as_it_is(text: str) -> None:
    assert header_text(text) == text


@pytest.mark.parametrize("text", ["München/1/ü/0", "a\nb: forged", "実験/val1/🙂/3"])
def test_other_text_is_percent_encoded(text: str) -> None:
    assert header_text(text).isascii() and header_text(text).isprintable()
    assert unquote(header_text(text)) == text


@pytest.mark.parametrize("text", ["", "x" * 257, "ü" * 100, "\ud800" * 300])
def test_what_no_header_holds_is_cut_and_told_apart_by_a_digest(text: str) -> None:
    sent = header_text(text)

    assert 1 <= len(sent) <= LONGEST_TEXT and sent.isascii() and sent.isprintable()
    assert sent == header_text(text) != header_text(text + "x")
