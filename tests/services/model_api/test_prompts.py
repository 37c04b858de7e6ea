"""What of a request reaches the chat template."""

import copy
from typing import Any, cast

import pytest
from pydantic import JsonValue
from transformers import PreTrainedTokenizerBase

from tests.services.chat.families import FAMILIES
from trackway.model_api.prompts import chat_prompt
from trackway.model_api.tokenizer import Tokenizer
from trackway.wire.errors import ErrorCode, TrackwayError
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
        await chat_prompt(cast(Tokenizer, FAMILIES["phi3"].tokenizer()), ChatRequest.model_validate(body), 99)

    assert (caught.value.code, caught.value.detail) == (ErrorCode.INVALID_REQUEST, {"param": param})
