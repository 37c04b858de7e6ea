"""A text that is far too long is refused without encoding all of it, and a fitting one never is."""

import random

import pytest

from trackway.chat.tokenizer import TooLong, chars_per_token, check_chars, encode_within


class Words:
    """Encodes each word as one token, and remembers how many characters it was given."""

    def __init__(self) -> None:
        self.encoded = 0

    def __call__(self, text: str) -> list[int]:
        self.encoded += len(text)
        return [len(word) for word in text.split()]


def words(count: int, seed: int = 0) -> str:
    dice = random.Random(seed)
    return " ".join("x" * dice.randint(1, 9) for _ in range(count))


@pytest.mark.parametrize("count", [0, 1, 99_999, 100_000])
@pytest.mark.parametrize("most_chars", [None, 20])
def test_a_text_within_its_limit_is_encoded_whole(count: int, most_chars: int | None) -> None:
    text = words(count)
    assert encode_within(100_000, text, Words(), most_chars) == Words()(text)


def test_one_token_more_is_refused() -> None:
    with pytest.raises(TooLong) as refused:
        encode_within(100_000, words(100_001), Words(), None)
    assert refused.value.at_least == 100_001


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [10, 10_000, 100_000])
def test_a_far_longer_text_is_refused_by_its_start(max_tokens: int) -> None:
    encode = Words()
    with pytest.raises(TooLong) as refused:
        encode_within(max_tokens, words(3_000_000), encode, None)
    assert refused.value.at_least > max_tokens
    assert encode.encoded <= max(65_536, 25 * max_tokens)


def test_a_text_that_must_have_more_tokens_is_not_encoded_at_all() -> None:
    encode = Words()
    with pytest.raises(TooLong) as refused:
        encode_within(100, "x" * 1001, encode, 10)
    assert (refused.value.at_least, encode.encoded) == (101, 0)


def test_characters_that_may_fit_are_let_through() -> None:
    check_chars(1000, 100, 10)
    check_chars(10**9, 1, None)


def test_a_token_stands_for_no_more_characters_than_the_longest_of_the_vocabulary_composed() -> None:
    assert chars_per_token(["a", "abcd", ""], None) == 8


def test_a_tokenizer_with_an_unknown_token_has_no_such_bound() -> None:
    assert chars_per_token(["a", "[UNK]"], 1) is None
