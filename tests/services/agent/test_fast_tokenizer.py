"""A tokenizer without the Python around it gives what transformers gives."""

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.services.agent.scripted_model import CHATML, byte_tokenizer
from trackway.agent.fast_tokenizer import FastTokenizer

TEXTS = ["", "a", "é ☺", "<|im_start|>user\nHi <|im_end|>\n", "  two  spaces . "]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(CHATML)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", start)])
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_those_of_transformers(
    tokenizer: PreTrainedTokenizerFast, text: str, *, special: bool
) -> None:
    fast = FastTokenizer(tokenizer)

    ids = fast.encode(text, add_special_tokens=special)

    assert ids == tokenizer.encode(text, add_special_tokens=special)
    for skip in (True, False):
        decoded = fast.decode(ids, skip_special_tokens=skip)
        assert decoded == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_tokenizer_that_changes_what_transformers_does_is_asked_itself() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **kwargs: object) -> str:
            return super()._decode(*args, **kwargs).upper()  # pyright: ignore[reportArgumentType]

    plain = byte_tokenizer(CHATML)
    shouting = Shouting(tokenizer_object=plain.backend_tokenizer)
    ids = plain.encode("hello", add_special_tokens=False)

    assert FastTokenizer(shouting).decode(ids, skip_special_tokens=True) == "HELLO"
