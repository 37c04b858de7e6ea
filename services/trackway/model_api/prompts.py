"""Prompts as token ids: text by the tokenizer, messages by the chat template, other formats as chat requests."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from fastapi.exceptions import RequestValidationError
from pydantic import JsonValue, ValidationError

from trackway.chat.tokenizer import (
    REJECTIONS,
    ChatTokenizer,
    TooLong,
    chars_per_token,
    check_chars,
    encode_within,
    offload,
    template_call,
)
from trackway.chat.tool_calls import ToolFormat
from trackway.serving.routes import body_problems
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatMessage, ChatRequest, ChatTool, ClassifyRequest, CompletionRequest, NamedTool


async def completion_prompts(tokenizer: ChatTokenizer, request: CompletionRequest, max_tokens: int) -> list[list[int]]:
    """Each prompt's ids, in order. Raises INVALID_REQUEST for an empty text or more than `max_tokens`."""
    special = request.add_special_tokens
    try:
        return [await text_ids(tokenizer, prompt, special, max_tokens) for prompt in request.prompts]
    except TooLong as error:
        raise _too_long("prompt", error, max_tokens) from error


async def text_ids(tokenizer: ChatTokenizer, prompt: str | list[int], special: bool, max_tokens: int) -> list[int]:
    """The ids of a prompt, which may be given as ids. Raises TooLong, and INVALID_REQUEST for an empty text."""
    if isinstance(prompt, list):
        return prompt
    ids = await offload(len(prompt), _encode, tokenizer, prompt, special, max_tokens)
    if not ids:
        message = "prompt: expected text of at least one token, got none; send some text"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="prompt")
    return ids


def _too_long(param: str, error: TooLong, max_tokens: int) -> TrackwayError:
    message = f"{param}: expected 1 to {max_tokens} prompt tokens, got at least {error.at_least}; raise max_model_len"
    return TrackwayError(ErrorCode.INVALID_REQUEST, message, param=param)


def forced_prefix(request: ChatRequest, tool_format: ToolFormat) -> str:
    """The start of the response that forces a tool call, or the call of a certain tool."""
    if isinstance(request.tool_choice, NamedTool):
        return tool_format.opening(request.tool_choice.function.name)
    return tool_format.opening(None) if request.tool_choice == "required" else ""


async def chat_prompt(tokenizer: ChatTokenizer, request: ChatRequest, max_tokens: int) -> list[int]:
    """The ids of the conversation and its tools, including the generation prompt.

    Raises INVALID_REQUEST for more than `max_tokens`, or if the chat template rejects it.
    """
    try:
        return await chat_ids(tokenizer, request, max_tokens)
    except TooLong as error:
        raise _too_long("messages", error, max_tokens) from error


async def chat_ids(tokenizer: ChatTokenizer, request: ChatRequest, max_tokens: int) -> list[int]:
    """The same, for callers with bounds of their own: more than `max_tokens` raise TooLong."""
    size = _checked_size(tokenizer, request.messages, max_tokens, "use /v1/completions")
    return await offload(size + 1000 * len(request.tools), _rendered, tokenizer, request, max_tokens)


async def conversation_ids(tokenizer: ChatTokenizer, request: ClassifyRequest, max_tokens: int) -> list[int]:
    """The ids of a whole conversation, without a generation prompt. Raises INVALID_REQUEST as `chat_prompt`."""
    messages = request.messages or []
    try:
        size = _checked_size(tokenizer, messages, max_tokens, "render it and send it as input")
        return await offload(size, _whole, tokenizer, request, messages, max_tokens)
    except TooLong as error:
        raise _too_long("messages", error, max_tokens) from error


async def input_ids(tokenizer: ChatTokenizer, request: ClassifyRequest, max_tokens: int) -> list[list[int]]:
    """The ids of each input, in order. Raises INVALID_REQUEST as `completion_prompts`."""
    special = request.add_special_tokens is not False
    try:
        return [await text_ids(tokenizer, text, special, max_tokens) for text in request.inputs]
    except TooLong as error:
        raise _too_long("input", error, max_tokens) from error


