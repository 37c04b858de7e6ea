"""Anthropic's messages as chat messages."""

import json
from collections.abc import Sequence

from pydantic import JsonValue

from trackway.model_api.conversations import SAME_FIELDS, chat_request
from trackway.wire.anthropic import (
    ContentBlockParam,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    OutputConfig,
    TextBlockParam,
    ThinkingBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from trackway.wire.chat import FunctionCall, ToolCall
from trackway.wire.openai import ChatMessage, ChatRequest


def chat_of(request: CountTokensRequest) -> ChatRequest:
    """The request as a chat. Raises RequestValidationError for what a chat cannot express."""
    fields: dict[str, object] = {
        **request.model_dump(include=SAME_FIELDS),
        "tools": [{"type": "function", "function": _function(tool)} for tool in request.tools],
        "tool_choice": _choice(request.tool_choice),
        "reasoning_effort": None if request.output_config is None else request.output_config.effort,
        "response_format": _format(request.output_config),
        "parallel_tool_calls": not request.tool_choice.disable_parallel_tool_use,
    }
    if isinstance(request, MessagesRequest):
        fields |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
    system = [] if request.system is None else [ChatMessage(role="system", content=_text(request.system))]
    return chat_request(fields, [*system, *(made for message in request.messages for made in _messages(message))])


def _format(config: OutputConfig | None) -> dict[str, JsonValue] | None:
    if config is None or config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"schema": config.format.json_schema}}


def _function(tool: MessagesTool) -> dict[str, JsonValue]:
    shown: dict[str, JsonValue] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {name: value for name, value in shown.items() if value is not None}


def _choice(choice: MessagesToolChoice) -> object:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _messages(message: MessageParam) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    return [_turn(message.content)] if message.role == "assistant" else _inputs(message.role, message.content)


def _turn(blocks: Sequence[ContentBlockParam]) -> ChatMessage:
    """One assistant message. Its text blocks are parts of one text."""
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlockParam)]
    return ChatMessage(
        role="assistant",
        content="".join(block.text for block in blocks if isinstance(block, TextBlockParam)),
        reasoning_content="".join(thoughts) or None,
        tool_calls=[
            ToolCall(
                id=block.id,
                function=FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)),
            )
            for block in blocks
            if isinstance(block, ToolUseBlockParam)
        ],
    )


def _inputs(role: str, blocks: Sequence[ContentBlockParam]) -> list[ChatMessage]:
    """The results of calls and the texts between them, each a message."""
    messages: list[ChatMessage] = []
    texts: list[TextBlockParam] = []

    def end_text() -> None:
        if texts:
            messages.append(ChatMessage.model_validate({"role": role, "content": _text(texts)}))
            texts.clear()

    for block in blocks:
        if isinstance(block, ToolResultBlockParam):
            end_text()
            messages.append(ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_text(block.content)))
        elif isinstance(block, TextBlockParam):
            texts.append(block)
    end_text()
    return messages


def _text(content: str | Sequence[TextBlockParam]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
