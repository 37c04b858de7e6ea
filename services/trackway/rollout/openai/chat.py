"""Responses of `/v1/chat/completions`: messages with their tool calls."""

import uuid
from collections.abc import Sequence
from typing import NamedTuple

from trackway.rollout.openai.prompts import forced_prefix
from trackway.rollout.openai.responses import Head, ResponseBuilder
from trackway.rollout.openai.stream_decoder import Delta
from trackway.rollout.openai.tool_calls import ToolCallReader
from trackway.rollout.tokenizer import Tokenizer
from trackway.wire.chat import FunctionCall, ToolCall
from trackway.wire.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatReplyMessage,
    ChoiceEnd,
    ToolCallDelta,
)
from trackway.wire.openai.requests import ChatRequest


class _Parts(NamedTuple):
    """The next part of a streamed message."""

    content: str
    calls: list[ToolCallDelta]


class ChatResponseBuilder(ResponseBuilder):
    """Builds one message per choice."""

    prefix = "chatcmpl"

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, prompt: list[int]) -> None:
        super().__init__(request, tokenizer, [prompt])
        self._request = request
        reads_calls = bool(request.tools) and request.tool_choice != "none"
        readers = [ToolCallReader(forced_prefix(request), not request.parallel_tool_calls) for _ in range(request.n)]
        self._readers = readers if reads_calls else None

    def whole(self, deltas: Sequence[Delta]) -> ChatCompletion:
        """Every choice."""
        usage = self._usage(sum(len(delta.token_ids) for delta in deltas))
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        answer = ChatCompletion(**{**self._head, "usage": usage}, object="chat.completion", choices=choices)
        if self._request.return_token_ids:
            answer.prompt_token_ids = self.prompts[0]
        return answer

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        content, calls = self._parts(index, delta)
        message = ChatReplyMessage(role="assistant", content=content if content or not calls else None)
        if calls:
            message.tool_calls = [ToolCall(id=call.id, type="function", function=call.function) for call in calls]
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=self._finish_reason(index, delta),
            logprobs=self._logprobs(delta),
            **self._ids(delta),
        )

    def _chunk(self, head: Head, index: int, delta: Delta, is_first: bool) -> ChatChunk | None:
        content, calls = self._parts(index, delta)
        new = ChatDelta(role="assistant", content=content) if is_first else ChatDelta()
        if content:
            new.content = content
        if calls:
            new.tool_calls = calls
        finish_reason, logprobs = self._finish_reason(index, delta), self._logprobs(delta)
        if not (new.model_fields_set or finish_reason or logprobs or self._request.return_token_ids):
            return None
        choice = ChatChunkChoice(
            index=index, delta=new, finish_reason=finish_reason, logprobs=logprobs, **self._ids(delta)
        )
        chunk = ChatChunk(**head, object="chat.completion.chunk", choices=[choice])
        if self._request.return_token_ids and is_first:
            chunk.prompt_token_ids = self.prompts[0]
        return chunk

    def _counts(self, head: Head) -> ChatChunk:
        return ChatChunk(**head, object="chat.completion.chunk", choices=[])

    def _parts(self, index: int, delta: Delta) -> _Parts:
        if self._readers is None:
            return _Parts(delta.text, [])
        reader = self._readers[index]
        place = reader.calls
        parts = reader.push(delta.text) + (reader.rest() if delta.finish_reason else [])
        calls = [part for part in parts if isinstance(part, FunctionCall)]
        texts = [part for part in parts if isinstance(part, str)]
        return _Parts("".join(texts), [_numbered(place + count, call) for count, call in enumerate(calls)])

    def _finish_reason(self, index: int, delta: Delta) -> ChoiceEnd | None:
        if delta.finish_reason is None:
            return None
        called = self._readers is not None and self._readers[index].calls > 0
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return ChatLogprobs(content=[self._logprob(token, logprob) for token, logprob in pairs])

    def _logprob(self, token: int, logprob: float) -> ChatLogprob:
        text = self._token_text(token)
        whole = "\ufffd" not in text
        return ChatLogprob(
            token=self._token(token), logprob=logprob, bytes=list(text.encode()) if whole else None, top_logprobs=[]
        )


def _numbered(index: int, call: FunctionCall) -> ToolCallDelta:
    return ToolCallDelta(index=index, id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=call)