def most_tokens(request: ChatRequest, left: int) -> int:
    """The most tokens to generate when the model's context has room for `left`."""
    return request.max_completion_tokens or request.max_tokens or max(1, left)


def _checked_size(tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], max_tokens: int, remedy: str) -> int:
    """The size of the work to render messages. Raises TooLong, and INVALID_REQUEST without a chat template."""
    if tokenizer.chat_template is None:
        message = f"messages: expected a model with a chat template, got one without; {remedy}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="messages")
    chars = sum(len(message.text) for message in messages)
    check_chars(chars, max_tokens, _most_chars(tokenizer))
    return chars + 1000 * len(messages)


def _rendered(tokenizer: ChatTokenizer, request: ChatRequest, max_tokens: int) -> list[int]:
    tools = [_template_tool(tool) for tool in request.tools] if request.offers_tools else []
    if tools and (lacks := tokenizer.support.lacks):
        raise TrackwayError(ErrorCode.INVALID_REQUEST, lacks, param="tools")
    text = _text_of(tokenizer, request.messages, tools, template_variables(request), ends_open=True)
    return _encode(tokenizer, text + forced_prefix(request, tokenizer.tool_format), False, max_tokens)


def _whole(
    tokenizer: ChatTokenizer, request: ClassifyRequest, messages: Sequence[ChatMessage], max_tokens: int
) -> list[int]:
    text = _text_of(tokenizer, messages, [], request.chat_template_kwargs, ends_open=False)
    return _encode(tokenizer, text, bool(request.add_special_tokens), max_tokens)


def _text_of(
    tokenizer: ChatTokenizer,
    messages: Sequence[ChatMessage],
    tools: list[dict[str, JsonValue]],
    variables: dict[str, JsonValue],
    *,
    ends_open: bool,
) -> str:
    """The rendered messages, with a generation prompt if it `ends_open`."""
    if any(message.role == "tool" for message in messages) and (lacks := tokenizer.support.lacks_results):
        raise TrackwayError(ErrorCode.INVALID_REQUEST, lacks, param="messages")
    try:
        return tokenizer.apply_chat_template(
            [template_form(message) for message in messages],
            tools or None,
            add_generation_prompt=ends_open,
            tokenize=False,
            **variables,
        )
    except REJECTIONS as error:
        message = f"messages: the model's chat template rejects them: {error}; send messages that it supports"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="messages") from error


def template_variables(request: ChatRequest) -> dict[str, JsonValue]:
    """Variables of the chat template. A template uses those that it knows."""
    effort = request.reasoning_effort
    return {**({} if effort is None else {"reasoning_effort": effort}), **request.chat_template_kwargs}


def _encode(tokenizer: ChatTokenizer, text: str, special: bool, max_tokens: int) -> list[int]:
    def encode(part: str) -> Sequence[int]:
        return tokenizer.encode(part, add_special_tokens=special)

    return list(encode_within(max_tokens, text, encode, _most_chars(tokenizer)))


@lru_cache(maxsize=4)
def _most_chars(tokenizer: ChatTokenizer) -> int | None:
    return chars_per_token(tokenizer.get_vocab(), tokenizer.unk_token_id)


def _template_tool(tool: ChatTool) -> dict[str, JsonValue]:
    # `strict` asks for a grammar, whose tokens would not be trained, and no chat template was trained on it.
    return {"type": tool.type, "function": {name: value for name, value in tool.function.items() if name != "strict"}}


def template_form(message: ChatMessage) -> dict[str, JsonValue]:
    """A message in the form of chat templates: plain text, arguments as objects, and a known role."""
    shown: dict[str, JsonValue] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [template_call(call) for call in message.tool_calls] or None,
    }
    return {name: value for name, value in shown.items() if value is not None}


SAME_FIELDS = {
    *("model", "temperature", "top_p", "top_k", "seed", "stream"),
    *("return_token_ids", "min_weight_version", "chat_template_kwargs"),
}
"""Fields with the same name and meaning in a chat request and in the other formats."""


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
