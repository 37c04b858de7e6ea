"""Parts that completions and chat completions share: head, usage, and the chunks of a stream."""

import json
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NotRequired, TypedDict

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.message_reader import MessageReader
from trackway.model_api.openai.errors import openai_body
from trackway.model_api.openai.logprobs import LogprobWriter
from trackway.model_api.response_builder import ResponseBuilder
from trackway.model_api.sse import event
from trackway.model_api.stream_decoder import Delta
from trackway.wire.errors import TrackwayError
from trackway.wire.openai.replies import OpenAIReply
from trackway.wire.openai.requests import SampledRequest
from trackway.wire.rollout import Usage
from trackway.wire.trajectory import WeightSpan


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
