"""A real server in this process, a conversation to send, and what an answer holds beyond OpenAI's types."""

from typing import Any

from openai import BaseModel
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam

CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say ok."}]


def extra(reply: BaseModel) -> dict[str, Any]:
    """The fields that OpenAI does not have."""
    return reply.model_extra or {}


def calls(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    """Names and arguments of the functions called."""
    found = [call.function for call in message.tool_calls or [] if call.type == "function"]
    return [(function.name, function.arguments) for function in found]
