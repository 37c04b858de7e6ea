"""Responses of `/v1/chat/completions`: messages with their tool calls."""

from collections.abc import Sequence

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.message_reader import MessageReader
from trackway.model_api.openai.chunks import ChunkedResponseBuilder, Head
from trackway.model_api.stream_decoder import Delta
from trackway.wire.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatReplyMessage,
    ToolCallDelta,
)
from trackway.wire.openai.requests import ChatRequest


class ChatResponseBuilder(ChunkedResponseBuilder):
    """Builds one message per choice."""

    prefix = "chatcmpl-"

    def __init__(self, request: ChatRequest, tokenizer: ChatTokenizer, prompt: list[int]) -> None:
        readers = [MessageReader(request, tokenizer.tool_format) for _ in range(request.n)]
        super().__init__(request, tokenizer, [prompt], readers)
        self._request = request

    def whole(self, deltas: Sequence[Delta]) -> str:
        """Every choice."""
        usage = self._usage(sum(len(delta.token_ids) for delta in deltas))
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        head: Head = {**self._head, "usage": usage}
        answer = ChatCompletion(**head, object="chat.completion", choices=choices)
        if self._request.return_token_ids:
            answer.prompt_token_ids = self.prompts[0]
        if deltas[0].prompt_logprobs is not None:
            answer.prompt_logprobs = deltas[0].prompt_logprobs
        return answer.sent()

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        parts = self._readers[index].read(delta)
        content, calls = parts.content, parts.calls
        if calls:
            message = ChatReplyMessage(role="assistant", content=content or None, tool_calls=calls)
        else:
            message = ChatReplyMessage(role="assistant", content=content)
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=parts.finish_reason,
            logprobs=self._logprobs(delta),
            **self._ids(delta),
        )

    def _chunk(self, head: Head, index: int, delta: Delta, is_first: bool) -> ChatChunk | None:
        count = len(self._readers[index].message.tool_calls or [])
        parts = self._readers[index].read(delta)
        new = ChatDelta(role="assistant", content=parts.content) if is_first else ChatDelta()
        if parts.content:
            new.content = parts.content
        if parts.calls:
            new.tool_calls = [
                ToolCallDelta(index=count + place, id=call.id, type=call.type, function=call.function)
                for place, call in enumerate(parts.calls)
            ]
        logprobs = self._logprobs(delta)
        scored = delta.prompt_logprobs
        if not (new.model_fields_set or parts.finish_reason or logprobs or self._request.return_token_ids or scored):
            return None
        choice = ChatChunkChoice(
            index=index, delta=new, finish_reason=parts.finish_reason, logprobs=logprobs, **self._ids(delta)
        )
        chunk = ChatChunk(**head, object="chat.completion.chunk", choices=[choice])
        if self._request.return_token_ids and is_first:
            chunk.prompt_token_ids = self.prompts[0]
        if scored is not None:
            chunk.prompt_logprobs = scored
        return chunk

    def _counts(self, head: Head) -> ChatChunk:
        return ChatChunk(**head, object="chat.completion.chunk", choices=[])

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return ChatLogprobs(content=self._logprob_writer.chat(delta))
