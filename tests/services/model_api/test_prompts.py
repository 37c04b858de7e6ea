"""What of a request reaches the chat template."""

import copy

import pytest
from pydantic import JsonValue
from transformers import PreTrainedTokenizerBase

from trackway.model_api.prompts import chat_prompt
from trackway.wire.openai.requests import ChatRequest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({}, "unset"),
    ],
)
async def test_the_reasoning_effort_is_a_variable_of_the_chat_template(
    tokenizer: PreTrainedTokenizerBase, fields: dict[str, JsonValue], text: str
) -> None:
    special = copy.deepcopy(tokenizer)
    special.chat_template = "{{ reasoning_effort or 'unset' }}"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    ids = await chat_prompt(special, ChatRequest.model_validate(body), 99)  # pyright: ignore[reportArgumentType]
    assert tokenizer.decode(ids) == text
