"""Anthropic's `/v1/messages`: a request as chat messages, the response as content blocks, whole or as events."""

import json
from collections.abc import Iterable, Iterator, Sequence

from pydantic import JsonValue

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.prompts import SAME_FIELDS, chat_request
from trackway.model_api.response_builder import MessageReader, ResponseBuilder, event
from trackway.model_api.stream_decoder import Delta, joined
from trackway.serving.routes import ErrorFormatRoute, status_of
from trackway.wire.anthropic import (
    AnthropicError,
    AnthropicErrorReply,
    ContentBlock,
    ContentBlockDeltaEvent,
    ContentBlockParam,
    ContentBlockStartEvent,
    ContentBlockStopEvent,
    CountTokensRequest,
    InputJsonDelta,
    MessageDeltaEvent,
    MessageEnd,
    MessageParam,
    MessagesEvent,
    MessagesReply,
    MessagesRequest,
    MessageStartEvent,
    MessagesTool,
    MessagesToolChoice,
    MessageStopEvent,
    MessagesUsage,
    OutputConfig,
    PingEvent,
    StopReason,
    TextBlock,
    TextBlockParam,
    TextDelta,
    ThinkingBlockParam,
    ToolResultBlockParam,
    ToolUseBlock,
    ToolUseBlockParam,
)
from trackway.wire.chat import FunctionCall, ToolCall
from trackway.wire.errors import TrackwayError
from trackway.wire.openai import ChatMessage, ChatRequest


def chat_of_messages(request: CountTokensRequest) -> ChatRequest:
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


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicRoute(ErrorFormatRoute):
    """A route whose errors have Anthropic's format."""

    @staticmethod
    def error_body(error: TrackwayError) -> dict[str, JsonValue]:
        """Anthropic's body."""
        return anthropic_error(error).model_dump(mode="json")


def anthropic_error(error: TrackwayError) -> AnthropicErrorReply:
    """The body. Also sent as an event when a stream fails after its start."""
    status = status_of(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    body = error.to_reply().error.model_dump(mode="json")
    return AnthropicErrorReply(error=AnthropicError.model_validate({**body, "type": kind}))


_IDS = {"prompt_token_ids", "token_ids", "weight_versions"}


class MessagesResponseBuilder(ResponseBuilder):
    """Builds the one message of a request, which `chat` is in the form of a chat."""

    prefix = "msg_"

    def __init__(
        self, request: MessagesRequest, chat: ChatRequest, tokenizer: ChatTokenizer, prompt: list[int]
    ) -> None:
        super().__init__([prompt], [MessageReader(chat, tokenizer.tool_format)])
        self._request = request
        self._content: list[ContentBlock] = []
        self._in_text = False
        """The last block is text to which more may be added."""
        self._deltas: list[Delta] = []

    def whole(self, deltas: Sequence[Delta]) -> str:
        """The message."""
        for _ in self._events(0, deltas[0]):
            pass  # the events build the blocks
        end = self._delta_event()
        reply = self._reply(end.usage, self._content)
        reply.stop_reason, reply.stop_sequence = end.delta.stop_reason, end.delta.stop_sequence
        reply.prompt_token_ids, reply.token_ids = end.prompt_token_ids, end.token_ids
        reply.weight_versions = end.weight_versions
        return reply.model_dump_json(exclude=self._unwanted())

    def failed(self, error: TrackwayError) -> str:
        """The event `error`."""
        return self._event(anthropic_error(error))

    def _begin(self) -> Iterable[str]:
        usage = MessagesUsage(input_tokens=len(self.prompts[0]), output_tokens=0)
        yield self._event(MessageStartEvent(message=self._reply(usage, [])))
        yield self._event(PingEvent())

    def _alive(self) -> str:
        return self._event(PingEvent())

    def _events(self, index: int, delta: Delta) -> Iterable[str]:
        self._deltas.append(delta)
        parts = self._readers[index].read(delta)
        for part in parts.in_order:
            yield from self._call(part) if isinstance(part, ToolCall) else self._text(part)
        if delta.finish_reason is not None:
            yield from self._close()

    def _end(self) -> Iterable[str]:
        yield self._event(self._delta_event())
        yield self._event(MessageStopEvent())

    def _text(self, text: str) -> Iterator[str]:
        if not self._in_text:
            self._in_text = True
            yield from self._start(TextBlock(text=""))
        block = self._content[-1]
        assert isinstance(block, TextBlock)
        block.text += text
        yield self._event(ContentBlockDeltaEvent(index=len(self._content) - 1, delta=TextDelta(text=text)))

    def _call(self, call: ToolCall) -> Iterator[str]:
        yield from self._close()
        block = ToolUseBlock(id=call.id, name=call.function.name, input={})
        yield from self._start(block)
        block.input = json.loads(call.function.arguments)
        index, delta = len(self._content) - 1, InputJsonDelta(partial_json=call.function.arguments)
        yield self._event(ContentBlockDeltaEvent(index=index, delta=delta))
        yield self._event(ContentBlockStopEvent(index=index))

    def _start(self, block: ContentBlock) -> Iterator[str]:
        self._content.append(block)
        yield self._event(ContentBlockStartEvent(index=len(self._content) - 1, content_block=block))

    def _close(self) -> Iterator[str]:
        """End the text block."""
        if self._in_text:
            self._in_text = False
            yield self._event(ContentBlockStopEvent(index=len(self._content) - 1))

    def _event(self, item: MessagesEvent) -> str:
        exclude: object = self._unwanted()
        if isinstance(item, MessageStartEvent):
            exclude = {"message": _IDS}
        return event(item.model_dump_json(exclude=exclude), item.type)  # pyright: ignore[reportArgumentType]

    def _delta_event(self) -> MessageDeltaEvent:
        delta = joined(self._deltas)
        usage = MessagesUsage(input_tokens=len(self.prompts[0]), output_tokens=len(delta.token_ids))
        end = MessageEnd(stop_reason=self._stop_reason(delta), stop_sequence=delta.stop)
        return MessageDeltaEvent(
            delta=end,
            usage=usage,
            prompt_token_ids=self.prompts[0],
            token_ids=delta.token_ids,
            weight_versions=delta.spans,
        )

    def _stop_reason(self, delta: Delta) -> StopReason:
        if delta.finish_reason == "length":
            return "max_tokens"
        if self._readers[0].message.tool_calls:
            return "tool_use"
        return "end_turn" if delta.stop is None else "stop_sequence"

    def _reply(self, usage: MessagesUsage, content: list[ContentBlock]) -> MessagesReply:
        return MessagesReply(id=self.id, model=self._request.model, content=content, stop_reason=None, usage=usage)

    def _unwanted(self) -> set[str]:
        return set() if self._request.return_token_ids else _IDS
