from trackway.tools.sandbox.interpreter import BoundedOutput


def kept(max_chars: int, *pieces: bytes) -> str:
    output = BoundedOutput(max_chars)
    for piece in pieces:
        output.feed(piece)
    return output.text()


def test_what_fits_is_kept_whole() -> None:
    assert kept(10, b"01234", b"56789") == "0123456789"


def test_one_character_more_leaves_one_out_in_the_middle() -> None:
    assert kept(10, b"01234", b"5", b"6789a") == "01234\n[... 1 characters left out ...]\n6789a"


def test_a_character_may_come_in_two_pieces() -> None:
    assert kept(10, b"a\xc3", b"\xa4b") == "a\u00e4b"


def test_what_is_no_text_is_marked() -> None:
    assert kept(10, b"a\xffb") == "a\ufffdb"


def test_no_more_is_held_than_is_kept() -> None:
    output = BoundedOutput(100)
    for _ in range(1000):
        output.feed(b"x" * 65536)

    assert output.bytes_read == 65_536_000
    assert output.text() == "x" * 50 + "\n[... 65535900 characters left out ...]\n" + "x" * 50
    assert max(len(text) for text in vars(output).values() if isinstance(text, str)) == 50
