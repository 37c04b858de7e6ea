"""Text that comes in pieces is the text of the whole, and no piece is a part of a character."""

import random

import pytest

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.stream_decoder import Detokenizer


def detokenizer(tokenizer: ChatTokenizer) -> Detokenizer:
    return Detokenizer(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))


def test_a_character_of_several_tokens_comes_with_its_last_one(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("a🎉b", add_special_tokens=False)
    reader = detokenizer(tokenizer)
    assert [reader.push([token]) for token in ids] == ["a", "", "", "", "🎉", "b"]


def test_special_tokens_have_no_text(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("a<|im_start|>é<|im_end|>", add_special_tokens=False)
    reader = detokenizer(tokenizer)
    assert "".join(reader.push([token]) for token in ids) == "aé"
    assert reader.rest() == ""


def test_a_character_that_is_never_complete_comes_at_the_end_as_a_replacement(
    tokenizer: ChatTokenizer,
) -> None:
    ids = tokenizer.encode("a🎉", add_special_tokens=False)[:-1]
    reader = detokenizer(tokenizer)
    assert [reader.push([token]) for token in ids] == ["a", "", "", ""]
    assert reader.rest() == "\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_in_random_pieces_give_the_text_of_all_at_once(tokenizer: ChatTokenizer, seed: int) -> None:
    draw = random.Random(seed)
    ids = [draw.randrange(len(tokenizer.get_vocab())) for _ in range(200)]
    reader, text, place = detokenizer(tokenizer), "", 0
    while place < len(ids):
        size = draw.randint(1, 4)
        text += reader.push(ids[place : place + size])
        place += size
    assert text + reader.rest() == tokenizer.decode(ids, skip_special_tokens=True)
