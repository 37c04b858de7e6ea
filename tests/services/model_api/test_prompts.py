"""What of a request reaches the chat template."""

from typing import Any

import pytest
from pydantic import JsonValue
from transformers import AutoTokenizer

from tests.services.chat.families import FAMILIES
from trackway.chat.tokenizer import ChatTokenizer
from trackway.deploy.bundled import TINY_MODEL
from trackway.model_api.prompts import chat_prompt
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatRequest

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
    tokenizer: ChatTokenizer, fields: dict[str, JsonValue], text: str
) -> None:
    special = AutoTokenizer.from_pretrained(TINY_MODEL)
    special.chat_template = "{{ reasoning_effort or 'unset' }}"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    ids = await chat_prompt(ChatTokenizer(special), ChatRequest.model_validate(body), 99)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "9+9?"}, {"role": "tool", "content": "18"}]}, "messages"),
    ],
)
async def test_a_template_without_tools_is_named_instead_of_dropping_them(
    fields: dict[str, JsonValue], param: str
) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}

    with pytest.raises(TrackwayError, match="expected a chat template that shows tools and their results") as caught:
        await chat_prompt(ChatTokenizer(FAMILIES["phi3"].tokenizer()), ChatRequest.model_validate(body), 99)

    assert (caught.value.code, caught.value.detail) == (ErrorCode.INVALID_REQUEST, {"param": param})
