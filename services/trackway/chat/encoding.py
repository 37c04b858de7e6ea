"""Text to token ids within a limit. A text far over the limit is not encoded in full.

Encoding costs more than a microsecond and 100 bytes per character, so 16 MB of text take 20 seconds and 2 GB.
"""

from collections.abc import Callable, Iterable, Sequence

_FIRST_CHARS = 65_536
"""Texts up to this many characters are always encoded: a tenth of a second, 10 MB."""
_GROWTH = 4
_CUT_TOKENS = 64
"""A text cut inside a word may have this many more tokens than within the whole text."""
_COMPOSED = 2
"""Characters that NFC normalisation may merge into one."""

Encode = Callable[[str], Sequence[int]]


class TooLong(Exception):
    """The text has more tokens than allowed."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


def chars_per_token(vocabulary: Iterable[str], unknown_token: object) -> int | None:
    """The most characters in a token, or None when the tokenizer maps unknown text to a single token."""
    return None if unknown_token is not None else _COMPOSED * max(map(len, vocabulary))


def check_chars(chars: int, max_tokens: int, most_chars: int | None) -> None:
    """Raises TooLong when this many characters must have more than `max_tokens` of at most `most_chars` each."""
    if most_chars is not None and chars > max_tokens * most_chars:
        raise TooLong(-(-chars // most_chars))


def encode_within(max_tokens: int, text: str, encode: Encode, most_chars: int | None) -> Sequence[int]:
    """The token ids of a text. Raises TooLong when there are more than `max_tokens`.

    A long text is rejected by its number of characters (see `check_chars`) or by encoding growing prefixes.
    """
    check_chars(len(text), max_tokens, most_chars)
    chars = max(_FIRST_CHARS, max_tokens)
    while chars < len(text):
        count = len(encode(text[:chars])) - _CUT_TOKENS
        if count > max_tokens:
            raise TooLong(count)
        chars *= _GROWTH
    ids = encode(text)
    if len(ids) > max_tokens:
        raise TooLong(len(ids))
    return ids
