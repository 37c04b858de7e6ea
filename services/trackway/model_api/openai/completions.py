"""OpenAI's completions and chat completions: their replies, whole or as the chunks of a stream.

Error responses for OpenAI's clients are our body with `type` and `param`, and a header for retries.
"""

import json
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NotRequired, TypedDict

from pydantic import JsonValue

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.response_builder import MessageReader, ResponseBuilder, event
from trackway.model_api.stream_decoder import Delta
from trackway.serving.routes import ErrorFormatRoute
from trackway.wire.errors import TrackwayError
from trackway.wire.openai import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatReplyMessage,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    OpenAIReply,
    SampledRequest,
    ToolCallDelta,
    TopLogprob,
)
from trackway.wire.rollout import TopLogprobs, Usage
from trackway.wire.trajectory import WeightSpan

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class OpenAIRoute(ErrorFormatRoute):
    """A route whose errors have OpenAI's format."""

    @staticmethod
    def error_body(error: TrackwayError) -> dict[str, JsonValue]:
        """OpenAI's body."""
        return openai_body(error)


def openai_body(error: TrackwayError) -> dict[str, JsonValue]:
    """The body. Also sent as an event when a stream fails after its start."""
    kind = "server_error" if error.status >= 500 else _TYPES.get(error.status, "invalid_request_error")
    body = error.to_reply().error.model_dump(mode="json")
    return {"error": {**body, "type": kind, "param": error.detail.get("param")}}


class _Named(NamedTuple):
    token: str
    bytes: list[int] | None


class LogprobWriter:
    """Names tokens by their text, or by `token_id:17`."""

    def __init__(self, tokenizer: ChatTokenizer, as_token_ids: bool) -> None:
        self._tokenizer, self._as_token_ids = tokenizer, as_token_ids
        self._named: dict[int, _Named] = {}

    def chat(self, delta: Delta) -> list[ChatLogprob]:
        """One entry for each token."""
        tops = delta.top_logprobs or [[] for _ in delta.token_ids]
        return [
            ChatLogprob(
                **self._name(token)._asdict(),
                logprob=logprob,
                top_logprobs=[TopLogprob(**self._name(other)._asdict(), logprob=value) for other, value in top],
            )
            for token, logprob, top in zip(delta.token_ids, delta.logprobs, tops, strict=True)
        ]

    def completion(self, delta: Delta) -> CompletionLogprobs:
        """The parallel lists of a text completion."""
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return CompletionLogprobs(
            tokens=[self._name(token).token for token in delta.token_ids],
            token_logprobs=delta.logprobs,
            top_logprobs=[self._by_name(top) for top in delta.top_logprobs or [[pair] for pair in pairs]],
            text_offset=delta.offsets,
        )

    def _by_name(self, top: TopLogprobs) -> dict[str, float]:
        """Logprobs by text; of several tokens with the same text the most likely."""
        found: dict[str, float] = {}
        for token, logprob in top:
            found.setdefault(self._name(token).token, logprob)
        return found

    def _name(self, token_id: int) -> _Named:
        if token_id not in self._named:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            whole = "\ufffd" not in text
            name = f"token_id:{token_id}" if self._as_token_ids else text
            self._named[token_id] = _Named(name, list(text.encode()) if whole else None)
        return self._named[token_id]


class Head(TypedDict):
    """The first fields of every response and chunk."""

    id: str
    created: int
    model: str
    usage: NotRequired[Usage | None]


class Ids(TypedDict, total=False):
    """The fields of a choice that `return_token_ids` adds."""

    token_ids: list[int]
    weight_versions: list[WeightSpan]


class ChunkedResponseBuilder(ResponseBuilder):
    """Builds a response with choices, streamed as chunks that end with `[DONE]`."""

    def __init__(
        self,
        request: SampledRequest,
        tokenizer: ChatTokenizer,
        prompts: Sequence[list[int]],
        readers: Sequence[MessageReader],
    ) -> None:
        super().__init__(prompts, readers)
        self._options = request
        self._logprob_writer = LogprobWriter(tokenizer, request.return_tokens_as_token_ids)
        self._head: Head = {"id": self.id, "created": int(time.time()), "model": request.model}
        self._is_counted = request.stream_options is not None and request.stream_options.include_usage
        self._begun = set[int]()
        """Choices with a chunk."""
        self._completion_tokens = 0

    @abstractmethod
    def _chunk(self, head: Head, index: int, delta: Delta, is_first: bool) -> OpenAIReply | None:
        """The chunk of a delta, or None if the client has nothing to see."""

    @abstractmethod
    def _counts(self, head: Head) -> OpenAIReply:
        """The usage chunk, which has no choices."""

    def failed(self, error: TrackwayError) -> str:
        """OpenAI's error, and the end of the stream."""
        return event(json.dumps(openai_body(error))) + event("[DONE]")

    def _begin(self) -> Iterable[str]:
        return []

    def _events(self, index: int, delta: Delta) -> Iterable[str]:
        head: Head = {**self._head, "usage": None} if self._is_counted else self._head
        self._completion_tokens += len(delta.token_ids)
        chunk = self._chunk(head, index, delta, index not in self._begun)
        self._begun.add(index)
        return [] if chunk is None else [event(chunk.sent())]

    def _end(self) -> Iterable[str]:
        if self._is_counted:
            yield event(self._counts({**self._head, "usage": self._usage(self._completion_tokens)}).sent())
        yield event("[DONE]")

    def _usage(self, completion_tokens: int) -> Usage:
        prompt_tokens = sum(map(len, self.prompts))
        total = prompt_tokens + completion_tokens
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=total)

    def _ids(self, delta: Delta) -> Ids:
        if not self._options.return_token_ids:
            return {}
        ids: Ids = {"token_ids": delta.token_ids}
        if delta.finish_reason is not None:  # until then they may change
            ids["weight_versions"] = delta.spans
        return ids


class CompletionResponseBuilder(ChunkedResponseBuilder):
    """Builds text completions."""

    prefix = "cmpl-"

    def __init__(self, request: CompletionRequest, tokenizer: ChatTokenizer, prompts: Sequence[list[int]]) -> None:
        super().__init__(request, tokenizer, prompts, [MessageReader() for _ in range(len(prompts) * request.n)])
        self._request = request

    def whole(self, deltas: Sequence[Delta]) -> str:
        """The choices of all prompts."""
        usage = self._usage(sum(len(delta.token_ids) for delta in deltas))
        choices = [self._choice(index, delta, True) for index, delta in enumerate(deltas)]
        return Completion(**{**self._head, "usage": usage}, object="text_completion", choices=choices).sent()

    def _chunk(self, head: Head, index: int, delta: Delta, is_first: bool) -> Completion | None:
        choice = self._choice(index, delta, is_first)
        tokens = choice.text or choice.logprobs or self._request.return_token_ids
        if not (tokens or choice.finish_reason or choice.prompt_logprobs):
            return None
        return Completion(**head, object="text_completion", choices=[choice])

    def _counts(self, head: Head) -> Completion:
        return Completion(**head, object="text_completion", choices=[])

    def _choice(self, index: int, delta: Delta, is_first: bool) -> CompletionChoice:
        choice = CompletionChoice(
            index=index,
            text=self._readers[index].read(delta).content,
            finish_reason=delta.finish_reason,
            logprobs=None if self._request.logprobs is None else self._logprob_writer.completion(delta),
            **self._ids(delta),
        )
        if self._request.return_token_ids and is_first:
            choice.prompt_token_ids = self.prompts[index // self._request.n]
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = delta.prompt_logprobs
        return choice


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
