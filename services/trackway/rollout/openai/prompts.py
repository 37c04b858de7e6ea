"""Prompts as token ids: of text by the tokenizer, of messages by the model's chat template."""

import json

from jinja2 import TemplateError
from pydantic import JsonValue

from trackway.chat.offload import offload
from trackway.chat.templates import template_call
from trackway.chat.tool_calls import BEGIN
from trackway.rollout.text import Tokenizer, TokenText
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatMessage, ChatRequest, ChatTool, CompletionRequest, NamedTool


async def tokenizer_of(text: TokenText) -> Tokenizer:
    """The model's tokenizer; raises INTERNAL when its folder has none."""
    try:
        return await text.tokenizer()
    except Exception as error:
        # transformers raises OSError, ValueError, KeyError or ImportError for a folder it cannot use.
        message = f"expected a tokenizer in {text.model_path}, got {type(error).__name__}: {error}; "
        remedy = "add one, or send token ids to /inference/v1/generate"
        raise TrackwayError(ErrorCode.INTERNAL, message + remedy) from error


async def completion_prompts(tokenizer: Tokenizer, request: CompletionRequest) -> list[list[int]]:
    """Each prompt's ids, in order."""
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    several = [prompts] if isinstance(prompts[0], int) else prompts
    return [await _ids(tokenizer, prompt, request.add_special_tokens) for prompt in several]


async def _ids(tokenizer: Tokenizer, prompt: object, special: bool) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    ids = await offload(len(str(prompt)), _encode, tokenizer, str(prompt), special)
    if not ids:
        message = "prompt: expected text of at least one token, got none; send some text"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="prompt")
    return ids


def forced_prefix(request: ChatRequest) -> str:
    """What the answer begins with, whatever the model wants, so that it calls a tool or a certain one."""
    if isinstance(request.tool_choice, NamedTool):
        return f'{BEGIN}\n{{"name": {json.dumps(request.tool_choice.function.name)}, "arguments":'
    return BEGIN if request.tool_choice == "required" else ""


async def chat_prompt(tokenizer: Tokenizer, request: ChatRequest) -> list[int]:
    """The conversation's ids with the tools that may be called, up to where the answer goes on."""
    if tokenizer.chat_template is None:
        message = "messages: expected a model with a chat template, got one without; use /v1/completions"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="messages")
    size = len(request.model_dump_json(include={"messages", "tools"}))
    return await offload(size, _rendered, tokenizer, request)


def _rendered(tokenizer: Tokenizer, request: ChatRequest) -> list[int]:
    tools = [_template_tool(tool) for tool in request.tools] if request.tool_choice != "none" else []
    try:
        text = tokenizer.apply_chat_template(
            [_template_message(message) for message in request.messages],
            tools or None,
            add_generation_prompt=True,
            tokenize=False,
            **request.chat_template_kwargs,
        )
    except (TemplateError, TypeError, ValueError, RecursionError) as error:
        message = f"messages: the model's chat template refuses them: {error}; send what it can show"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="messages") from error
    return _encode(tokenizer, text + forced_prefix(request), False)


def _encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=special)


def _template_tool(tool: ChatTool) -> dict[str, JsonValue]:
    # `strict` asks for a grammar that we do not have, and no chat template was trained on it.
    return {"type": tool.type, "function": {name: value for name, value in tool.function.items() if name != "strict"}}


def _template_message(message: ChatMessage) -> dict[str, JsonValue]:
    """A message as chat templates want it: plain text, arguments as objects, and the role that templates know."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    shown: dict[str, JsonValue] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [template_call(call) for call in message.tool_calls] or None,
    }
    return {name: value for name, value in shown.items() if value is not None}
