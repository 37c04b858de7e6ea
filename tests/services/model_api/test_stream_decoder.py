"""What becomes of the tokens of one choice, in pieces of any size."""

import pytest

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.stream_decoder import Delta, Reader
from trackway.wire.openai import CompletionRequest

IDS = [20, 20, 15, 15, 325, 20]
"""`2`, `2`, `-`, `-`, `"}}` with a line's end, `2`."""


def read(tokenizer: ChatTokenizer, size: int, **fields: object) -> list[Delta]:
    """The deltas of IDS in pieces of `size` tokens, up to the last."""
    request = CompletionRequest.model_validate({"model": "m", "prompt": "p", "logprobs": 0, **fields})
    reader, deltas = Reader(tokenizer, request), list[Delta]()
    for place in range(0, len(IDS), size):
        ids = IDS[place : place + size]
        end = "length" if place + size >= len(IDS) else None
        deltas.append(reader.read(ids, [-float(place + count) for count in range(len(ids))], end))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_a_stop_string_cuts_ids_and_logprobs_behind_the_token_that_completes_it(
    tokenizer: ChatTokenizer, size: int
) -> None:
    deltas = read(tokenizer, size, stop="2-")
    assert "".join(delta.text for delta in deltas) == "2"
    assert [token for delta in deltas for token in delta.token_ids] == [20, 20, 15]
    assert [logprob for delta in deltas for logprob in delta.logprobs] == [0.0, -1.0, -2.0]
    assert [offset for delta in deltas for offset in delta.offsets] == [0, 1, 2]
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_what_was_held_back_for_a_stop_comes_with_the_end(tokenizer: ChatTokenizer, size: int) -> None:
    deltas = read(tokenizer, size, stop="\n2345")
    assert "".join(delta.text for delta in deltas) == '22--"}}\n2'
    assert deltas[-1].finish_reason == "length"


def test_an_included_stop_is_text(tokenizer: ChatTokenizer) -> None:
    assert read(tokenizer, 6, stop="2-", include_stop_str_in_output=True)[0].text == "22-"
    assert read(tokenizer, 6, stop_token_ids=[325], include_stop_str_in_output=True)[0].text == '22--"}}\n2'
