"""A tokenizer without the Python around it gives what transformers gives."""

from typing import Any

import pytest
from jinja2 import TemplateError
from pydantic import JsonValue
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from tests.services.agent.scripted_model import CHATML, byte_tokenizer
from trackway.chat.tokenizer import ChatTokenizer

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
    fast = ChatTokenizer(tokenizer)

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

    assert ChatTokenizer(shouting).decode(ids, skip_special_tokens=True) == "HELLO"


CALL: dict[str, JsonValue] = {"name": "add", "arguments": {"a": 1}}
CONVERSATIONS: dict[str, list[dict[str, JsonValue]]] = {
    "plain": [{"role": "user", "content": "9+9?"}, {"role": "tool", "content": "é <b>18</b>"}],
    "a call": [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}],
    "null fields": [{"role": "assistant", "content": None, "tool_calls": None, "name": "x"}],
    "reasoning": [{"role": "assistant", "content": "18", "reasoning": "9+9"}],
    "reasoning content": [{"role": "assistant", "content": "18", "reasoning_content": "9+9"}],
}
SHOWING = (
    "{{ bos_token }}{{ tools | tojson }}{% for message in messages %}{{ message | tojson }}"
    "{{ message.thinking if message.thinking is defined }}{{ 'named' if message.name is defined }}{% endfor %}"
    "{{ documents }}{{ add_generation_prompt }}{{ effort }}"
)


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("open_end", [True, False])
def test_the_template_shows_what_transformers_lets_it_show(
    conversation: list[dict[str, JsonValue]], *, open_end: bool
) -> None:
    tokenizer = byte_tokenizer(SHOWING)
    tokenizer.bos_token = "<|im_start|>"
    for tools, variables in (
        (None, {}),
        ([{"type": "function", "function": CALL}], {"effort": "high"}),
        (None, {"documents": [{"title": "sums", "text": "9+9=18"}]}),
        (None, {"chat_template": "another: {{ messages | length }}"}),
    ):
        options: dict[str, Any] = {"add_generation_prompt": open_end, "tokenize": False, **variables}
        shown = ChatTokenizer(tokenizer).apply_chat_template(conversation, tools, **options)
        assert shown == tokenizer.apply_chat_template(conversation, tools=tools, **options)  # pyright: ignore[reportArgumentType]


def test_plain_messages_are_rendered_without_the_python_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = ChatTokenizer(byte_tokenizer(CHATML))
    monkeypatch.setattr(chat_template_utils, "render_jinja_template", None)
    shown = fast.apply_chat_template(CONVERSATIONS["plain"], None, add_generation_prompt=True, tokenize=False)
    assert shown.endswith("<|im_start|>assistant\n")


def test_the_errors_of_a_template_are_the_same() -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('no tools') }}")
    for asked in (ChatTokenizer(tokenizer), tokenizer):
        with pytest.raises(TemplateError, match=r"^no tools$"):
            asked.apply_chat_template(CONVERSATIONS["plain"], None, add_generation_prompt=True, tokenize=False)  # pyright: ignore
    with pytest.raises(ValueError, match="empty conversation"):
        ChatTokenizer(tokenizer).apply_chat_template([], None, add_generation_prompt=True, tokenize=False)
