"""Functions that the conversions of other formats to chat requests share."""

from collections.abc import Mapping, Sequence

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from trackway.serving.error_responses import body_problems
from trackway.wire.openai import ChatMessage, ChatRequest

SAME_FIELDS = {
    *("model", "temperature", "top_p", "top_k", "seed", "stream"),
    *("return_token_ids", "min_weight_version", "chat_template_kwargs"),
}
"""Fields that a chat request and those of the other formats have, with the same name and meaning."""


def chat_request(fields: Mapping[str, object], messages: Sequence[ChatMessage]) -> ChatRequest:
    """The chat. Raises RequestValidationError for what a chat cannot express."""
    try:
        return ChatRequest.model_validate({**fields, "messages": one_system_message(messages)})
    except ValidationError as error:
        raise RequestValidationError(body_problems(error)) from error


def one_system_message(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with the instructions at their beginning as one message: chat templates take no second one."""
    count = next((place for place, item in enumerate(messages) if item.role not in ("system", "developer")), None)
    system = messages[:count]
    if len(system) < 2:
        return list(messages)
    content = "\n\n".join(str(message.content) for message in system)
    return [ChatMessage(role="system", content=content), *messages[len(system) :]]
