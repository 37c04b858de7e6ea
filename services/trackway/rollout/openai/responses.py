"""The shared part of both routes' responses: their head, token names, usage, and chunks of a stream."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NotRequired, TypedDict

from trackway.rollout.openai.stream_decoder import Delta
from trackway.rollout.tokenizer import Tokenizer
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


class ResponseBuilder(ABC):
    """Builds the response to one request."""

    prefix: str

    def __init__(self, request: SampledRequest, tokenizer: Tokenizer, prompts: Sequence[list[int]]) -> None:
        self.prompts = prompts
        self._options, self._tokenizer = request, tokenizer
        self._head: Head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    @property
    def id(self) -> str:
        """The response's id, which is also the `request_id` of its generation."""
        return self._head["id"]

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> OpenAIReply:
        """The complete response, from one delta per choice."""

    @abstractmethod
    def _chunk(self, head: Head, index: int, delta: Delta, is_first: bool) -> OpenAIReply | None:
        """The chunk of a delta, or None if the client has nothing to see."""

    @abstractmethod
    def _counts(self, head: Head) -> OpenAIReply:
        """The usage chunk, which has no choices."""

    async def events(self, arriving: AsyncGenerator[tuple[int, Delta]]) -> AsyncGenerator[str]:
        """The response in chunks."""
        options = self._options.stream_options
        counted = options is not None and options.include_usage
        head: Head = {**self._head, "usage": None} if counted else self._head
        begun, completion_tokens = set[int](), 0
        async with aclosing(arriving):
            async for index, delta in arriving:
                completion_tokens += len(delta.token_ids)
                chunk = self._chunk(head, index, delta, index not in begun)
                begun.add(index)
                if chunk is not None:
                    yield chunk.sent()
        if counted:
            yield self._counts({**self._head, "usage": self._usage(completion_tokens)}).sent()

    def _usage(self, completion_tokens: int) -> Usage:
        prompt_tokens = sum(map(len, self.prompts))
        total = prompt_tokens + completion_tokens
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=total)

    def _ids(self, delta: Delta) -> Ids:
        wanted = self._options.return_token_ids
        return {"token_ids": delta.token_ids, "weight_versions": delta.spans} if wanted else {}

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._options.return_tokens_as_token_ids else self._token_text(token_id)

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
